"""Faults of loads that fail in part."""

from __future__ import annotations

import pytest
from pd_pair import BLOCK_SIZE, Pair, prompt_of
from synchronous_loads import run_through_failures, synchronous_pair

from pdcore.connector.loopback import LoopbackFaults

# C22


@pytest.mark.parametrize("on_load_failure", ["recompute", "fail"])
@pytest.mark.parametrize("has_other", [False, True])
def test_c22_requests_that_share_a_bad_block_both_go_on_from_what_is_good(
    on_load_failure: str, has_other: bool
) -> None:
    """One block of three arrived for A and B: both compute from 16, and nothing else wakes them."""
    pair = Pair(
        faults=LoopbackFaults(num_valid_tokens=BLOCK_SIZE),
        decode={"on_load_failure": on_load_failure},
    )
    decode, prompt = pair.decode, prompt_of(3)
    params = [pair.hand_over(name, prompt) for name in "ab"]
    for name, ticket in zip("ab", params, strict=True):
        decode.add(name, prompt, kv_transfer_params=ticket)
    if has_other:
        decode.add("c", 20, max_tokens=8)
    starts: dict[str, int] = {}
    while decode.scheduler.has_requests():
        assert decode.scheduler.has_work()
        output = decode.schedule()
        for new in output.scheduled_new_reqs:
            starts.setdefault(new.request_id, new.num_computed_tokens)
        decode.execute(output)
        decode.land()
    if on_load_failure == "recompute":
        assert [starts[name] for name in "ab"] == [BLOCK_SIZE] * 2
        assert decode.scheduler.stats().num_recomputed_tokens == 2 * (3 * BLOCK_SIZE - 1 - 16)
        decode.assert_as_if_alone()
    else:
        assert [decode.tokens[name] for name in "ab"] == [[], []]
        assert all("only 16 of 47" in str(decode.end(name).cause) for name in "ab")
        if has_other:
            decode.assert_as_if_alone("c")
    assert decode.scheduler.stats().num_failed_loads == 2
    pair.run()
    pair.assert_idle()


def test_c22_a_block_that_did_not_arrive_is_in_no_index() -> None:
    """Between the failure and the recompute a third request hits the good block alone."""
    pair = Pair(
        faults=LoopbackFaults(num_valid_tokens=BLOCK_SIZE),
        decode={"on_load_failure": "fail"},
    )
    decode, prompt = pair.decode, prompt_of(3)
    pair.send("a", prompt)
    pair.run()
    decode.add("later", prompt)
    pair.run()
    assert decode.end("later").num_cached_tokens == BLOCK_SIZE
    decode.assert_as_if_alone("later")
    pair.assert_idle()


def test_why_loads_failed_is_in_the_log_though_all_went_well(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A request that is computed after all ends without a cause. One warning for many of a kind."""
    pair = Pair(faults=LoopbackFaults(num_valid_tokens=BLOCK_SIZE))
    for name in "abc":
        pair.send(name, prompt_of(3))
        pair.run()
        assert pair.decode.end(name).cause is None
        pair.decode.scheduler.reset_prefix_cache()
    (warning,) = (it.getMessage() for it in caplog.records if it.levelname == "WARNING")
    assert warning.startswith("remote KV of request a was not loaded: ")
    assert "only 16 of 47" in warning


@pytest.mark.parametrize("num_valid_tokens", [0, 15, 16, 31, 32, 47])
def test_c22_the_longest_valid_prefix_is_kept_beside_local_hits(num_valid_tokens: int) -> None:
    """One block is here, the load brings some of the rest: what is whole is not computed again."""
    pair = Pair(faults=LoopbackFaults(num_valid_tokens=num_valid_tokens))
    decode, prompt = pair.decode, prompt_of(4)
    decode.add("local", prompt[:17], max_tokens=1)
    decode.run()
    pair.send("a", prompt)
    starts: list[int] = []
    while decode.scheduler.has_requests():
        output = decode.schedule()
        starts += [new.num_computed_tokens for new in output.scheduled_new_reqs]
        decode.execute(output)
        decode.land()
    assert starts == [max(16, num_valid_tokens // 16 * 16)]
    decode.assert_as_if_alone()
    pair.run()
    pair.assert_idle()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_usable_blocks", [7, 30])
def test_c22_loads_that_are_done_at_once_work_with_steps_in_flight(
    depth: int, num_usable_blocks: int
) -> None:
    """A load in the step that starts its request: right tokens with plans made ahead."""
    pair, engine = synchronous_pair(num_usable_blocks=num_usable_blocks)
    for index in range(4):
        prompt = prompt_of(2, more=index, seed=index % 3)
        params = pair.hand_over(f"r{index}", prompt)
        engine.add(f"r{index}", prompt, max_tokens=12, kv_transfer_params=params)
    engine.run(num_in_flight=depth)
    assert engine.scheduler.stats().num_external_tokens > 0
    engine.assert_as_if_alone()
    engine.assert_idle()


@pytest.mark.parametrize("num_broken", [1, 2, 1000])
def test_c22_a_load_at_once_that_breaks_its_step_is_not_tried_for_ever(num_broken: int) -> None:
    """The step is taken back, its ticket is spent, and the other one loses one step."""
    pair, engine = synchronous_pair(num_broken)
    engine.add("other", 20, max_tokens=9)
    engine.step()
    params = pair.hand_over("a", prompt_of(3))
    engine.add("a", prompt_of(3), kv_transfer_params=params)
    num_failed = run_through_failures(engine)
    assert num_failed == 1
    engine.assert_as_if_alone()
    engine.assert_idle()
