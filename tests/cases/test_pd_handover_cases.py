"""Faults of hand-overs: what is handed over, and kept until it is read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import Engine
from pd_pair import BLOCK_SIZE, HAND_OVER, Pair, prompt_of
from pipelines import DEPTHS

from pdcore.connector.loopback import LoopbackFaults
from pdcore.connector.loopback.ticket import LoopbackTicket
from pdcore.request import FinishReason, Request, RequestStatus
from pdcore.scheduler import SkipCode

# C12


def test_c12_a_prompt_that_is_here_already_costs_one_notice() -> None:
    """Nothing is moved, and P is told at once, one time."""
    pair = Pair()
    prompt = prompt_of(2, more=1)
    pair.decode.add("before", prompt, max_tokens=2)
    pair.decode.run()
    params = pair.hand_over("a", prompt)
    notices: list[str] = []
    release = pair.fabric.release

    def noted(ticket: LoopbackTicket) -> bool:
        notices.append(ticket.transfer_id)
        return release(ticket)

    pair.fabric.release = noted  # type: ignore[method-assign]
    pair.decode.add("a", prompt, kv_transfer_params=params)
    pair.turn(pair.decode)
    # D only begins, and P is free.
    assert len(pair.decode.tokens["a"]) == 1
    pair.turn(pair.prefill)
    assert pair.prefill.scheduler.stats().num_held_for_peers == 0
    pair.run()
    assert notices == [params["transfer_id"]]
    end = pair.decode.end("a")
    assert (end.num_cached_tokens, end.num_external_tokens) == (32, 0)
    assert pair.connectors["decode"].calls["update_state_after_alloc", "a"] == 0
    pair.decode.assert_as_if_alone()
    pair.assert_idle()


@pytest.mark.parametrize(
    ("num_tokens", "num_cached", "num_external"),
    [(1, 0, 0), (2, 0, 1), (15, 0, 14), (16, 0, 15), (17, 16, 0), (32, 16, 15), (47, 32, 14)],
)
def test_c12_what_is_here_is_not_moved_and_the_last_token_is_computed(
    num_tokens: int, num_cached: int, num_external: int
) -> None:
    """Prompts shorter than a block, whole blocks and partial hits: by position, to the token."""
    pair = Pair()
    pair.decode.add("before", prompt_of(2, more=15), max_tokens=1)
    pair.decode.run()
    prompt = prompt_of(2, more=15)[:num_tokens]
    pair.send("a", prompt, max_tokens=20)
    pair.run()
    end = pair.decode.end("a")
    assert (end.num_cached_tokens, end.num_external_tokens) == (num_cached, num_external)
    pair.decode.assert_as_if_alone()
    pair.assert_idle()


# C14


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("end", ["length", "stop token", "eos"])
def test_c14_a_prefill_hands_over_whatever_its_token_is(end: str, depth: int) -> None:
    """The one token may be a stop token: the decode engine gets the KV and stops the same way."""
    prompt = prompt_of(3)
    token = Engine().runner.solo_tokens(Request("a", prompt))[0]
    stops: dict[str, Any] = {"stop_token_ids": (token,)} if end == "stop token" else {}
    stops |= {"eos_token_id": token} if end == "eos" else {}
    pair = Pair()
    pair.prefill.add("a", prompt, max_tokens=1, kv_transfer_params=HAND_OVER, **stops)
    while not pair.prefill.ends["a"]:
        pair.prefill.dispatch()
        if len(pair.prefill._in_flight) >= depth or pair.prefill.plans[-1] == {}:
            pair.prefill.land()
    reason = FinishReason.LENGTH if end == "length" else FinishReason.STOP
    assert pair.prefill.reason("a") is reason
    params = pair.prefill.end("a").kv_transfer_params
    assert params is not None
    assert params["num_tokens"] == prompt.size
    while pair.prefill._in_flight:
        pair.prefill.land()
    pair.decode.add("a", prompt, max_tokens=1, kv_transfer_params=params, **stops)
    pair.run()
    assert pair.decode.end("a").num_external_tokens == prompt.size - 1
    assert (pair.decode.reason("a"), pair.decode.tokens["a"]) == (reason, [token])
    pair.assert_idle()


@pytest.mark.parametrize("end", ["abort", "error", "timeout", "capacity"])
def test_c14_only_a_complete_prefill_hands_over(end: str) -> None:
    """Aborted, failed, late or cut short: nothing is kept and nothing is promised."""
    fault = (lambda name, position: "a broken row") if end == "error" else None
    pair = Pair(
        prefill={
            "num_usable_blocks": 3,
            "max_num_batched_tokens": 16,
            "max_num_seqs": 4,
            "runner": {"row_fault": fault},
        }
    )
    deadline = 1.0 if end == "timeout" else None
    max_tokens = 9 if end == "capacity" else 1
    prompt = prompt_of(3, more=-8 if end != "capacity" else 0)
    pair.prefill.add(
        "a", prompt, max_tokens=max_tokens, deadline=deadline, kv_transfer_params=HAND_OVER
    )
    pair.prefill.step()
    if end == "abort":
        pair.prefill.abort("a")
    pair.run()
    assert str(pair.prefill.reason("a")) == end
    assert pair.prefill.end("a").kv_transfer_params is None
    pair.assert_idle()


# C15


def preempted_in_its_last_step(*, reset: bool) -> Pair:
    """A prefill whose final chunk is in flight when it loses its row to another request."""
    pair = Pair(prefill={"num_usable_blocks": 64 if reset else 4})
    prefill = pair.prefill
    prefill.add("other", 15, max_tokens=24)
    prefill.add("a", prompt_of(3), max_tokens=1, kv_transfer_params=HAND_OVER)
    prefill.dispatch()
    assert prefill.plans[-1] == {"other": 15, "a": 48}
    if reset:
        assert prefill.scheduler.reset_prefix_cache(preempt_running=True)
    else:
        # Position 15 has room; position 16 needs a second block, which A has.
        prefill.dispatch()
        prefill.dispatch()
    assert prefill.scheduler.status("a") is RequestStatus.PREEMPTED
    return pair


@pytest.mark.parametrize("reset", [False, True], ids=["preempted", "reset"])
@pytest.mark.parametrize("depth", DEPTHS)
def test_c15_a_prefill_preempted_in_its_last_step_is_done_again(depth: int, reset: bool) -> None:
    """The late token is dropped with the blocks that are gone; what is handed over is whole."""
    pair = preempted_in_its_last_step(reset=reset)
    prefill = pair.prefill
    prefill.land()
    assert (prefill.tokens["a"], prefill.ends["a"]) == ([], [])
    while not prefill.ends["a"]:
        if len(prefill._in_flight) >= depth or not prefill.dispatch():
            prefill.land()
    prefill.assert_as_if_alone("a")
    params = prefill.end("a").kv_transfer_params
    assert params is not None
    assert (params["num_tokens"], len(params["block_ids"])) == (48, 3)
    while prefill._in_flight:
        prefill.land()
    pair.decode.add("a", prompt_of(3), kv_transfer_params=params)
    pair.run()
    assert pair.decode.end("a").num_external_tokens == 47
    pair.decode.assert_as_if_alone()
    pair.prefill.assert_as_if_alone()
    pair.assert_idle()


def test_c15_other_late_tokens_are_kept() -> None:
    """A token that is not the last, and one of a request that hands nothing over, count."""
    pair = Pair()
    prefill = pair.prefill
    prefill.add("a", prompt_of(3), max_tokens=2, kv_transfer_params=HAND_OVER)
    prefill.add("plain", prompt_of(3, seed=1), max_tokens=1)
    prefill.dispatch()
    assert prefill.scheduler.reset_prefix_cache(preempt_running=True)
    prefill.land()
    assert (len(prefill.tokens["a"]), prefill.reason("plain")) == (1, FinishReason.LENGTH)
    while not prefill.ends["a"]:
        prefill.step()
    assert prefill.end("a").kv_transfer_params is not None
    prefill.assert_as_if_alone()


# C30


def test_c30_what_is_to_be_sent_stays_until_it_is_read() -> None:
    """A request that needs every block waits for the reader; what it reads is what was computed."""
    pair = Pair(faults=LoopbackFaults(delay_polls=6), prefill={"num_usable_blocks": 6})
    params = pair.hand_over("a", prompt_of(3))
    before = pair.prefill.runner.kv_caches.buffer[params["block_ids"]].copy()
    pair.decode.add("a", prompt_of(3), kv_transfer_params=params)
    pair.prefill.add("b", prompt_of(4, seed=1), max_tokens=1)
    pair.prefill.add("small", prompt_of(2, seed=2), max_tokens=1)
    num_checked = 0
    while not pair.decode.tokens["a"]:
        pair.turn(pair.prefill)
        if pair.prefill.scheduler.stats().num_held_for_peers:
            assert pair.prefill.scheduler.explain("b").code is SkipCode.NO_BLOCKS
            kept = pair.prefill.runner.kv_caches.buffer[params["block_ids"]]
            assert np.array_equal(kept, before)
            num_checked += 1
        pair.turn(pair.decode)
    assert num_checked > 5
    pair.run()
    assert pair.decode.end("a").num_external_tokens == 3 * BLOCK_SIZE - 1
    pair.decode.assert_as_if_alone()
    pair.prefill.assert_as_if_alone("b", "small")
    pair.assert_idle()


def test_c30_a_reset_cache_and_an_eviction_leave_what_is_to_be_sent() -> None:
    """Neither dropping every prefix nor taking every free block touches kept blocks."""
    pair = Pair(prefill={"num_usable_blocks": 6})
    params = pair.hand_over("a", prompt_of(3))
    assert not pair.prefill.scheduler.reset_prefix_cache(preempt_running=True)
    for seed in range(4):
        pair.prefill.add(f"other{seed}", prompt_of(2, more=8, seed=seed + 1), max_tokens=1)
        pair.prefill.step()
    pair.decode.add("a", prompt_of(3), kv_transfer_params=params)
    pair.run()
    assert pair.decode.end("a").num_external_tokens == 3 * BLOCK_SIZE - 1
    pair.decode.assert_as_if_alone()
    pair.assert_idle()
