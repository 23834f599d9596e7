"""Faults that users of inference engines met in their schedulers, each as its smallest scenario."""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from harness import Engine, some_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcore.clock import VirtualClock
from pdcore.connector.base import ExternalMatch, FinishedBlocks, HandOver, KVConnector, KVLoad
from pdcore.connector.loopback import LoopbackConnector, LoopbackFabric, LoopbackFaults
from pdcore.connector.null import NullSchedulerConnector, NullWorkerConnector
from pdcore.errors import DuplicateRequest, InvalidRequest, SchedulerStalled
from pdcore.messages import LoadFailure, TransferKey, TransferReport
from pdcore.request import FinishReason, Request, RequestStatus, SamplingParams
from pdcore.scheduler import (
    FCFS,
    Admission,
    AdmissionContext,
    GrammarBackend,
    GrammarMatcher,
    Priority,
    SkipCode,
)

PIPELINE_DEPTHS = [1, 2, 3]


# A1


def test_a1_a_prompt_larger_than_the_pool_is_refused_and_nobody_waits_behind_it() -> None:
    """A prompt that no pool state could ever hold is refused when added, with both numbers."""
    engine = Engine(num_usable_blocks=49, max_model_len=2048)
    with pytest.raises(InvalidRequest, match=r"needs 63 blocks; the pool has 49"):
        engine.add("too long", 1002)
    for index in range(4):
        engine.add(f"short {index}", 8)
    engine.run()
    engine.assert_as_if_alone()
    engine.assert_idle()


def test_a1_a_prompt_that_fills_the_pool_runs_and_one_token_more_is_refused() -> None:
    """The limit is the usable blocks exactly: the null block is not counted, no block is kept."""
    engine = Engine(num_usable_blocks=49, max_model_len=2048)
    engine.add("full", 49 * 16, max_tokens=1)
    engine.run()
    engine.assert_as_if_alone()
    with pytest.raises(InvalidRequest):
        engine.add("over", 49 * 16 + 1, max_tokens=1)


@settings(max_examples=40)
@given(
    block_size=st.sampled_from([1, 4, 16]),
    num_usable_blocks=st.integers(1, 12),
    num_prompt_tokens=st.integers(1, 200),
    max_model_len=st.sampled_from([40, 200]),
)
def test_a1_whatever_is_accepted_produces_a_token(
    block_size: int, num_usable_blocks: int, num_prompt_tokens: int, max_model_len: int
) -> None:
    """A prompt is accepted exactly if blocks and model length suffice for it and one token."""
    engine = Engine(
        num_usable_blocks=num_usable_blocks,
        block_size=block_size,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_model_len=max_model_len,
    )
    fits = num_prompt_tokens <= num_usable_blocks * block_size
    if fits and num_prompt_tokens < max_model_len:
        engine.add("x", num_prompt_tokens, max_tokens=1)
        engine.run()
        engine.assert_as_if_alone()
    else:
        with pytest.raises(InvalidRequest):
            engine.add("x", num_prompt_tokens, max_tokens=1)


# A2


@pytest.mark.parametrize("num_in_flight", PIPELINE_DEPTHS)
def test_a2_a_lone_request_that_outgrows_the_pool_ends_with_capacity(num_in_flight: int) -> None:
    """It keeps the tokens that the pool had room for, and never preempts itself."""
    engine = Engine(
        num_usable_blocks=63, max_model_len=1024, max_num_batched_tokens=256, max_num_seqs=8
    )
    engine.add("x", 1000, max_tokens=24)
    engine.run(num_in_flight=num_in_flight)
    # 1008 tokens have KV; the one drawn from the last of them needs none.
    assert engine.reason("x") is FinishReason.CAPACITY
    assert engine.tokens["x"] == engine.solo("x")[:9]
    assert engine.end("x").cause is not None
    assert engine.scheduler.stats().num_preemptions == 0
    engine.assert_idle()


@settings(max_examples=20)
@given(
    num_usable_blocks=st.integers(1, 6),
    num_prompt_tokens=st.integers(1, 24),
    max_tokens=st.integers(1, 40),
    num_in_flight=st.integers(1, 3),
)
def test_a2_no_lone_request_ever_runs_a_token_twice(
    num_usable_blocks: int, num_prompt_tokens: int, max_tokens: int, num_in_flight: int
) -> None:
    """Alone in any pool, a request computes each token once and ends with length or capacity."""
    engine = Engine(num_usable_blocks=num_usable_blocks, block_size=4)
    room = 4 * num_usable_blocks
    if num_prompt_tokens > room:
        return
    engine.add("x", num_prompt_tokens, max_tokens=max_tokens)
    engine.run(num_in_flight=num_in_flight)
    num_tokens = min(max_tokens, room + 1 - num_prompt_tokens)
    assert engine.tokens["x"] == engine.solo("x")[:num_tokens]
    is_cut = num_tokens < max_tokens
    assert engine.reason("x") is (FinishReason.CAPACITY if is_cut else FinishReason.LENGTH)
    num_computed = engine.scheduler.stats().num_scheduled_tokens
    assert num_computed == num_prompt_tokens + num_tokens - 1
    engine.assert_idle()


# A3


def test_a3_a_prompt_is_admitted_only_when_all_of_it_fits() -> None:
    """A first chunk that fits is no reason to admit a prompt whose rest does not."""
    engine = Engine(num_usable_blocks=20, max_num_batched_tokens=64, max_num_seqs=8)
    engine.add("r1", 216, max_tokens=9)
    while not engine.tokens["r1"]:
        engine.step()
    engine.add("r2", 160, max_tokens=4)
    while engine.scheduler.status("r1") is not None:
        assert engine.step() == {"r1": 1}
        skip = engine.scheduler.explain("r2")
        if engine.scheduler.status("r1") is not None:
            assert (skip.code, skip.needed, skip.available) == (SkipCode.NO_BLOCKS, 10, 6)
    engine.run()
    engine.assert_as_if_alone()
    assert engine.scheduler.stats().num_preemptions == 0
    assert engine.scheduler.stats().num_scheduled_tokens == (216 + 8) + (160 + 3)


@settings(max_examples=20)
@given(
    prompts=st.lists(st.integers(1, 80), min_size=2, max_size=8),
    budget=st.sampled_from([8, 16, 64]),
    max_tokens=st.integers(1, 4),
)
def test_a3_admission_alone_never_preempts(
    prompts: list[int], budget: int, max_tokens: int
) -> None:
    """While outputs stay inside their last prompt block, each token is computed exactly once."""
    engine = Engine(
        num_usable_blocks=20,
        block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=budget,
        max_model_len=128,
    )
    # Rounded so that all output fits into the prompt's last block.
    prompts = [num_tokens - num_tokens % 4 + 1 for num_tokens in prompts if num_tokens < 77]
    for index, num_tokens in enumerate(prompts):
        engine.add(f"r{index}", num_tokens, max_tokens=max_tokens)
    engine.run()
    engine.assert_as_if_alone()
    assert engine.scheduler.stats().num_preemptions == 0
    necessary = sum(num_tokens + max_tokens - 1 for num_tokens in prompts)
    assert engine.scheduler.stats().num_scheduled_tokens == necessary


# A4


class SkipsForAWhile(FCFS):
    """Lets others pass a request that finds no room, until it has waited for so long."""

    def __init__(self, *, max_wait_s: float) -> None:
        self._max_wait_s = max_wait_s

    def admit(self, request: Request, context: AdmissionContext) -> Admission:
        assert request.arrival_time is not None
        needed = -(-request.num_prompt_tokens // 16)
        waited = context.now - request.arrival_time
        if needed > context.num_free_blocks and waited < self._max_wait_s:
            return Admission.SKIP
        return Admission.ADMIT


def _run_behind_a_hungry_head(engine: Engine, *, max_steps: int) -> tuple[int, list[str]]:
    """Run A4's scenario; return when B was admitted, and which small ones were before it."""
    engine.add("A", 77, max_tokens=20)
    engine.step()
    engine.add("B", 8 * 16, max_tokens=2)
    for step in range(max_steps):
        engine.add(f"small {step}", 2, max_tokens=30)
        if "B" in engine.step():
            return step, sorted(
                {name for plan in engine.plans[:-1] for name in plan if name[0] == "s"}
            )
    raise AssertionError(f"B was not admitted within {max_steps} steps")


def test_a4_in_strict_order_nobody_passes_a_head_that_finds_no_room() -> None:
    """Under FCFS a request that does not fit closes admission, so it starts as soon as it can."""
    engine = Engine(num_usable_blocks=10)
    admitted_in, passed = _run_behind_a_hungry_head(engine, max_steps=30)
    assert passed == []
    # A holds its blocks for 20 steps, the first of which came before B.
    assert admitted_in == 19
    engine.run()
    engine.assert_as_if_alone()


@pytest.mark.parametrize("max_wait_s", [3.0, 10.0])
def test_a4_a_policy_that_skips_the_head_can_bound_its_wait(max_wait_s: float) -> None:
    """Small requests pass a large one while it is young; then it is next, and is not starved."""
    engine = Engine(num_usable_blocks=10, policy=SkipsForAWhile(max_wait_s=max_wait_s))
    # At the latest, those that passed it have ended: 30 steps after the last of them started.
    admitted_in, passed = _run_behind_a_hungry_head(engine, max_steps=int(max_wait_s) + 31)
    assert passed
    assert admitted_in > max_wait_s
    engine.run()
    engine.assert_as_if_alone()


# A5


def _steps_to_first_token(engine: Engine) -> int:
    """Run A5's scenario; return how many steps after its arrival R2 has its first token."""
    engine.add("r0", 4, max_tokens=400)
    engine.add("r1", 51_200, max_tokens=1)
    engine.step()
    engine.step()
    engine.add("r2", 32, max_tokens=1)
    for num_steps in itertools.count(1):
        planned = engine.step()
        assert planned["r0"] == 1
        if engine.tokens["r2"]:
            return num_steps
    raise AssertionError


def _engine_for_long_prompts(**limits: Any) -> Engine:
    return Engine(
        num_usable_blocks=3300,
        max_num_batched_tokens=512,
        max_num_seqs=8,
        max_model_len=65_536,
        **limits,
    )


def test_a5_a_cap_on_chunks_lets_a_short_prompt_run_beside_a_long_one() -> None:
    """With a cap a long prompt leaves budget, so a newcomer's first token comes at once."""
    engine = _engine_for_long_prompts(long_prefill_token_threshold=256)
    assert _steps_to_first_token(engine) == 1


def test_a5_without_a_cap_a_long_prompt_takes_all_that_decodes_leave() -> None:
    """Decodes are never held up by a prefill; a later prompt waits until it is done."""
    engine = _engine_for_long_prompts()
    # 508 tokens of r1 in step 1, then 511 a step: 101 steps, of which r2 saw all but two.
    assert _steps_to_first_token(engine) == -(-(51_200 - 508) // 511) + 1 - 2


# A7


def test_a7_without_chunking_a_prompt_over_the_budget_is_refused() -> None:
    """A prompt that no single step could compute is refused when added, with the numbers."""
    engine = Engine(
        num_usable_blocks=256,
        enable_chunked_prefill=False,
        max_num_batched_tokens=2048,
        max_model_len=4096,
    )
    with pytest.raises(InvalidRequest, match=r"2049 prompt tokens.*max_num_batched_tokens is 2048"):
        engine.add("over", 2049)
    engine.add("at", 2048, max_tokens=2)
    assert engine.step() == {"at": 2048}
    engine.run()
    engine.assert_as_if_alone()


@settings(max_examples=20)
@given(prompts=st.lists(st.integers(1, 16), min_size=1, max_size=10))
def test_a7_without_chunking_no_prompt_is_split(prompts: list[int]) -> None:
    """Every prompt is computed in one step, and all of them are."""
    engine = Engine(
        enable_chunked_prefill=False, max_num_batched_tokens=16, max_num_seqs=8, block_size=4
    )
    for index, num_tokens in enumerate(prompts):
        engine.add(f"r{index}", num_tokens, max_tokens=2)
    engine.run()
    engine.assert_as_if_alone()
    for index, num_tokens in enumerate(prompts):
        counts = [plan[f"r{index}"] for plan in engine.plans if f"r{index}" in plan]
        assert counts == [num_tokens, 1]


# A8


def test_a8_a_victim_that_was_planned_already_leaves_no_trace_in_the_plan() -> None:
    """A request that gives way after it was planned is undone: tokens, block, table change."""
    engine = Engine(num_usable_blocks=5, block_size=4, policy=Priority())
    engine.add("low", 7, max_tokens=6, priority=9)
    engine.step()
    engine.add("high", 8, max_tokens=6, priority=1)
    assert engine.step() == {"low": 1, "high": 8}
    output = engine.schedule()
    assert engine.named(output) == {"high": 1}
    assert engine.scheduler.status("low") is RequestStatus.PREEMPTED
    assert engine.scheduler.explain("low").code is SkipCode.PREEMPTED_THIS_STEP
    assert set(output.block_rows.tolist()) == set(output.rows.tolist())
    assert output.finished_rows.size == 1
    stats = engine.scheduler.stats()
    assert (stats.num_running, stats.num_free_blocks) == (1, 2)
    engine.execute(output)
    engine.land()
    engine.run()
    engine.assert_as_if_alone()
    engine.assert_idle()


def test_a8_the_tokens_of_an_undone_victim_return_to_the_budget() -> None:
    """What a planned victim would have computed is there for those behind it."""
    engine = Engine(
        num_usable_blocks=4,
        block_size=4,
        policy=Priority(),
        max_num_batched_tokens=3,
        max_num_seqs=3,
    )
    engine.add("low", 2, max_tokens=12, priority=9)
    engine.step()
    engine.add("high", 2, max_tokens=12, priority=1)
    engine.step()
    engine.add("third", 8, max_tokens=4, priority=5)
    # Low's token 5 takes the last block; high's token 5, one step later, finds none.
    for _ in range(2):
        assert engine.step() == {"low": 1, "high": 1, "third": 1}
    assert engine.step() == {"high": 1, "third": 2}
    engine.run()
    engine.assert_as_if_alone()
    engine.assert_idle()


# A12


def _two_slots_taken(engine: Engine) -> None:
    engine.add("first", 4, max_tokens=1000, priority=10)
    engine.clock.advance(1.0)
    engine.add("second", 4, max_tokens=1000, priority=10)
    engine.step()


@pytest.mark.parametrize("num_in_flight", [0, 1])
def test_a12_an_urgent_request_displaces_the_worst_one_when_all_slots_are_taken(
    num_in_flight: int,
) -> None:
    """With displacing on it runs in the next step; one victim, worst and latest, goes back."""
    engine = Engine(num_usable_blocks=200, policy=Priority(displace=True), max_num_seqs=2)
    _two_slots_taken(engine)
    for _ in range(num_in_flight):
        engine.dispatch()
    engine.add("urgent", 4, max_tokens=4, priority=0)
    assert engine.dispatch() == {"first": 1, "urgent": 4}
    assert engine.scheduler.status("second") is RequestStatus.PREEMPTED
    assert engine.scheduler.stats().num_preemptions == 1
    for _ in range(num_in_flight + 1):
        engine.land()
    while engine.scheduler.status("urgent") is not None:
        engine.step()
    for _ in range(3):
        engine.step()
    assert engine.scheduler.status("second") is RequestStatus.RUNNING
    assert engine.scheduler.stats().num_preemptions == 1
    engine.assert_as_if_alone("urgent")
    engine.assert_so_far_as_if_alone()


@pytest.mark.parametrize("policy", [FCFS(), Priority()], ids=["fcfs", "priority"])
def test_a12_without_displacing_an_urgent_request_waits_for_a_slot(policy: FCFS) -> None:
    """Nobody loses a slot to a newcomer unless the policy was told to."""
    engine = Engine(num_usable_blocks=200, policy=policy, max_num_seqs=2)
    _two_slots_taken(engine)
    engine.add("urgent", 4, max_tokens=4, priority=0)
    assert engine.step() == {"first": 1, "second": 1}
    assert engine.scheduler.explain("urgent").code is SkipCode.NO_ROW
    assert engine.scheduler.stats().num_preemptions == 0


def test_a12_equal_priorities_never_displace_each_other() -> None:
    """A newcomer of the same priority waits, or two of them would swap for ever."""
    engine = Engine(num_usable_blocks=200, policy=Priority(displace=True), max_num_seqs=2)
    _two_slots_taken(engine)
    engine.add("equal", 4, max_tokens=4, priority=10)
    assert engine.step() == {"first": 1, "second": 1}
    assert engine.scheduler.stats().num_preemptions == 0


# A14


def test_a14_a_row_stays_taken_until_its_last_token_is_in() -> None:
    """A slot is given out again with the first plan after its tenant's result, not before it."""
    engine = Engine(max_num_seqs=2)
    for index in range(4):
        engine.add(f"r{index}", 8, max_tokens=1)
    assert engine.dispatch() == {"r0": 8, "r1": 8}
    assert engine.dispatch() == {}
    assert engine.scheduler.explain("r0").code is SkipCode.WAITING_FOR_OUTPUT
    assert engine.scheduler.explain("r2").code is SkipCode.NO_ROW
    engine.land()
    assert engine.dispatch() == {"r2": 8, "r3": 8}
    engine.land()
    engine.land()
    engine.assert_as_if_alone()
    engine.assert_idle()


# A15


def _hand_overs(fabric: LoopbackFabric, clock: VirtualClock, prompts: list[Any]) -> list[Any]:
    """Run prompts on a prefill engine; return what each hands to a decode engine."""
    prefill = Engine(
        connector=LoopbackConnector(fabric, engine_id="P", block_size=16, lease_s=1e6), clock=clock
    )
    for index, prompt in enumerate(prompts):
        params = {"do_remote_decode": True}
        prefill.add(f"p{index}", prompt, max_tokens=1, kv_transfer_params=params)
    while not all(prefill.ends.values()):
        prefill.step()
    return [prefill.end(f"p{index}").kv_transfer_params for index in range(len(prompts))]


def test_a15_requests_that_wait_for_remote_kv_take_no_compute_slot() -> None:
    """With as many parked requests as there are slots, a local one runs at once."""
    clock = VirtualClock()
    fabric = LoopbackFabric(clock=clock, faults=LoopbackFaults(lose=True))
    prompts = [some_tokens(33, seed=seed) for seed in range(4)]
    params = _hand_overs(fabric, clock, prompts)
    decode = Engine(
        connector=LoopbackConnector(fabric, engine_id="D", block_size=16),
        clock=clock,
        max_num_seqs=4,
        load_timeout_s=100.0,
    )
    for index, prompt in enumerate(prompts):
        decode.add(f"d{index}", prompt, kv_transfer_params=params[index])
    decode.step()
    assert decode.scheduler.stats().num_parked == 4
    decode.add("local", 8, max_tokens=4)
    for _ in range(4):
        assert "local" in decode.step()
    assert decode.scheduler.stats().num_parked == 4
    decode.assert_as_if_alone("local")
    # Their deadline ends the wait; the application chose to compute them here.
    clock.advance(100.0)
    decode.run()
    assert decode.scheduler.stats().num_failed_loads == 4
    decode.assert_as_if_alone()
    decode.assert_idle()


def test_a15_the_number_of_parked_requests_has_a_bound_of_its_own() -> None:
    """At the bound a request that would park is passed over, and says what it waits for."""
    clock = VirtualClock()
    fabric = LoopbackFabric(clock=clock, faults=LoopbackFaults(delay_s=50.0))
    prompts = [some_tokens(33, seed=seed) for seed in range(3)]
    params = _hand_overs(fabric, clock, prompts)
    decode = Engine(
        connector=LoopbackConnector(fabric, engine_id="D", block_size=16, lease_s=1e6),
        clock=clock,
        max_num_parked=2,
    )
    for index, prompt in enumerate(prompts):
        decode.add(f"d{index}", prompt, kv_transfer_params=params[index])
    decode.add("local", 8, max_tokens=1)
    assert decode.step() == {"local": 8}
    assert decode.scheduler.stats().num_parked == 2
    assert decode.scheduler.explain("d2").code is SkipCode.TOO_MANY_PARKED
    decode.run()
    decode.assert_as_if_alone()
    decode.assert_idle()


# A18


@pytest.mark.parametrize("num_in_flight", PIPELINE_DEPTHS)
@pytest.mark.parametrize("max_tokens", [1, 2, 3])
@pytest.mark.parametrize("num_prompt_tokens", [1, 15, 16, 17])
def test_a18_a_request_is_never_scheduled_past_its_last_token(
    num_prompt_tokens: int, max_tokens: int, num_in_flight: int
) -> None:
    """However many plans are in flight, a request gets exactly max_tokens and one finish event."""
    engine = Engine()
    engine.add("x", num_prompt_tokens, max_tokens=max_tokens)
    engine.run(num_in_flight=num_in_flight)
    engine.assert_as_if_alone()
    engine.assert_idle()
    planned = [plan["x"] for plan in engine.plans if plan]
    assert planned == [num_prompt_tokens] + [1] * (max_tokens - 1)


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_a18_fewer_than_one_token_is_refused(max_tokens: int) -> None:
    """A request for no token is invalid, and the message says what a prefill uses instead."""
    with pytest.raises(InvalidRequest, match="prefill for hand-over uses 1"):
        SamplingParams(max_tokens=max_tokens)


# A22


def test_a22_an_adapter_over_the_limit_is_passed_over() -> None:
    """A request whose adapter finds no place waits alone; those behind it run."""
    engine = Engine(max_loras=1)
    for name, lora in (("a1", "a"), ("b", "b"), ("base", None), ("a2", "a")):
        engine.add(name, 8, max_tokens=3, lora=lora)
    assert engine.step() == {"a1": 8, "base": 8, "a2": 8}
    assert engine.scheduler.explain("b").code is SkipCode.TOO_MANY_LORAS
    engine.run()
    engine.assert_as_if_alone()
    assert all(not {"a1", "b"} <= set(plan) for plan in engine.plans)


# A25


@pytest.mark.parametrize("num_in_flight", PIPELINE_DEPTHS)
@pytest.mark.parametrize("as_eos", [True, False], ids=["eos", "stop id"])
@pytest.mark.parametrize("first_stop", [1, 2, 3, 4])
def test_a25_nothing_stops_a_request_before_min_tokens(
    first_stop: int, as_eos: bool, num_in_flight: int
) -> None:
    """A stop token before the third goes into the output and ends nothing; from then on it ends."""
    num_prompt_tokens = 8

    def script(request_id: str, position: int) -> int | None:
        return 2 if position >= num_prompt_tokens + first_stop - 1 else None

    engine = Engine(runner={"script": script})
    stops: dict[str, Any] = {"eos_token_id": 2} if as_eos else {"stop_token_ids": (2,)}
    engine.add("x", num_prompt_tokens, max_tokens=8, min_tokens=3, **stops)
    engine.run(num_in_flight=num_in_flight)
    engine.assert_as_if_alone()
    assert len(engine.tokens["x"]) == max(first_stop, 3)
    assert engine.reason("x") is FinishReason.STOP


@pytest.mark.parametrize("as_eos", [True, False], ids=["eos", "stop id"])
@pytest.mark.parametrize("min_tokens", [0, 1, 2, 3])
def test_a25_min_tokens_holds_for_a_token_that_lands_after_a_preemption(
    min_tokens: int, as_eos: bool
) -> None:
    """A token that was in flight when its request lost its row stops it by the same rule."""
    engine = Engine(runner={"script": lambda request_id, position: 2})
    stops: dict[str, Any] = {"eos_token_id": 2} if as_eos else {"stop_token_ids": (2,)}
    engine.add("x", 8, max_tokens=8, min_tokens=min_tokens, **stops)
    engine.dispatch()
    assert engine.scheduler.reset_prefix_cache(preempt_running=True)
    engine.land()
    engine.run()
    engine.assert_as_if_alone()
    assert len(engine.tokens["x"]) == max(min_tokens, 1)


# A27


def test_a27_an_id_in_use_is_refused_and_its_owner_is_unharmed() -> None:
    """Adding an id twice raises; the first request goes on; after its end the id is free again."""
    engine = Engine()
    engine.add("x", 8)
    engine.step()
    with pytest.raises(DuplicateRequest):
        engine.add("x", 12)
    engine.run()
    engine.assert_as_if_alone()
    engine.add("x", 12)
    engine.run()
    engine.assert_as_if_alone()


@pytest.mark.parametrize("num_plans_before", [1, 2, 3])
def test_a27_old_results_and_old_aborts_never_touch_a_request_that_reuses_the_id(
    num_plans_before: int,
) -> None:
    """Results in flight for an aborted request are dropped, and its handle stays its own."""
    engine = Engine(max_num_seqs=1)
    old = engine.add("x", 8, max_tokens=8)
    for _ in range(num_plans_before):
        engine.dispatch()
    engine.abort("x")
    (event,) = engine.scheduler.drain()
    assert (event.request_id, event.finish_reason) == ("x", FinishReason.ABORT)
    new = engine.add("x", 12, max_tokens=8)
    assert new != old
    # The new one gets the old one's row while the old results are still out.
    assert engine.dispatch() == {"x": 12}
    for _ in range(num_plans_before):
        assert engine.land().outputs == ()
    engine.abort(old)
    engine.run(num_in_flight=2)
    engine.assert_as_if_alone()
    engine.assert_idle()


# A28


@pytest.mark.parametrize("num_steps_before", [0, 1, 2, 3])
@pytest.mark.parametrize("num_in_flight", PIPELINE_DEPTHS)
def test_a28_an_abort_between_plan_and_result_ends_a_request_once(
    num_steps_before: int, num_in_flight: int
) -> None:
    """In mid-prefill or decode: one finish event, blocks freed once, the others go on."""
    engine = Engine(num_usable_blocks=16, block_size=4, max_num_batched_tokens=10, max_num_seqs=2)
    engine.add("x", 18, max_tokens=8)
    engine.add("other", 6, max_tokens=8)
    for _ in range(num_steps_before):
        engine.step()
    for _ in range(num_in_flight):
        engine.dispatch()
    engine.abort("x", "x", "never seen")
    engine.run()
    engine.abort("x")
    assert engine.reason("x") is FinishReason.ABORT
    engine.assert_so_far_as_if_alone("x")
    engine.assert_as_if_alone("other")
    engine.assert_idle()
    assert engine.scheduler.drain() == ()


# A29


class RaisesForB(FCFS):
    """Every hook that concerns one request raises for the request b."""

    def __init__(self, hook: str) -> None:
        self._hook = hook

    def _raise_for(self, request: Request, hook: str) -> None:
        if hook == self._hook and request.request_id == "b":
            raise RuntimeError("boom")

    def admit(self, request: Request, context: AdmissionContext) -> Admission:
        self._raise_for(request, "admit")
        return Admission.ADMIT

    def chunk(self, request: Request, num_tokens: int, token_budget: int) -> int:
        self._raise_for(request, "chunk")
        return num_tokens


class BrittleConnector(KVConnector):
    """Brings nothing, and one call of its scheduler's half raises for the request b."""

    def __init__(self, call: str) -> None:
        self._call = call

    def scheduler_side(self) -> _BrittleHalf:
        return _BrittleHalf(self._call)

    def worker_side(self, rank: int = 0) -> NullWorkerConnector:
        return NullWorkerConnector()


class _BrittleHalf(NullSchedulerConnector):
    def __init__(self, call: str) -> None:
        super().__init__()
        self._call = call

    def _raise_for(self, request: Request, call: str) -> None:
        if call == self._call and request.request_id == "b":
            raise RuntimeError("boom")

    def get_num_new_matched_tokens(self, request: Request, num_local_tokens: int) -> ExternalMatch:
        self._raise_for(request, "get_num_new_matched_tokens")
        is_b = request.request_id == "b"
        is_async = self._call == "update_state_after_alloc (async)"
        return ExternalMatch(num_tokens=4 if is_b else 0, is_async=is_async)

    def update_state_after_alloc(self, request: Request, load: KVLoad) -> None:
        self._raise_for(request, "update_state_after_alloc")
        self._raise_for(request, "update_state_after_alloc (async)")

    def cancel(self, transfer: TransferKey) -> None:
        failure = LoadFailure(transfer=transfer, num_valid_tokens=0, cause="cancelled")
        self.update_connector_output(TransferReport(failed=(failure,)))

    def request_finished(
        self, request: Request, uid: int, blocks: FinishedBlocks
    ) -> HandOver | None:
        if self._call == "request_finished":
            raise RuntimeError("boom")
        return None


class Compiled(GrammarMatcher):
    """Allows all tokens, unless it is told where to fail."""

    def __init__(self, fails_in: str = "") -> None:
        self._fails_in = fails_in

    def accept(self, token_id: int) -> bool:
        if self._fails_in == "accept":
            raise RuntimeError("boom")
        return self._fails_in != "refuse"

    def fill_bitmask(self, bits: npt.NDArray[np.int32]) -> None:
        bits[:] = -1
        if self._fails_in == "fill_bitmask":
            raise RuntimeError("boom")


class Grammars(GrammarBackend):
    """Hands out one future for each request, for the test to fulfil."""

    vocab_size = 32_000

    def __init__(self, *, fails_in: str | None = None) -> None:
        self.futures: dict[str, Future[GrammarMatcher]] = {}
        self._fails_in = fails_in

    def compile(self, request: Request) -> Future[GrammarMatcher]:
        if self._fails_in == "compile":
            raise RuntimeError("boom")
        future = self.futures[request.request_id] = Future()
        if self._fails_in is not None:
            future.set_result(Compiled(self._fails_in))
        return future


def _assert_only_b_fails(engine: Engine, **options: Any) -> None:
    engine.add("a", 9, max_tokens=5)
    engine.add("b", 9, max_tokens=5, **options)
    engine.add("c", 9, max_tokens=5)
    engine.run()
    assert engine.reason("b") is FinishReason.ERROR
    assert engine.end("b").cause
    engine.assert_as_if_alone("a", "c")
    engine.assert_idle()


@pytest.mark.parametrize("hook", ["admit", "chunk"])
def test_a29_a_policy_hook_that_raises_ends_its_request_alone(hook: str) -> None:
    """The request that a policy cannot handle ends with an error; the others finish."""
    _assert_only_b_fails(Engine(policy=RaisesForB(hook), max_num_batched_tokens=8, max_num_seqs=4))


@pytest.mark.parametrize(
    "call",
    [
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "update_state_after_alloc (async)",
    ],
)
def test_a29_a_connector_call_that_raises_ends_its_request_alone(call: str) -> None:
    """The request that a connector cannot handle ends with an error; the others finish."""
    _assert_only_b_fails(Engine(connector=BrittleConnector(call)))


def test_a29_a_connector_that_raises_at_the_end_costs_nobody_anything() -> None:
    """When the farewell to a connector raises, requests end as they would have."""
    engine = Engine(connector=BrittleConnector("request_finished"))
    for name in "ac":
        engine.add(name, 9, max_tokens=5)
    engine.run()
    engine.assert_as_if_alone()
    engine.assert_idle()


@pytest.mark.parametrize("place", ["compile", "fill_bitmask", "accept", "refuse"])
def test_a29_a_grammar_that_raises_ends_its_request_alone(place: str) -> None:
    """The request whose grammar breaks ends with an error; the others finish."""
    _assert_only_b_fails(Engine(grammar=Grammars(fails_in=place)), structured_output="any")


# A30


def test_a30_a_request_runs_past_one_whose_grammar_is_not_ready_and_then_fails() -> None:
    """A head that waits for its grammar holds up nobody; when that fails, it alone ends."""
    grammars = Grammars()
    engine = Engine(grammar=grammars)
    engine.add("head", 8, structured_output="any")
    engine.add("plain", 8, max_tokens=2)
    assert engine.step() == {"plain": 8}
    assert engine.scheduler.explain("head").code is SkipCode.WAITING_FOR_GRAMMAR
    grammars.futures["head"].set_exception(ValueError("no such grammar"))
    engine.run()
    assert engine.reason("head") is FinishReason.ERROR
    assert "no such grammar" in (engine.end("head").cause or "")
    engine.assert_as_if_alone("plain")
    engine.assert_idle()


def test_a30_a_grammar_that_never_comes_has_a_deadline() -> None:
    """A request whose grammar is not there in time ends with an error that says so."""
    engine = Engine(grammar=Grammars(), grammar_timeout_s=5.0)
    engine.add("x", 8, structured_output="any")
    assert engine.scheduler.next_wakeup() == 5.0
    engine.run()
    assert engine.reason("x") is FinishReason.ERROR
    assert engine.clock.now() == 5.0
    engine.assert_idle()


def test_a30_an_abort_while_the_grammar_compiles_leaves_nothing() -> None:
    """The compilation is cancelled, and its late result is nobody's."""
    grammars = Grammars()
    engine = Engine(grammar=grammars)
    engine.add("x", 8, structured_output="any")
    engine.abort("x")
    assert grammars.futures["x"].cancelled()
    engine.run()
    assert engine.reason("x") is FinishReason.ABORT
    assert engine.scheduler.next_wakeup() is None
    engine.assert_idle()


# A31


@settings(max_examples=15)
@given(
    prompts=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    num_usable_blocks=st.integers(8, 14),
    budget=st.integers(3, 12),
    threshold=st.sampled_from([0, 1, 3]),
    max_tokens=st.integers(1, 24),
)
def test_a31_every_step_plans_a_token_or_ends_a_request(
    prompts: list[int], num_usable_blocks: int, budget: int, threshold: int, max_tokens: int
) -> None:
    """While there is work that awaits nothing from outside, no step goes by without progress."""
    engine = Engine(
        num_usable_blocks=num_usable_blocks,
        block_size=4,
        max_num_seqs=3,
        max_num_batched_tokens=budget,
        long_prefill_token_threshold=threshold,
    )
    for index, num_tokens in enumerate(prompts):
        engine.add(f"r{index}", num_tokens, max_tokens=max_tokens)
    while engine.scheduler.has_requests():
        num_ended = engine.scheduler.stats().num_finished
        planned = engine.step()
        assert planned or engine.scheduler.stats().num_finished > num_ended
    engine.assert_idle()


def test_a31_a_stall_is_raised_with_what_waits_and_why() -> None:
    """When nothing can ever move, the step raises and names the queue, the pool and the reason."""
    engine = Engine(num_usable_blocks=8)
    engine.add("starved", 100)
    # A part outside of the scheduler takes blocks and never gives them back.
    engine.pool.allocate(4)
    with pytest.raises(SchedulerStalled, match=r"'starved' \(WAITING, 100 tokens\).*NO_BLOCKS"):
        engine.scheduler.schedule()


# A34


@pytest.mark.parametrize("num_in_flight", PIPELINE_DEPTHS)
@pytest.mark.parametrize(
    ("num_prompt_tokens", "num_outputs", "budget"), [(3, 10, 4), (1, 5, 1), (7, 2, 4), (4, 8, 6)]
)
def test_a34_a_resumed_request_recomputes_all_tokens_before_it_draws_another(
    num_prompt_tokens: int, num_outputs: int, budget: int, num_in_flight: int
) -> None:
    """After a preemption its own output is prompt: computed in chunks, drawn from at the end."""
    engine = Engine(max_num_seqs=1, max_num_batched_tokens=budget, block_size=4)
    engine.add("x", num_prompt_tokens, max_tokens=num_outputs + 4)
    while len(engine.tokens["x"]) < num_outputs:
        engine.step()
    assert engine.scheduler.reset_prefix_cache(preempt_running=True)
    assert engine.scheduler.status("x") is RequestStatus.PREEMPTED
    num_known = num_prompt_tokens + num_outputs
    num_plans = -(-num_known // budget)
    before = len(engine.plans)
    for index in range(num_plans):
        assert len(engine.tokens["x"]) == num_outputs
        output = engine.schedule()
        assert output.samples.tolist() == [index == num_plans - 1]
        engine.execute(output)
        engine.land()
    recomputed = [plan["x"] for plan in engine.plans[before:]]
    assert recomputed == [budget] * (num_plans - 1) + [num_known - budget * (num_plans - 1)]
    engine.run(num_in_flight=num_in_flight)
    engine.assert_as_if_alone()
