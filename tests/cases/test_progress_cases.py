"""Faults of schedulers that stop: requests that wait, or give way, for ever."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from harness import Engine
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcore.errors import InvalidRequest, SchedulerStalled
from pdcore.request import FinishReason, Request
from pdcore.scheduler import (
    FCFS,
    Admission,
    AdmissionContext,
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


@settings(max_examples=20)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 30)), min_size=2, max_size=4),
    enable_prefix_caching=st.booleans(),
)
def test_a7_without_chunking_who_outgrew_a_step_and_gave_way_goes_on(
    lengths: list[tuple[int, int]], enable_prefix_caching: bool
) -> None:
    """Its tokens are no prompt of anybody's: they are computed again in pieces, and nobody waits
    for ever behind it."""
    engine = Engine(
        num_usable_blocks=12,
        block_size=4,
        max_num_seqs=3,
        max_num_batched_tokens=8,
        max_model_len=64,
        enable_chunked_prefill=False,
        enable_prefix_caching=enable_prefix_caching,
    )
    for index, (num_tokens, max_tokens) in enumerate(lengths):
        engine.add(f"r{index}", num_tokens, max_tokens=max_tokens)
    engine.run()
    engine.assert_as_if_alone()


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
