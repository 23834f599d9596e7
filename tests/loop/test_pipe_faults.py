"""Several plans under way, and one goes wrong: the pipe is emptied, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any

import attrs
import pytest
from loop_engines import BLOCK_SIZE, QueueRig, make_requests, make_scheduler

from pdcore import MonotonicClock, SchedulerOutput
from pdcore.connector.loopback import LoopbackConnector, LoopbackFabric
from pdcore.errors import ExecutorDead, ExecutorError, OutputMismatch
from pdcore.loop import BatchQueue
from pdcore.messages import GrammarBitmask, TransferReport
from pdcore.runner.executor import InProcessExecutor
from simulated_executors import SimulatedExecutor, Trouble


def once(place: str, error: BaseException, *, after: int = 0) -> Trouble:
    """Goes wrong at one place, once, when it was passed so many times."""
    passed = iter(range(1000))

    def trouble(where: str) -> BaseException | None:
        return error if where == place and next(passed) == after else None

    return trouble


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    ("place", "error"),
    [
        *((place, ExecutorError("no")) for place in ("submit", "execute_model", "executed")),
        *((place, ExecutorError("no")) for place in ("sample_tokens", "sampled", "wait")),
        *((place, KeyboardInterrupt()) for place in ("submit", "wait")),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_whatever_goes_wrong_empties_the_pipe_newest_first(
    depth: int, place: str, error: BaseException
) -> None:
    """Nothing runs any more when the first plan is taken back, and no token is lost or doubled."""
    for after in range(6):
        rig = QueueRig(depth=depth, trouble=once(place, error, after=after))
        taken_back: list[int] = []
        abandon = rig.scheduler.abandon

        def recorded(output: SchedulerOutput, **kwargs: Any) -> None:
            if not output.is_empty:
                assert rig.executor.num_queued == 0  # noqa: B023
                taken_back.append(output.step_id)  # noqa: B023
            abandon(output, **kwargs)  # noqa: B023

        rig.scheduler.abandon = recorded  # type: ignore[method-assign]
        rig.add(*make_requests(3, max_tokens=8))
        with pytest.raises(type(error)):
            rig.run()
        assert len(rig.queue) == 0
        assert rig.scheduler.stats().num_in_flight == 0
        assert 1 <= len(taken_back) <= depth
        assert taken_back == sorted(taken_back, reverse=True)
        rig.run()
        rig.check_solo()


@pytest.mark.parametrize("next_call", ["step", "drain", "abandon"])
def test_unwinding_that_is_interrupted_goes_on_with_the_next_call(next_call: str) -> None:
    """A second Ctrl-C comes while the executor finishes what it has: nothing is forgotten."""
    interrupts = [KeyboardInterrupt(), KeyboardInterrupt()]
    rig = QueueRig(trouble=lambda p: interrupts.pop() if p == "wait" and interrupts else None)
    rig.add(*make_requests())
    with pytest.raises(KeyboardInterrupt):
        rig.queue.step()
    assert (len(rig.queue), rig.scheduler.stats().num_in_flight) == (2, 2)
    if next_call == "step":
        rig.take(rig.queue.step())
        assert len(rig.queue) == 1
    elif next_call == "drain":
        assert list(rig.queue.drain()) == []
    else:
        rig.queue.abandon()
        assert rig.scheduler.stats().num_in_flight == 0
    rig.run()
    rig.check_solo()


def test_a_result_that_does_not_answer_its_plan_empties_the_pipe() -> None:
    """Its plan and those behind it are run again."""
    wrong = [True]

    class Wrong(SimulatedExecutor):
        def _sample(self, bitmask: GrammarBitmask | None) -> Any:
            result = super()._sample(bitmask)
            return attrs.evolve(result, epochs=result.epochs + 1) if wrong.pop() else result

    rig = QueueRig(make_executor=Wrong)
    rig.add(*make_requests())
    wrong[:] = [False] * 100 + [True, False]
    rig.take(rig.queue.step())
    with pytest.raises(OutputMismatch):
        rig.queue.step()
    assert len(rig.queue) == 0
    rig.run()
    rig.check_solo()


def test_aborts_that_cannot_be_had_empty_the_pipe() -> None:
    """The error comes through, and the next step begins with what was taken back."""
    answers: list[Any] = [OSError("the socket is gone")]

    def aborts() -> list[str]:
        if answers:
            raise answers.pop()
        return []

    rig = QueueRig(aborts=aborts)
    rig.add(*make_requests())
    with pytest.raises(OSError, match="socket"):
        rig.queue.step()
    assert len(rig.queue) == 0
    rig.run()
    rig.check_solo()


def test_what_connectors_said_in_results_that_are_given_up_is_not_lost() -> None:
    """A report comes once: it is taken in though its step is taken back."""
    fabric = LoopbackFabric(clock=MonotonicClock())
    interrupts: list[KeyboardInterrupt] = []
    rig = QueueRig(
        connector=LoopbackConnector(fabric, engine_id="d", block_size=BLOCK_SIZE),
        trouble=lambda place: interrupts.pop() if place == "wait" and interrupts else None,
    )
    reports = [TransferReport(finished_sending=(f"t{i}",)) for i in range(10)]
    taken: list[TransferReport] = []

    sampled: list[int] = []
    sample_tokens = rig.runner.sample_tokens

    def reporting(bitmask: GrammarBitmask | None) -> Any:
        report = reports[len(sampled)]
        sampled.append(1)
        return attrs.evolve(sample_tokens(bitmask), transfer_report=report)

    rig.runner.sample_tokens = reporting  # type: ignore[method-assign]
    rig.scheduler._core.connector.update_connector_output = taken.append  # type: ignore
    rig.add(*make_requests(1, max_tokens=9))
    rig.take(rig.queue.step())
    interrupts.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        rig.queue.step()
    assert len(sampled) == 3
    assert sorted(report.finished_sending for report in taken) == [("t0",), ("t1",), ("t2",)]


def test_an_executor_that_closes_fails_the_step_and_nothing_stays_in_flight(
    executor: InProcessExecutor,
) -> None:
    """With plans under way; what was not computed can run on a new executor."""
    scheduler = make_scheduler()
    queue = BatchQueue(scheduler, executor, depth=3)
    for request in make_requests():
        scheduler.add_request(request)
    queue.step()
    executor.close()
    with pytest.raises(ExecutorDead):
        queue.step()
    assert (len(queue), scheduler.stats().num_in_flight) == (0, 0)
    assert scheduler.stats().num_running + scheduler.stats().num_waiting == 3
    scheduler.check()


def test_a_future_that_was_cancelled_is_no_reason_to_hang() -> None:
    """An executor may cancel what it will never run."""

    class Cancelling(SimulatedExecutor):
        def _submit(self, job: Callable[[], Any]) -> Any:
            call: Future[Any] = Future()
            call.cancel()
            return call

    rig = QueueRig(make_executor=Cancelling)
    rig.add(*make_requests())
    with pytest.raises(CancelledError):
        rig.queue.step()
    assert (len(rig.queue), rig.scheduler.stats().num_in_flight) == (0, 0)
