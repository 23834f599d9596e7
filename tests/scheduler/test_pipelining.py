"""What must hold with several steps under way: the tokens of one at a time, in less time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_rig import VOCAB_SIZE, Rig

from grammars import AnyToken, CompilesAtOnce
from pd_simulation import PDSimulation
from pdcore import (
    FinishReason,
    KVCacheManager,
    Limits,
    LRUBlockPool,
    Request,
    SamplingParams,
    UnifiedScheduler,
    VirtualClock,
)
from pdcore.connector.loopback import LoopbackConnector, LoopbackFabric
from pdcore.kvcache import KVCacheConfig
from pdcore.loop import BatchQueue, step
from pdcore.messages import ModelRunnerOutput
from pdcore.scheduler import SkipCode
from pdcore.testing import Driver, FakeKVRunner
from pipeline_simulation import PipelinedPDEngine, PipelinedSimulation
from simulated_executors import TimedExecutor

randoms = st.randoms(use_true_random=False)
# A life is a few hundred steps, each audited; few of them are enough here. `make soak` runs many.
lives = settings(max_examples=settings.default.max_examples // 5)


@pytest.mark.parametrize("depth", [1, 2, 3])
@lives
@given(random=randoms)
def test_every_request_gets_its_solo_tokens_at_any_depth(random: Random, depth: int) -> None:
    """Preemption, hits, aborts, grammars, resets and failing steps change no token."""
    PipelinedSimulation(random, depth=depth).run(num_requests=random.randint(1, 12))


@pytest.fixture
def _quiet_log() -> Iterator[None]:
    """Cutting off a peer is worth a warning, but not ten thousand of them."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("_quiet_log")
@pytest.mark.parametrize("depth", [2, 3])
@settings(max_examples=settings.default.max_examples // 10)
@given(random=randoms)
def test_prefill_and_decode_apart_may_both_be_pipelined(random: Random, depth: int) -> None:
    """A bad wire and failing steps on both sides end in solo tokens or a cause."""
    simulation = PDSimulation(random, depth=depth, make_engine=PipelinedPDEngine)
    simulation.run(num_requests=random.randint(1, 12))


def test_adapters_of_rows_that_wait_for_a_token_count() -> None:
    """They run again with the next step, and then beside whoever started meanwhile."""
    grammar = CompilesAtOnce(lambda request: AnyToken(), vocab_size=VOCAB_SIZE)
    rig = Rig(grammar=grammar, limits={"max_loras": 1})
    rig.driver = Driver(rig.scheduler, rig.runner, clock=rig.clock, num_in_flight=2)
    rig.add("one", lora="one", structured_output="any", max_tokens=6)
    rig.scheduler.schedule()
    rig.add("other", lora="other", max_tokens=6)
    assert not rig.scheduler.schedule().rows.size
    assert rig.scheduler.explain("other").code is SkipCode.TOO_MANY_LORAS


@pytest.mark.parametrize("depth", [2, 3])
def test_a_stop_token_whose_kv_is_lost_takes_what_was_drawn_after_it_along(depth: int) -> None:
    """A prefill for hand-over is computed again, and its tokens are those of its solo run."""
    clock = VirtualClock()
    connector = LoopbackConnector(LoopbackFabric(clock=clock), engine_id="p", block_size=4)
    runner = FakeKVRunner(
        block_size=4,
        connector=connector.worker_side(),
        script=lambda name, position: 7 if (name, position) == ("asks", 11) else None,
    )
    spec = runner.get_kv_cache_spec()
    runner.initialize_from_config(KVCacheConfig(spec=spec, num_blocks=8))
    scheduler = UnifiedScheduler(
        KVCacheManager(LRUBlockPool(8, 4)),
        limits=Limits(max_num_seqs=2, max_num_batched_tokens=64),
        connector=connector.scheduler_side(),
        clock=clock,
    )
    driver = Driver(scheduler, runner, clock=clock, num_in_flight=depth)
    driver.add(Request("first", range(100, 112), sampling=SamplingParams(max_tokens=20)))
    asks = Request(
        "asks",
        range(500, 509),
        sampling=SamplingParams(max_tokens=20, stop_token_ids=(7,)),
        kv_transfer_params={"do_remote_decode": True},
    )
    driver.add(asks)
    got = driver.run()["asks"]
    assert scheduler.stats().num_preemptions
    assert got.token_ids == runner.solo_tokens(asks)
    assert got.end is not None
    assert got.end.kv_transfer_params


@lives
@given(random=randoms)
def test_plans_and_results_may_take_turns_in_any_rhythm(random: Random) -> None:
    """Each request gets all its tokens, the audit holds, and no grammar is passed over.

    Requests come and go in between, and long stretches of one step at a time follow bursts of
    several.
    """
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128)
    block_size = random.choice((1, 2, 4, 16))
    pool = LRUBlockPool(512 // block_size, block_size)
    grammar = CompilesAtOnce(lambda request: AnyToken(), vocab_size=64)
    scheduler = UnifiedScheduler(KVCacheManager(pool), limits=limits, grammar=grammar)
    to_come = {f"r{index}": random.randint(1, 60) for index in range(random.randint(1, 8))}
    wanted, produced = dict(to_come), dict.fromkeys(to_come, 0)
    ends: dict[str, FinishReason] = {}
    is_hasty = False
    while to_come or scheduler.has_requests():
        is_hasty ^= random.random() < 0.05
        if to_come and (random.random() < 0.1 or not scheduler.has_requests()):
            name, max_tokens = to_come.popitem()
            structured = {"structured_output": "any"} if random.random() < 0.3 else {}
            sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **structured)
            prompt = [random.randrange(64) for _ in range(random.randint(1, 40))]
            scheduler.add_request(Request(name, prompt, sampling=sampling))
        if random.random() < 0.01:
            scheduler.abort_requests(random.choice(list(wanted)))
        under_way = scheduler.in_flight
        if not under_way or (is_hasty and len(under_way) < 3 and random.random() < 0.5):
            output = scheduler.schedule()
            bitmask = scheduler.get_grammar_bitmask(output)
            if bitmask is not None:
                constrained = _tenancies(bitmask.rows, bitmask.epochs)
                for plan in under_way:
                    drawing = _tenancies(plan.rows[plan.samples], plan.epochs[plan.samples])
                    assert constrained.isdisjoint(drawing)
        else:
            output = under_way[0]
            rows, epochs = output.rows[output.samples], output.epochs[output.samples]
            tokens = np.full((rows.size, 1), random.randrange(64), np.int32)
            result = ModelRunnerOutput(rows=rows, epochs=epochs, sampled_token_ids=tokens)
            for event in scheduler.update_from_output(output, result).outputs:
                produced[event.request_id] += len(event.new_token_ids)
                if event.finish_reason is not None:
                    ends[event.request_id] = event.finish_reason
        scheduler.check()
    assert ends.keys() == wanted.keys()
    assert set(ends.values()) <= {FinishReason.LENGTH, FinishReason.ABORT}
    for name, reason in ends.items():
        assert reason is FinishReason.ABORT or produced[name] == wanted[name]


def _tenancies(rows: npt.NDArray[np.int32], epochs: npt.NDArray[np.int32]) -> set[Any]:
    return set(zip(rows.tolist(), epochs.tolist(), strict=True))


NUM_STEPS = 60


def steady_rate(
    *, device_s: int, plan_s: int, update_s: int, make_step: Callable[..., Callable[[], Any]]
) -> float:
    """Steps a second on a virtual clock, apart from the first and the last few.

    Args:
        device_s: how long the device takes for a step.
        plan_s, update_s: how long the engine takes to plan one, and to take in its result.
        make_step: makes the loop's body from scheduler and executor.
    """
    clock = VirtualClock()
    runner = FakeKVRunner(block_size=16, num_blocks=64)
    spec = runner.get_kv_cache_spec()
    runner.initialize_from_config(KVCacheConfig(spec=spec, num_blocks=64))
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=512)
    scheduler = UnifiedScheduler(KVCacheManager(LRUBlockPool(64, 16)), limits=limits, clock=clock)
    _slow_down(scheduler, "schedule", clock, plan_s)
    _slow_down(scheduler, "update_from_output", clock, update_s)
    executor = TimedExecutor(runner, clock=clock, step_s=device_s)
    run_step = make_step(scheduler, executor)
    for name in ("a", "b"):
        sampling = SamplingParams(max_tokens=NUM_STEPS)
        scheduler.add_request(Request(name, range(9), sampling=sampling))
    while scheduler.has_requests():
        run_step()
    first, last = executor.starts[5], executor.starts[NUM_STEPS - 5]
    return (NUM_STEPS - 10) / (last - first)


def _slow_down(scheduler: UnifiedScheduler, method: str, clock: VirtualClock, seconds: int) -> None:
    call = getattr(scheduler, method)

    def slow(*args: Any) -> Any:
        clock.advance(seconds)
        return call(*args)

    setattr(scheduler, method, slow)


seconds = st.integers(1, 12)


@settings(max_examples=20)
@given(device_s=seconds, plan_s=seconds, update_s=seconds)
def test_one_step_at_a_time_takes_device_and_engine_in_turn(
    device_s: int, plan_s: int, update_s: int
) -> None:
    """A device that needs T and an engine that needs E make a step every T + E."""
    rate = steady_rate(
        device_s=device_s,
        plan_s=plan_s,
        update_s=update_s,
        make_step=lambda scheduler, executor: lambda: step(scheduler, executor),
    )
    assert rate == pytest.approx(1 / (device_s + plan_s + update_s))


@pytest.mark.parametrize("depth", [2, 3])
@settings(max_examples=20)
@given(device_s=seconds, plan_s=seconds, update_s=seconds)
def test_two_plans_under_way_make_a_step_as_fast_as_the_slower_of_both(
    device_s: int, plan_s: int, update_s: int, depth: int
) -> None:
    """A device that needs T and an engine that needs E make a step every max(T, E)."""
    rate = steady_rate(
        device_s=device_s,
        plan_s=plan_s,
        update_s=update_s,
        make_step=lambda scheduler, executor: BatchQueue(scheduler, executor, depth=depth).step,
    )
    assert rate == pytest.approx(1 / max(device_s, plan_s + update_s))
