"""`Driver`: it ends, collects, and catches a scheduler that breaks its word."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcore import KVCacheManager, Limits, LRUBlockPool, UnifiedScheduler, VirtualClock
from pdcore.connector import ExternalMatch, SchedulerConnector
from pdcore.connector.null import NullSchedulerConnector
from pdcore.errors import ConfigError, RequestError
from pdcore.kvcache import KVCacheConfig
from pdcore.messages import ModelRunnerOutput, RequestOutput, SchedulerOutput, StepResult
from pdcore.request import FinishReason, Request, SamplingParams
from pdcore.runner.executor import InProcessExecutor
from pdcore.testing import DriveError, Driver, FakeKVRunner, run_to_completion
from pdcore.testing.strategies import Abort, Add, Operation, traces

BLOCK_SIZE = 4


def make_runner(num_blocks: int = 40, vocab_size: int = 32) -> FakeKVRunner:
    """A runner of small blocks in which any token may be drawn."""
    runner = FakeKVRunner(block_size=BLOCK_SIZE, vocab_size=vocab_size, num_special_tokens=0)
    config = KVCacheConfig(spec=runner.get_kv_cache_spec(), num_blocks=num_blocks)
    runner.initialize_from_config(config)
    return runner


def make_scheduler(
    make: Callable[..., UnifiedScheduler] = UnifiedScheduler,
    *,
    num_blocks: int = 40,
    clock: VirtualClock | None = None,
    connector: SchedulerConnector | None = None,
) -> UnifiedScheduler:
    """The reference scheduler over a small pool."""
    limits = Limits(max_num_seqs=3, max_num_batched_tokens=12, max_model_len=64)
    manager = KVCacheManager(LRUBlockPool(num_blocks, BLOCK_SIZE))
    return make(manager, limits=limits, clock=clock or VirtualClock(), connector=connector)


def make_requests(n: int) -> list[Request]:
    """Prompts of different lengths with one start."""
    return [
        Request(f"r{i}", list(range(9 + i)), sampling=SamplingParams(max_tokens=3 + i))
        for i in range(n)
    ]


@pytest.mark.parametrize("num_in_flight", [1, 2, 3])
def test_every_request_gets_its_solo_tokens(num_in_flight: int):
    """Whatever the number of plans in flight, the oracle's tokens come out."""
    runner, requests = make_runner(), make_requests(6)
    got = run_to_completion(make_scheduler(), runner, requests, num_in_flight=num_in_flight)
    assert {name: one.token_ids for name, one in got.items()} == {
        request.request_id: runner.solo_tokens(request) for request in requests
    }


def test_an_executor_serves_as_well_as_a_runner():
    """The same loop runs plans on another thread."""
    executor = InProcessExecutor(lambda: FakeKVRunner(block_size=BLOCK_SIZE), num_blocks=40)
    executor.start()
    try:
        [request] = make_requests(1)
        got = run_to_completion(make_scheduler(), executor, [request])
    finally:
        executor.close()
    assert got["r0"].token_ids == FakeKVRunner(block_size=BLOCK_SIZE).solo_tokens(request)


@settings(max_examples=40)
@given(traces(), st.integers(1, 2))
def test_a_trace_ends_with_one_end_for_each_request(trace: list[Operation], num_in_flight: int):
    """Requests that are aborted at any point get a beginning of their solo tokens."""
    runner = make_runner(num_blocks=14)
    driver = Driver(make_scheduler(num_blocks=14), runner, num_in_flight=num_in_flight)
    for operation in trace:
        if isinstance(operation, Add):
            driver.add(operation.request)
        elif isinstance(operation, Abort):
            driver.abort([operation.request_id])
        else:
            driver.step(aborts=operation.aborts)
    for one in driver.run().values():
        solo = runner.solo_tokens(one.request, max_model_len=64)
        assert one.token_ids == solo[: len(one.token_ids)]
        if one.finish_reason is not FinishReason.ABORT:
            assert one.token_ids == solo


class NeverReady(NullSchedulerConnector):
    """Cannot say yet what it has, and wants to be asked in every step."""

    def get_num_new_matched_tokens(
        self, request: Request, num_local_tokens: int
    ) -> ExternalMatch | None:
        return None


def test_it_moves_the_clock_when_only_time_can_help():
    """A request that waits for the outside ends at its deadline, without a wait."""
    clock = VirtualClock()
    scheduler = make_scheduler(clock=clock, connector=NeverReady())
    late = Request("late", [1, 2], deadline=50.0)
    got = run_to_completion(scheduler, make_runner(), [late], clock=clock)
    assert got["late"].finish_reason is FinishReason.TIMEOUT
    assert clock.now() == 50.0


def test_it_gives_up_when_nothing_moves():
    """A stall is an error that says what every unfinished request waits for."""
    scheduler = make_scheduler()
    scheduler.pause()
    driver = Driver(scheduler, make_runner(), max_idle_steps=3)
    driver.add(make_requests(1)[0])
    with pytest.raises(DriveError, match=r"3 steps in a row did nothing.*'r0'"):
        driver.run()


def test_an_id_may_come_again_after_its_end():
    """The second request under an id is counted on its own; a live id is refused."""
    runner, scheduler = make_runner(), make_scheduler()
    [request] = make_requests(1)
    driver = Driver(scheduler, runner)
    driver.add(request)
    with pytest.raises(RequestError):
        driver.add(request)
    driver.run()
    driver.add(request)
    assert driver.run()["r0"].token_ids == runner.solo_tokens(request)


class EndsTwice(UnifiedScheduler):
    """Tells of every end twice."""

    def update_from_output(
        self, output: SchedulerOutput, model_output: ModelRunnerOutput
    ) -> StepResult:
        result = super().update_from_output(output, model_output)
        self._again = tuple(result.finished.values())
        return result

    def drain(self) -> tuple[RequestOutput, ...]:
        return (*super().drain(), *self._again)


class ForgetsEnds(UnifiedScheduler):
    """Never says that a request ended."""

    def update_from_output(
        self, output: SchedulerOutput, model_output: ModelRunnerOutput
    ) -> StepResult:
        result = super().update_from_output(output, model_output)
        result.finished = {
            index: attrs.evolve(end, finish_reason=None) for index, end in result.finished.items()
        }
        return result


class NamesStrangers(UnifiedScheduler):
    """Tells of a request that nobody added."""

    def drain(self) -> tuple[RequestOutput, ...]:
        return (RequestOutput(request_id="stranger", finish_reason=FinishReason.STOP),)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (EndsTwice, "after the end of the request"),
        (ForgetsEnds, "never told to end"),
        (NamesStrangers, "'stranger', which was never added"),
    ],
)
def test_a_scheduler_that_breaks_its_word_is_caught(broken: type[UnifiedScheduler], message: str):
    """Two ends, no end, and an end of a stranger are errors."""
    with pytest.raises(DriveError, match=message):
        run_to_completion(make_scheduler(broken), make_runner(), make_requests(2))


def test_at_least_one_plan_is_in_flight():
    """Zero plans in flight would be no loop."""
    with pytest.raises(ConfigError, match="num_in_flight=0"):
        Driver(make_scheduler(), make_runner(), num_in_flight=0)
