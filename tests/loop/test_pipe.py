"""Several plans under way: how the pipe is filled, and drained."""

from __future__ import annotations

import pytest
from loop_engines import QueueRig, make_requests

from pdcore import (
    FinishReason,
    KVCacheManager,
    Limits,
    LRUBlockPool,
    Request,
    SamplingParams,
    UnifiedScheduler,
)
from pdcore.connector.null import NullConnector, NullSchedulerConnector
from pdcore.errors import ConfigError
from pdcore.loop import BatchQueue, step
from pdcore.runner.executor import InProcessExecutor
from pdcore.testing import FakeKVRunner


def test_a_pipe_without_room_for_a_plan_is_refused() -> None:
    """The message gives the number."""
    rig = QueueRig()
    with pytest.raises(ConfigError, match="depth=0"):
        BatchQueue(rig.scheduler, rig.executor, depth=0)


def test_a_pipe_of_one_is_one_step_at_a_time() -> None:
    """The same plans with the same results as of `step`, one by one."""
    rig, other = QueueRig(depth=1), QueueRig()
    for engine in (rig, other):
        engine.add(*make_requests(6))
    while rig.scheduler.has_requests():
        result, expected = rig.queue.step(), step(other.scheduler, other.executor)
        assert result.outputs == expected.outputs
        for column in ("rows", "num_scheduled_tokens", "block_ids", "finished_rows"):
            plans = (engine.executor.executed[-1] for engine in (rig, other))
            assert len({getattr(plan, column).tobytes() for plan in plans}) == 1
        assert len(rig.queue) == 0
    assert not other.scheduler.has_requests()


@pytest.mark.parametrize("depth", [2, 3, 5])
def test_the_pipe_is_filled_before_the_oldest_result_is_waited_for(depth: int) -> None:
    """When somebody first waits, all plans are with the executor; after a step one is missing."""
    num_queued = []
    rig = QueueRig(depth=depth)

    def trouble(place: str) -> None:
        if place == "wait":
            num_queued.append(rig.executor.num_queued)

    rig.executor._trouble = trouble
    rig.add(*make_requests(max_tokens=9))
    for _ in range(4):
        rig.take(rig.queue.step())
        assert len(rig.queue) == depth - 1
    # Each plan is two calls, and each step waits for both calls of the oldest.
    assert num_queued == [2 * depth, 2 * depth - 1] * 4
    rig.run()
    rig.check_solo()


def test_a_plan_that_holds_nothing_is_not_run_and_finished_rows_are_told() -> None:
    """One request of one token: its plan, and one that gives up its row; no third."""
    rig = QueueRig(depth=3)
    rig.add(*make_requests(1, max_tokens=1))
    rig.run()
    for _ in range(3):
        rig.queue.step()
    assert [plan.rows.size for plan in rig.executor.executed] == [1, 0]
    assert rig.executor.executed[1].finished_rows.size == 1
    rig.check_solo()


class Talkative(NullConnector):
    """Has orders for the workers in every plan, as a connector that waits for data."""

    def scheduler_side(self) -> NullSchedulerConnector:
        side = super().scheduler_side()
        side.build_connector_meta = lambda output: "anything new?"  # type: ignore[method-assign]
        return side


@pytest.mark.parametrize("depth", [2, 3])
def test_orders_alone_keep_no_plan_under_way(depth: int) -> None:
    """They go out with each plan, and the loop sleeps when only they are left."""
    rig = QueueRig(depth=depth, connector=Talkative())
    rig.add(*make_requests(2))
    num_steps = 0
    while rig.scheduler.has_requests():
        rig.take(rig.queue.step())
        num_steps += 1
        assert num_steps < 20
    assert (len(rig.queue), rig.scheduler.has_work()) == (0, True)
    rig.queue.step()
    assert (len(rig.queue), rig.scheduler.has_work()) == (0, False)
    rig.check_solo()


def test_an_engine_with_nothing_to_do_steps_without_its_executor() -> None:
    """The result is empty, and carries the end of a request that was aborted in the queue."""
    rig = QueueRig()
    assert rig.queue.step().request_ids == []
    rig.add(*make_requests(1))
    rig.scheduler.abort_requests(["r0"])
    (output,) = rig.queue.step().outputs
    assert output.finish_reason is FinishReason.ABORT
    assert rig.executor.executed == []
    assert not rig.scheduler.has_requests()


def test_aborts_are_asked_for_once_a_step_and_end_in_its_result() -> None:
    """Also with later plans under way that name the request."""
    asked: list[list[str]] = [[], ["r1", "unknown"], []]
    rig = QueueRig(aborts=lambda: asked.pop(0))
    rig.add(*make_requests(2))
    rig.take(rig.queue.step())
    ends = [o for o in rig.queue.step().outputs if o.finish_reason is not None]
    assert [(end.request_id, end.finish_reason) for end in ends] == [("r1", FinishReason.ABORT)]
    assert len(asked) == 1


def test_drain_takes_in_what_is_under_way_and_plans_nothing() -> None:
    """Results come in the order of plans, and afterwards nothing is in flight."""
    rig = QueueRig(depth=3)
    rig.add(*make_requests())
    rig.take(rig.queue.step())
    num_executed = len(rig.executor.executed) + rig.executor.num_queued // 2
    step_ids = []
    for result in rig.queue.drain():
        step_ids.append(result.step_id)
        rig.take(result)
    assert step_ids == [2, 3]
    assert len(rig.executor.executed) == num_executed
    assert (len(rig.queue), rig.scheduler.stats().num_in_flight) == (0, 0)
    rig.run()
    rig.check_solo()


@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize("num_steps", range(1, 9))
def test_plans_that_are_given_up_leave_no_hole_that_stops_the_engine(
    block_size: int, num_steps: int
) -> None:
    """However many blocks the plans under way fill, and wherever they end."""
    num_blocks = 64
    manager = KVCacheManager(LRUBlockPool(num_blocks, block_size))
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=16)
    scheduler = UnifiedScheduler(manager, limits=limits)
    runner = FakeKVRunner(block_size=block_size, num_blocks=num_blocks)
    executor = InProcessExecutor(lambda: runner, num_blocks=num_blocks)
    executor.start()
    try:
        for depth in (3, 6, 8):
            queue = BatchQueue(scheduler, executor, depth=depth)
            for number in range(2):
                sampling = SamplingParams(max_tokens=4 + number)
                scheduler.add_request(Request(f"r{number}", range(1, 3), sampling=sampling))
            for _ in range(num_steps):
                if scheduler.has_requests():
                    queue.step()
            queue.abandon()
            scheduler.check()
            for _ in range(60):
                if scheduler.has_requests():
                    queue.step()
            assert not scheduler.has_requests()
            scheduler.check()
    finally:
        executor.close()
