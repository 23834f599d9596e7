"""Faults of models whose attention has a sliding window."""

from __future__ import annotations

import math

import pytest
from harness import Engine, some_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

# B13


def _most_blocks(engine: Engine, *, num_in_flight: int = 1) -> int:
    """Run to the end; return the most blocks that requests ever had."""
    most = 0
    while engine.scheduler.has_requests():
        for _ in range(num_in_flight):
            engine.dispatch()
            most = max(most, engine.pool.counts().referenced)
        for _ in range(num_in_flight):
            engine.land()
    return most


def test_b13_a_long_prompt_behind_a_window_needs_no_more_than_window_and_chunk() -> None:
    """A prompt of 20 blocks runs in a pool of 6, holds at most 5, and gives back the others."""
    engine = Engine(
        num_usable_blocks=6, sliding_window=32, max_num_batched_tokens=32, max_num_seqs=4
    )
    engine.add("x", 320, max_tokens=40)
    nulled: set[int] = set()
    most = 0
    while engine.scheduler.has_requests():
        output = engine.schedule()
        most = max(most, engine.pool.counts().referenced)
        nulled |= set(output.block_positions[output.block_ids == 0].tolist())
        start = int(output.num_computed_tokens[0])
        # All that this step sees is there, all that no later step can see is not.
        assert nulled == set(range(max(0, start - 32 + 1) // 16))
        engine.execute(output)
        engine.land()
    assert most <= math.ceil((32 + 32) / 16) + 1
    engine.assert_as_if_alone()
    engine.assert_idle()


@settings(max_examples=15)
@given(
    block_size=st.sampled_from([1, 4, 16]),
    window=st.integers(1, 40),
    budget=st.integers(1, 32),
    num_prompt_tokens=st.integers(1, 150),
    enable_prefix_caching=st.booleans(),
)
def test_b13_the_bound_holds_for_every_window_chunk_and_prompt(
    block_size: int, window: int, budget: int, num_prompt_tokens: int, enable_prefix_caching: bool
) -> None:
    """A pool of exactly window, chunk and one block more serves prompts of any length."""
    bound = math.ceil((window + budget) / block_size) + 1
    engine = Engine(
        num_usable_blocks=bound,
        block_size=block_size,
        sliding_window=window,
        max_num_batched_tokens=budget,
        max_num_seqs=1,
        max_model_len=256,
        enable_prefix_caching=enable_prefix_caching,
    )
    engine.add("x", num_prompt_tokens, max_tokens=12)
    assert _most_blocks(engine) <= bound
    engine.assert_as_if_alone()
    assert engine.scheduler.stats().num_preemptions == 0
    engine.assert_idle()


@pytest.mark.parametrize("num_cached_tokens", [32, 64, 96])
def test_b13_a_cached_prefix_longer_than_the_window_is_no_reason_to_wait(
    num_cached_tokens: int,
) -> None:
    """A hit behind a window keeps no more blocks than a request without one would."""
    engine = Engine(
        num_usable_blocks=6, sliding_window=32, max_num_batched_tokens=32, max_num_seqs=4
    )
    prompt = some_tokens(160)
    engine.add("before", prompt[:num_cached_tokens], max_tokens=1)
    engine.run()
    engine.add("x", prompt, max_tokens=4)
    engine.run()
    engine.assert_as_if_alone()
    engine.assert_idle()


# B15


def test_b15_a_block_is_pruned_when_no_step_in_flight_can_read_it() -> None:
    """What lies behind the window of planned tokens stays until the step that reads it is in."""
    engine = Engine(sliding_window=16, max_num_batched_tokens=16, max_num_seqs=1)
    engine.add("x", 96, max_tokens=2)
    for num_planned in (1, 2, 3):
        assert engine.dispatch() == {"x": 16}
        # With nothing processed, nothing is behind the window of any result.
        assert engine.pool.counts().referenced == num_planned
    engine.land()
    engine.land()
    # 32 tokens are processed: the next step reads from token 17 on, so one block may go.
    output = engine.schedule()
    pruned = output.block_ids == 0
    assert output.block_positions[pruned].tolist() == [0]
    engine.execute(output)
    engine.run(num_in_flight=2)
    engine.assert_as_if_alone()


@pytest.mark.parametrize("num_in_flight", [2, 3, 4])
@pytest.mark.parametrize("num_usable_blocks", [5, 6, 8, 12])
def test_b15_a_lone_request_behind_a_window_never_gives_way_to_its_own_plans(
    num_usable_blocks: int, num_in_flight: int
) -> None:
    """Plans in flight keep more blocks, but never so many that a request must preempt itself."""
    engine = Engine(
        num_usable_blocks=num_usable_blocks,
        sliding_window=32,
        max_num_batched_tokens=32,
        max_num_seqs=2,
        enable_prefix_caching=False,
    )
    engine.add("x", 320, max_tokens=8)
    engine.run(num_in_flight=num_in_flight, max_steps=100)
    engine.assert_as_if_alone()
    engine.assert_idle()
