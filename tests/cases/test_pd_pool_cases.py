"""Faults of loads and the blocks that they need."""

from __future__ import annotations

from typing import Any

import pytest
from harness import some_tokens
from hypothesis import given
from hypothesis import strategies as st
from pd_pair import BLOCK_SIZE, HAND_OVER, Pair, prompt_of

from pdcore.connector.loopback import LoopbackFaults
from pdcore.request import RequestStatus
from pdcore.scheduler import Priority, SkipCode

LOADING = RequestStatus.WAITING_FOR_REMOTE_KVS


# C7


@pytest.mark.parametrize("delays", [(0, 0), (0, 3), (3, 0), (2, 2), (0, 9), (9, 0)], ids=str)
@pytest.mark.parametrize("depth", [1, 2])
def test_c7_two_loads_that_fill_the_pool_both_end(delays: tuple[int, int], depth: int) -> None:
    """Each wants one block more when it is there; whichever lands first, both are served."""
    by_name = dict(zip("ab", delays, strict=True))
    pair = Pair(
        faults=lambda load: LoopbackFaults(delay_polls=by_name[load.request.request_id]),
        decode={"num_usable_blocks": 7},
    )
    pair.send("a", prompt_of(4), max_tokens=10)
    pair.send("b", prompt_of(3, seed=1), max_tokens=10)
    pair.turn(pair.decode)
    # The 4 + 1 and 3 + 1 blocks that they come to would not fit, but what they load does.
    assert pair.decode.pool.num_free_blocks == 0
    pair.decode.run(num_in_flight=depth)
    pair.decode.assert_as_if_alone()
    pair.run()
    pair.assert_idle()


def test_c7_a_landed_load_is_not_hidden_behind_a_head_that_does_not_fit() -> None:
    """A needs 4 blocks and 3 are free: B, which holds the other 5, goes on and ends."""
    pair = Pair(faults=LoopbackFaults(delay_polls=3), decode={"num_usable_blocks": 8})
    decode = pair.decode
    params = pair.hand_over("b", prompt_of(5))
    decode.add("b", prompt_of(5), kv_transfer_params=params, arrival_time=2.0)
    pair.turn(decode)
    assert decode.scheduler.status("b") is LOADING
    # By its arrival it belongs ahead of B.
    decode.add("a", prompt_of(4, seed=1), arrival_time=1.0)
    pair.turn(decode)
    assert decode.scheduler.explain("a").code is SkipCode.NO_BLOCKS
    pair.run()
    assert decode.end("b").num_external_tokens == 5 * BLOCK_SIZE - 1
    decode.assert_as_if_alone()
    pair.assert_idle()


def test_c7_an_urgent_newcomer_does_not_lock_in_what_has_landed() -> None:
    """Of a better priority and too large for the pool's rest, it waits for the loaded request."""
    pair = Pair(
        faults=LoopbackFaults(delay_polls=3),
        decode={"num_usable_blocks": 8, "policy": Priority()},
    )
    decode = pair.decode
    pair.send("b", prompt_of(5), priority=5)
    pair.turn(decode)
    decode.add("urgent", prompt_of(4, seed=1), priority=0)
    order: list[str] = []
    while decode.scheduler.has_requests():
        order += [name for name in decode.dispatch() if name not in order]
        decode.land()
    assert order == ["b", "urgent"]
    decode.assert_as_if_alone()
    pair.run()
    pair.assert_idle()


def two_loads_that_lack_a_block(num_usable_blocks: int, **request: Any) -> Pair:
    """X runs; the loads of A and B bring three of the four blocks that each computes in."""
    pair = Pair(
        faults=LoopbackFaults(delay_polls=30), decode={"num_usable_blocks": num_usable_blocks}
    )
    params = [pair.hand_over(name, prompt_of(3, more=1, seed=ord(name))) for name in "ab"]
    pair.decode.add("x", 8, **request)
    pair.turn(pair.decode)
    for name, ticket in zip("ab", params, strict=True):
        prompt = prompt_of(3, more=1, seed=ord(name))
        pair.decode.add(name, prompt, kv_transfer_params=ticket)
    pair.turn(pair.decode)
    assert pair.decode.scheduler.status("a") is LOADING
    return pair


def test_c7_no_load_takes_the_block_that_another_will_need() -> None:
    """Four blocks are left and B needs them all, but one of them is for A's last token."""
    pair = two_loads_that_lack_a_block(8, max_tokens=6)
    skip = pair.decode.scheduler.explain("b")
    assert (skip.code, skip.needed, skip.available) == (SkipCode.NO_BLOCKS, 4, 3)
    pair.run()
    pair.decode.assert_as_if_alone()
    pair.assert_idle()


def test_c7_loads_locked_in_by_blocks_that_are_kept_for_a_peer_give_way() -> None:
    """X grew into their last blocks and is kept for its reader: B is rolled back, A goes on."""
    pair = two_loads_that_lack_a_block(9, max_tokens=28, kv_transfer_params=HAND_OVER)
    decode, began = pair.decode, pair.clock.now()
    assert decode.scheduler.status("b") is LOADING
    while not (decode.ends["a"] and decode.ends["b"]):
        pair.turn(decode)
        if not decode.tokens["a"]:
            assert decode.scheduler.stats().num_running <= 1
    # Nobody waited for the lease on X's blocks.
    assert pair.clock.now() == began
    assert decode.scheduler.stats().num_held_for_peers == 1
    assert pair.connectors["decode"].calls["update_state_after_alloc", "b"] == 1
    decode.assert_as_if_alone()
    pair.run()
    pair.assert_idle()


@given(data=st.data(), depth=st.integers(1, 2), num_usable_blocks=st.integers(4, 10))
def test_c7_whatever_is_loaded_and_however_long_it_takes_everybody_ends(
    data: st.DataObject, depth: int, num_usable_blocks: int
) -> None:
    """Loads of any sizes in a small pool: none waits for ever, and each token is right."""
    delays: dict[str, int] = {}
    pair = Pair(
        faults=lambda load: LoopbackFaults(delay_polls=delays[load.request.request_id]),
        decode={"num_usable_blocks": num_usable_blocks, "max_num_seqs": 3},
    )
    for index in range(data.draw(st.integers(2, 5))):
        name = f"r{index}"
        num_tokens = data.draw(st.integers(1, (num_usable_blocks - 1) * BLOCK_SIZE))
        delays[name] = data.draw(st.integers(0, 5))
        prompt = some_tokens(num_tokens, seed=data.draw(st.integers(0, 1)))
        max_tokens = data.draw(st.integers(1, BLOCK_SIZE + 1))
        if data.draw(st.booleans()):
            pair.send(name, prompt, max_tokens=max_tokens)
        else:
            pair.decode.add(name, prompt, max_tokens=max_tokens)
        if data.draw(st.booleans()):
            pair.turn(pair.decode)
    pair.decode.run(num_in_flight=depth)
    pair.decode.assert_as_if_alone()
    pair.run()
    pair.assert_idle()


# C8


def test_c8_landed_without_a_block_for_the_next_token_it_waits_with_its_kv() -> None:
    """X took the block that its last prompt token needs: it waits, and nobody is asked again."""
    pair = Pair(faults=LoopbackFaults(delay_polls=10), decode={"num_usable_blocks": 5})
    decode, calls = pair.decode, pair.connectors["decode"].calls
    params = pair.hand_over("a", prompt_of(3, more=1))
    decode.add("x", 8, max_tokens=24)
    pair.turn(decode)
    decode.add("a", prompt_of(3, more=1), kv_transfer_params=params)
    pair.turn(decode)
    # The load took three blocks; X grows into the fifth.
    assert decode.scheduler.status("a") is LOADING
    while decode.scheduler.status("a") is LOADING:
        pair.turn(decode)
    asked = calls["get_num_new_matched_tokens", "a"]
    for _ in range(8):
        pair.turn(decode)
        assert decode.scheduler.status("a") is RequestStatus.WAITING
        assert decode.scheduler.explain("a").code is SkipCode.NO_BLOCKS
        assert decode.pool.num_free_blocks == 0
    pair.run()
    assert calls["get_num_new_matched_tokens", "a"] == asked
    assert calls["update_state_after_alloc", "a"] == 1
    assert (decode.end("a").num_external_tokens, decode.end("a").num_preemptions) == (48, 0)
    decode.assert_as_if_alone()
    pair.assert_idle()


def test_c8_loaded_and_preempted_it_is_computed_like_any_other() -> None:
    """The fourth block is busy after its first token: it begins anew, without a second load."""
    pair = Pair(decode={"num_usable_blocks": 4})
    decode, calls = pair.decode, pair.connectors["decode"].calls
    decode.add("x", 5, max_tokens=10)
    pair.turn(decode)
    pair.send("a", prompt_of(3), max_tokens=6)
    while not decode.scheduler.stats().num_preemptions:
        pair.turn(decode)
    assert decode.scheduler.status("a") is RequestStatus.PREEMPTED
    pair.run()
    assert calls["update_state_after_alloc", "a"] == 1
    assert decode.end("a").num_preemptions >= 1
    decode.assert_as_if_alone()
    pair.assert_idle()


# C23


@pytest.mark.parametrize("delay_polls", [0, 3])
def test_c23_a_load_is_asked_for_once_an_admission(delay_polls: int) -> None:
    """Neither while it is under way nor when it landed is the connector asked again."""
    pair = Pair(faults=LoopbackFaults(delay_polls=delay_polls), decode={"max_num_seqs": 1})
    decode, calls = pair.decode, pair.connectors["decode"].calls
    decode.add("busy", 20, max_tokens=12)
    decode.step()
    pair.send("a", prompt_of(3))
    pair.run()
    # With the only row taken it is not looked at; when the row is free, it is asked once.
    assert calls["get_num_new_matched_tokens", "a"] == 1
    assert calls["update_state_after_alloc", "a"] == 1
    assert calls["request_finished", "a"] == 1
    decode.assert_as_if_alone()
    pair.assert_idle()


@pytest.mark.parametrize("max_load_retries", [0, 1, 3])
def test_c23_a_failed_load_is_tried_again_as_often_as_agreed(max_load_retries: int) -> None:
    """Each attempt asks once; after the last the prompt is computed and nobody is asked."""
    pair = Pair(faults=LoopbackFaults(fail="cable"), decode={"max_load_retries": max_load_retries})
    calls = pair.connectors["decode"].calls
    pair.send("a", prompt_of(3))
    pair.run()
    assert calls["get_num_new_matched_tokens", "a"] == max_load_retries + 1
    assert calls["update_state_after_alloc", "a"] == max_load_retries + 1
    assert pair.decode.scheduler.stats().num_failed_loads == max_load_retries + 1
    pair.decode.assert_as_if_alone()
    pair.assert_idle()


def test_c23_a_preempted_request_is_an_admission_of_its_own() -> None:
    """A reset is the one reason to ask again; what was redeemed is not offered twice."""
    pair = Pair()
    decode, calls = pair.decode, pair.connectors["decode"].calls
    pair.send("a", prompt_of(3), max_tokens=8)
    while not decode.tokens["a"]:
        pair.turn(decode)
    assert decode.scheduler.reset_prefix_cache(preempt_running=True)
    pair.run()
    assert calls["get_num_new_matched_tokens", "a"] == 2
    assert calls["update_state_after_alloc", "a"] == 1
    assert decode.end("a").num_external_tokens == 3 * BLOCK_SIZE - 1
    decode.assert_as_if_alone()
    pair.assert_idle()
