"""The engine loops: steps that fail, several under way, loops that sleep."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import attrs
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
from pdcore.connector.base import KVConnector
from pdcore.connector.loopback import LoopbackConnector, LoopbackFabric
from pdcore.connector.null import NullConnector, NullSchedulerConnector
from pdcore.errors import ConfigError, ExecutorDead, ExecutorError, OutputMismatch
from pdcore.kvcache import KVCacheConfig
from pdcore.loop import BatchQueue, Waker, step, wait
from pdcore.messages import GrammarBitmask, StepResult, TransferReport
from pdcore.runner.executor import InProcessExecutor
from pdcore.testing import FakeKVRunner
from simulated_executors import SimulatedExecutor, Trouble

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


def make_requests(num_requests: int = 3, *, max_tokens: int = 5) -> list[Request]:
    sampling = SamplingParams(max_tokens=max_tokens)
    return [Request(f"r{i}", range(1, 12 + i), sampling=sampling) for i in range(num_requests)]


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


def test_aborts_are_asked_for_after_the_model_ran(executor: InProcessExecutor) -> None:
    """A request that is aborted while the model runs ends in that step's result."""
    scheduler = make_scheduler()
    scheduler.add_request(Request("r", [1, 2, 3]))
    result = step(scheduler, executor, aborts=lambda: ["r"])
    (output,) = result.outputs
    assert (output.request_id, output.finish_reason) == ("r", FinishReason.ABORT)
    assert not scheduler.has_requests()


class QueueRig:
    """A batch queue over an executor that runs a call only when somebody waits for it."""

    def __init__(
        self,
        *,
        depth: int = 2,
        trouble: Trouble = lambda place: None,
        make_executor: Callable[..., SimulatedExecutor] = SimulatedExecutor,
        connector: KVConnector | None = None,
        **kwargs: Any,
    ) -> None:
        self.runner = FakeKVRunner(
            block_size=BLOCK_SIZE,
            connector=None if connector is None else connector.worker_side(),
        )
        spec = self.runner.get_kv_cache_spec()
        self.runner.initialize_from_config(KVCacheConfig(spec=spec, num_blocks=NUM_BLOCKS))
        side = None if connector is None else connector.scheduler_side()
        self.scheduler = make_scheduler(connector=side)
        self.executor = make_executor(self.runner, trouble=trouble)
        self.queue = BatchQueue(self.scheduler, self.executor, depth=depth, **kwargs)
        self.requests: list[Request] = []
        self.tokens: dict[str, list[int]] = {}

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add_request(request)
            self.requests.append(request)
            self.tokens[request.request_id] = []

    def take(self, result: StepResult) -> None:
        self.scheduler.check()
        for output in result.outputs:
            self.tokens[output.request_id].extend(output.new_token_ids)

    def run(self) -> None:
        while self.scheduler.has_requests():
            self.take(self.queue.step())

    def check_solo(self) -> None:
        assert self.tokens == {r.request_id: self.runner.solo_tokens(r) for r in self.requests}


def once(place: str, error: BaseException, *, after: int = 0) -> Trouble:
    """Goes wrong at one place, once, when it was passed so many times."""
    passed = iter(range(1000))

    def trouble(where: str) -> BaseException | None:
        return error if where == place and next(passed) == after else None

    return trouble


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
