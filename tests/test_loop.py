"""The engine loop: steps that fail, loops that sleep."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from pdcore import (
    FinishReason,
    KVCacheManager,
    Limits,
    LRUBlockPool,
    MonotonicClock,
    Request,
    SamplingParams,
    SchedulerOutput,
    UnifiedScheduler,
)
from pdcore.connector.loopback import LoopbackConnector, LoopbackFabric
from pdcore.errors import ExecutorError
from pdcore.loop import Waker, step, wait
from pdcore.runner.executor import InProcessExecutor
from pdcore.testing import FakeKVRunner

BLOCK_SIZE, NUM_BLOCKS = 4, 32


def make_scheduler(**kwargs: object) -> UnifiedScheduler:
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=100)
    return UnifiedScheduler(
        KVCacheManager(LRUBlockPool(NUM_BLOCKS, BLOCK_SIZE)), limits=limits, **kwargs
    )


@pytest.fixture
def failing_steps() -> set[int]:
    """Ids of steps that are to fail on the worker."""
    return set()


@pytest.fixture
def runner(failing_steps: set[int]) -> FakeKVRunner:
    def fault(output: SchedulerOutput) -> Exception | None:
        return RuntimeError("the device hiccuped") if output.step_id in failing_steps else None

    return FakeKVRunner(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, step_fault=fault)


@pytest.fixture
def executor(runner: FakeKVRunner) -> Iterator[InProcessExecutor]:
    executor = InProcessExecutor(lambda: runner, num_blocks=NUM_BLOCKS)
    executor.start()
    yield executor
    executor.close()


@pytest.mark.parametrize("first_failure", range(1, 4))
def test_a_step_that_fails_on_the_worker_is_run_again(
    executor: InProcessExecutor,
    runner: FakeKVRunner,
    failing_steps: set[int],
    first_failure: int,
) -> None:
    """The error names the cause, and no request loses or repeats a token."""
    scheduler = make_scheduler()
    failing_steps.update((first_failure, first_failure + 2))
    requests = [
        Request(f"r{i}", range(1, 12 + i), sampling=SamplingParams(max_tokens=5)) for i in range(3)
    ]
    for request in requests:
        scheduler.add_request(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    errors = []
    while scheduler.has_requests():
        try:
            result = step(scheduler, executor)
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
