"""Steps that fail, whatever the loop; loops that sleep."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from loop_engines import BLOCK_SIZE, NUM_BLOCKS, QueueRig, make_requests, make_scheduler

from pdcore import FinishReason, MonotonicClock, Request, SamplingParams
from pdcore.connector.loopback import LoopbackConnector, LoopbackFabric
from pdcore.errors import ConfigError, ExecutorError, OutputMismatch
from pdcore.loop import BatchQueue, Waker, step, wait
from pdcore.messages import GrammarBitmask, StepResult
from pdcore.runner.executor import InProcessExecutor
from pdcore.testing import FakeKVRunner


@pytest.mark.parametrize("depth", [None, 1, 2, 3])
@pytest.mark.parametrize("first_failure", range(1, 4))
def test_a_step_that_fails_on_the_worker_is_run_again(
    executor: InProcessExecutor,
    runner: FakeKVRunner,
    failing_steps: set[int],
    first_failure: int,
    depth: int | None,
) -> None:
    """The error names the cause, and no request loses or repeats a token."""
    scheduler = make_scheduler()
    run_step: Callable[[], StepResult] = lambda: step(scheduler, executor)  # noqa: E731
    if depth is not None:
        run_step = BatchQueue(scheduler, executor, depth=depth).step
    failing_steps.update((first_failure, first_failure + 3))
    requests = make_requests()
    for request in requests:
        scheduler.add_request(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    errors = []
    while scheduler.has_requests():
        try:
            result = run_step()
        except ExecutorError as error:
            errors.append(str(error))
            continue
        finally:
            scheduler.check()
        for output in result.outputs:
            tokens[output.request_id].extend(output.new_token_ids)
    assert len(errors) == 2
    assert all("the device hiccuped" in error for error in errors)
    assert tokens == {r.request_id: runner.solo_tokens(r) for r in requests}


def test_a_runner_in_place_of_its_executor_is_refused(runner: FakeKVRunner) -> None:
    """Both loops say what they need, and nothing was planned."""
    scheduler = make_scheduler()
    scheduler.add_request(make_requests()[0])
    with pytest.raises(ConfigError, match=r"executor=<.*: pass an instance of Executor"):
        step(scheduler, runner)
    with pytest.raises(ConfigError, match=r"executor=<.*: pass an instance of Executor"):
        BatchQueue(scheduler, runner)
    assert not scheduler.in_flight


def test_aborts_are_asked_for_after_the_model_ran(executor: InProcessExecutor) -> None:
    """A request that is aborted while the model runs ends in that step's result."""
    scheduler = make_scheduler()
    scheduler.add_request(Request("r", [1, 2, 3]))
    result = step(scheduler, executor, aborts=lambda: ["r"])
    (output,) = result.outputs
    assert (output.request_id, output.finish_reason) == ("r", FinishReason.ABORT)
    assert not scheduler.has_requests()


def test_a_loop_with_nothing_to_do_sleeps_until_it_is_woken() -> None:
    """wait() returns when another thread calls the waker, long before its limit."""
    scheduler, waker = make_scheduler(), Waker()
    timer = threading.Timer(0.05, waker)
    timer.start()
    started = time.monotonic()
    wait(scheduler, waker, clock=scheduler.clock, max_wait_s=60)
    assert time.monotonic() - started < 30
    timer.join()


def test_a_loop_with_work_does_not_sleep() -> None:
    """A request in the queue is reason enough not to wait."""
    scheduler = make_scheduler()
    scheduler.add_request(Request("r", [1, 2, 3]))
    wait(scheduler, Waker(), clock=scheduler.clock, max_wait_s=60)


def test_a_loop_with_a_plan_under_way_does_not_sleep() -> None:
    """Its result is work, though no request is left that it could serve."""
    rig = QueueRig()
    rig.add(*make_requests(1))
    rig.queue.step()
    rig.scheduler.abort_requests(["r0"])
    rig.queue.step()
    assert (len(rig.queue), rig.scheduler.stats().num_running) == (1, 0)
    wait(rig.scheduler, Waker(), clock=rig.scheduler.clock, max_wait_s=60)


def test_an_engine_that_only_holds_a_lease_wakes_once_when_it_ends(
    executor: InProcessExecutor, runner: FakeKVRunner
) -> None:
    """Held blocks cost no steps, and are free as soon as their lease has run out."""
    fabric = LoopbackFabric(clock=MonotonicClock())
    connector = LoopbackConnector(fabric, engine_id="p", block_size=BLOCK_SIZE, lease_s=0.5)
    waker = Waker()
    side = connector.scheduler_side()
    side.start(clock=MonotonicClock(), notify=waker)
    scheduler = make_scheduler(connector=side)
    params = {"do_remote_decode": True}
    sampling = SamplingParams(max_tokens=1)
    scheduler.add_request(Request("r", range(9), sampling=sampling, kv_transfer_params=params))
    (output,) = step(scheduler, executor).outputs
    assert output.kv_transfer_params is not None
    granted = time.monotonic()
    num_steps = 0
    while scheduler.has_requests():
        assert scheduler.stats().num_held_for_peers == 1
        wait(scheduler, waker, clock=scheduler.clock, max_wait_s=60)
        step(scheduler, executor)
        num_steps += 1
    assert time.monotonic() - granted >= 0.5
    # One to give up the row, one at the end of the lease; clocks may round once.
    assert num_steps <= 4


class Editing(FakeKVRunner):
    """Hands back whatever ``edit`` makes of each result."""

    def __init__(self, edit: Callable[[Any], Any]) -> None:
        super().__init__(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
        self._edit = edit

    def sample_tokens(self, bitmask: GrammarBitmask | None) -> Any:
        return self._edit(super().sample_tokens(bitmask))


BAD_RESULTS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda result: None,
    "other epochs": lambda result: attrs.evolve(result, epochs=result.epochs + 1),
    "wide tokens": lambda result: attrs.evolve(
        result, sampled_token_ids=result.sampled_token_ids.astype("int64") + 2**32
    ),
    "fractions": lambda result: attrs.evolve(
        result, sampled_token_ids=result.sampled_token_ids + 0.5
    ),
    "lists": lambda result: attrs.evolve(result, rows=result.rows.tolist()),
}


@pytest.mark.parametrize("depth", [None, 1, 2])
@pytest.mark.parametrize("kind", BAD_RESULTS)
def test_one_bad_result_is_refused_by_name_and_its_step_runs_again(
    kind: str, depth: int | None
) -> None:
    """Neither loop is stuck by what a worker hands back once, and the tokens are the same."""
    num_results = 0

    def edit(result: Any) -> Any:
        nonlocal num_results
        num_results += 1
        return BAD_RESULTS[kind](result) if num_results == 2 else result

    def serve(runner: FakeKVRunner) -> tuple[dict[str, list[int]], int]:
        scheduler, tokens, num_refused = make_scheduler(), {}, 0
        executor = InProcessExecutor(lambda: runner, num_blocks=NUM_BLOCKS)
        executor.start()
        queue = None if depth is None else BatchQueue(scheduler, executor, depth=depth)
        try:
            for request in make_requests():
                scheduler.add_request(request)
            for _ in range(100):
                try:
                    result = step(scheduler, executor) if queue is None else queue.step()
                except (OutputMismatch, ExecutorError):
                    num_refused += 1
                    continue
                for event in result.outputs:
                    tokens.setdefault(event.request_id, []).extend(event.new_token_ids)
                if not scheduler.has_requests():
                    return tokens, num_refused
        finally:
            executor.close()
        raise AssertionError("the engine is stuck")

    expected, _ = serve(FakeKVRunner(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS))
    assert serve(Editing(edit)) == (expected, 1)
