"""Ctrl-C in the middle of a plan, or of a result: nothing is half written."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any

import pytest
from loop_engines import BLOCK_SIZE, NUM_BLOCKS, make_requests

from pdcore import KVCacheManager, Limits, LRUBlockPool, UnifiedScheduler
from pdcore.errors import ExecutorError
from pdcore.loop import BatchQueue, step, uninterrupted
from pdcore.messages import SchedulerOutput, StepResult
from pdcore.runner.executor import InProcessExecutor
from pdcore.testing import FakeKVRunner

NUM_POINTS = 40
STATE = ("pdcore/scheduler/", "pdcore/kvcache/")
LOOP = ("pdcore/loop.py",)


class Interrupter:
    """Counts lines as they are run, and sends SIGINT at one of them.

    Args:
        places: the parts of file names whose lines are counted.
        at: the line, counted from 0; -1 for none.
    """

    def __init__(self, places: tuple[str, ...], at: int = -1) -> None:
        self.num_lines = 0
        self._places = places
        self._at = at

    def __enter__(self) -> Interrupter:
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, _: object) -> Any:
        is_ours = any(place in frame.f_code.co_filename for place in self._places)
        return self._line if is_ours else None

    def _line(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            if self.num_lines == self._at:
                signal.raise_signal(signal.SIGINT)
            self.num_lines += 1
        return self._line


class Engine:
    """A pool that is too small for all, so that requests give way to each other.

    Args:
        depth: of the batch queue; 0 for one step at a time.
        failing_step: a step that fails on the worker, or -1.
    """

    def __init__(self, depth: int, *, failing_step: int = -1) -> None:
        def fault(output: SchedulerOutput) -> Exception | None:
            return RuntimeError("the device hiccuped") if output.step_id == failing_step else None

        self.runner = FakeKVRunner(block_size=BLOCK_SIZE, step_fault=fault)
        self.executor = InProcessExecutor(lambda: self.runner, num_blocks=NUM_BLOCKS)
        self.executor.start()
        self.scheduler = UnifiedScheduler(
            KVCacheManager(LRUBlockPool(10, BLOCK_SIZE)),
            limits=Limits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=100),
        )
        self.requests = make_requests(3, max_tokens=8)
        for request in self.requests:
            self.scheduler.add_request(request)
        # What the scheduler says, since one result may be lost on its way to the application.
        self.results: list[StepResult] = []
        update = self.scheduler.update_from_output

        def noted(*arguments: Any) -> StepResult:
            self.results.append(update(*arguments))
            return self.results[-1]

        self.scheduler.update_from_output = noted  # type: ignore[method-assign]
        self._queue = BatchQueue(self.scheduler, self.executor, depth=depth) if depth else None

    def turn(self) -> None:
        if self._queue is None:
            step(self.scheduler, self.executor)
        else:
            self._queue.step()

    def run(self) -> None:
        while self.scheduler.has_requests():
            self.turn()

    def check(self) -> None:
        """All have the tokens of their solo runs, and one end each; the pool is as it was."""
        self.scheduler.check()
        tokens: dict[str, list[int]] = {request.request_id: [] for request in self.requests}
        ends = []
        for output in (output for result in self.results for output in result.outputs):
            tokens[output.request_id] += output.new_token_ids
            ends += [output.request_id] * (output.finish_reason is not None)
        solo = {it.request_id: self.runner.solo_tokens(it) for it in self.requests}
        assert tokens == solo
        assert sorted(ends) == sorted(solo)
        assert self.scheduler.stats().num_free_blocks == 9


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_an_interrupt_at_any_line_loses_nothing(depth: int) -> None:
    """Of the scheduler's and of the block manager's: the loop raises it, and goes on."""

    def interrupted_at(line: int) -> int:
        engine = Engine(depth)
        try:
            with Interrupter(STATE, line) as interrupter:
                try:
                    while engine.scheduler.in_flight or engine.scheduler.has_requests():
                        engine.turn()
                except KeyboardInterrupt:
                    assert line >= 0
            engine.run()
            engine.check()
        finally:
            engine.executor.close()
        return interrupter.num_lines

    num_lines = interrupted_at(-1)
    assert num_lines > 100 * NUM_POINTS
    for point in range(NUM_POINTS):
        interrupted_at(point * num_lines // NUM_POINTS)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_an_interrupt_at_any_line_of_a_loop_that_cleans_up_loses_nothing(depth: int) -> None:
    """A step fails, and the loop is interrupted before, while or after it takes that back.

    The application is told of both, and of nothing else.
    """

    def interrupted_at(line: int) -> int:
        engine = Engine(depth, failing_step=3)
        told: list[str] = []
        try:
            with Interrupter(LOOP, line) as interrupter:
                while engine.scheduler.in_flight or engine.scheduler.has_requests():
                    try:
                        engine.turn()
                    except KeyboardInterrupt:
                        told.append("interrupt")
                    except ExecutorError as error:
                        told.append(str(error))
            engine.check()
        finally:
            engine.executor.close()
        assert told.count("interrupt") == (line >= 0)
        # The plan may have been taken back before it came to fail, or the interrupt hid it.
        failures = [what for what in told if what != "interrupt"]
        assert len(failures) <= 1
        assert all("the device hiccuped" in failure for failure in failures)
        return interrupter.num_lines

    num_lines = interrupted_at(-1)
    assert num_lines > 100
    # Every line of the loop is run several times in each life.
    for line in range(0, num_lines, 3):
        interrupted_at(line)


def test_an_interrupt_comes_at_the_end_of_the_block() -> None:
    """Once, however often it came; and the handler is what it was."""
    handler = signal.getsignal(signal.SIGINT)
    seen = []

    def go_on() -> None:
        with uninterrupted():
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)
                seen.append("went on")

    with pytest.raises(KeyboardInterrupt):
        go_on()
    assert seen == ["went on"] * 2
    assert signal.getsignal(signal.SIGINT) is handler


def test_other_threads_and_ignored_interrupts_are_left_alone() -> None:
    """Only the main thread may set handlers, and one that does nothing need not wait."""
    raised: list[BaseException] = []

    def elsewhere() -> None:
        try:
            with uninterrupted():
                pass
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert raised == []
