"""Faults that users of inference engines met between a prefill engine and a decode engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
from harness import Engine, some_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from pd_pair import BLOCK_SIZE, LEASE_S, Pair

from pdcore.connector.loopback import LoopbackConnector, LoopbackFabric, LoopbackFaults
from pdcore.connector.loopback.ticket import LoopbackTicket
from pdcore.connector.null import NullConnector
from pdcore.errors import DuplicateRequest, InvalidRequest
from pdcore.request import FinishReason, Request, RequestStatus
from pdcore.scheduler import SkipCode

DEPTHS = [1, 2, 3]
HAND_OVER = {"do_remote_decode": True}


def prompt_of(num_blocks: int, *, more: int = 0, seed: int = 0) -> np.ndarray:
    """A prompt that fills so many blocks, and ``more`` tokens of the next."""
    return some_tokens(num_blocks * BLOCK_SIZE + more, seed=seed)


# C9


def test_c9_a_request_that_queues_longer_than_the_lease_keeps_it() -> None:
    """The decode engine is busy for many leases; it renews, and reads what was promised."""
    pair = Pair(decode={"max_num_seqs": 1})
    pair.decode.add("busy", 20, max_tokens=200)
    pair.decode.step()
    pair.send("a", prompt_of(3))
    while not pair.decode.ends["busy"]:
        pair.decode.step()
        pair.turn(pair.prefill)
        assert pair.prefill.scheduler.stats().num_held_for_peers == 1
    assert pair.clock.now() > 5 * LEASE_S
    pair.run()
    assert pair.decode.end("a").num_external_tokens == 3 * BLOCK_SIZE - 1
    pair.decode.assert_as_if_alone()
    pair.assert_idle()


@pytest.mark.parametrize("on_load_failure", ["recompute", "fail"])
@pytest.mark.parametrize("moment", ["before it is added", "in the queue", "while it is read"])
def test_c9_blocks_read_after_their_lease_are_never_used(moment: str, on_load_failure: str) -> None:
    """The decode engine hangs for 40 s and P's blocks pass on to others: it finds that out."""
    pair = Pair(
        faults=LoopbackFaults(delay_polls=1),
        prefill={"num_usable_blocks": 6},
        decode={"max_num_seqs": 1, "on_load_failure": on_load_failure},
    )
    decode, prompt = pair.decode, prompt_of(3)
    params = pair.hand_over("a", prompt)

    def hang() -> None:
        """Only the prefill engine goes on."""
        pair.clock.advance(40.0)
        pair.prefill.add("other", 5 * BLOCK_SIZE, max_tokens=BLOCK_SIZE)
        pair.prefill.run()
        assert pair.prefill.scheduler.stats().num_held_for_peers == 0

    if moment == "before it is added":
        hang()
    decode.add("busy", 20, max_tokens=1)
    decode.add("a", prompt, kv_transfer_params=params)
    if moment == "in the queue":
        hang()
    while decode.scheduler.status("a") is RequestStatus.WAITING and not decode.tokens["a"]:
        pair.turn(decode)
        if moment != "while it is read" and decode.ends["busy"]:
            break
    if moment == "while it is read":
        assert decode.scheduler.status("a") is RequestStatus.WAITING_FOR_REMOTE_KVS
        hang()
    pair.run()
    assert decode.end("a").num_external_tokens == 0
    if on_load_failure == "recompute" or moment != "while it is read":
        decode.assert_as_if_alone()
    else:
        assert decode.reason("a") is FinishReason.ERROR
        assert "its lease of 30 s ended without a renewal" in str(decode.end("a").cause)
    pair.assert_idle()


@pytest.mark.parametrize("moment", ["when it is added", "when it is accepted"])
def test_c9_the_clock_decides_and_not_the_prefill_engines_steps(moment: str) -> None:
    """P made no step since, and its blocks are as they were: a lease that ended has ended."""
    pair = Pair(faults=LoopbackFaults(delay_polls=1))
    params = pair.hand_over("a", prompt_of(3))
    if moment == "when it is added":
        pair.clock.advance(LEASE_S)
    pair.decode.add("a", prompt_of(3), kv_transfer_params=params)
    pair.turn(pair.decode)
    if moment == "when it is accepted":
        # The load lands with this step, before anybody could renew.
        output = pair.decode.schedule()
        pair.clock.advance(LEASE_S)
        pair.decode.execute(output)
        pair.decode.land()
    pair.run()
    assert pair.decode.end("a").num_external_tokens == 0
    pair.decode.assert_as_if_alone()
    pair.assert_idle()


@given(hangs=st.lists(st.sampled_from([0.0, 1.0, 14.0, 29.0, 31.0]), max_size=8), data=st.data())
def test_c9_however_the_decode_engine_hangs_no_token_is_wrong(
    hangs: list[float], data: st.DataObject
) -> None:
    """Its blocks at P are reused the moment that they are free."""
    pair = Pair(faults=LoopbackFaults(delay_polls=2), prefill={"num_usable_blocks": 6})
    pair.send("a", prompt_of(3))
    for index, seconds in enumerate(hangs):
        pair.clock.advance(seconds)
        if data.draw(st.booleans()):
            pair.prefill.add(f"other{index}", 5 * BLOCK_SIZE, max_tokens=1)
        pair.turn(pair.prefill)
        if data.draw(st.booleans()):
            pair.turn(pair.decode)
    pair.run()
    pair.decode.assert_as_if_alone()
    pair.prefill.assert_as_if_alone()
    pair.assert_idle()


# C10


def busy_prefill(**options: Any) -> tuple[Pair, dict[str, Any]]:
    """A prefill engine that holds 10 of its 12 blocks for A; the other request there needs 8."""
    pair = Pair(prefill={"num_usable_blocks": 12, "enable_prefix_caching": False}, **options)
    params = pair.hand_over("a", prompt_of(10))
    pair.prefill.add("b", prompt_of(8, seed=1), max_tokens=1)
    for _ in range(2):
        pair.turn(pair.prefill)
    assert pair.prefill.scheduler.explain("b").code is SkipCode.NO_BLOCKS
    assert not pair.prefill.scheduler.has_work()
    return pair, params


def assert_freed_at_once(pair: Pair) -> None:
    """The prefill engine learns of it without any time passing, and the other request runs."""
    began = pair.clock.now()
    assert pair.prefill.scheduler.has_work()
    pair.run(pair.prefill)
    assert pair.clock.now() == began
    pair.prefill.assert_as_if_alone("b")
    pair.prefill.assert_idle()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"decode": {"max_model_len": 100}}, InvalidRequest),
        ({"decode": {"num_usable_blocks": 4}}, InvalidRequest),
        ({"decode": {}}, DuplicateRequest),
    ],
    ids=["too long", "too large", "a taken id"],
)
def test_c10_a_request_that_the_decode_engine_refuses_frees_its_blocks_at_once(
    options: dict[str, Any], error: type[Exception]
) -> None:
    """P need not wait for the lease when D says no before it even queues the request."""
    pair, params = busy_prefill(**options)
    if error is DuplicateRequest:
        pair.decode.add("a", 20)
    with pytest.raises(error):
        pair.decode.add("a", prompt_of(10), kv_transfer_params=params)
    assert_freed_at_once(pair)


def test_c10_a_second_copy_of_a_request_takes_nothing_from_the_first() -> None:
    """A router that sends it twice gets one refusal; what the first one waits for stays."""
    pair, params = busy_prefill(decode={"max_num_seqs": 1})
    pair.decode.add("busy", 20, max_tokens=3)
    pair.decode.step()
    pair.decode.add("a", prompt_of(10), kv_transfer_params=params)
    with pytest.raises(DuplicateRequest):
        pair.decode.add("a", prompt_of(10), kv_transfer_params=params)
    pair.run()
    assert pair.decode.end("a").num_external_tokens == 10 * BLOCK_SIZE - 1
    pair.decode.assert_as_if_alone()
    pair.assert_idle()


@pytest.mark.parametrize("num_turns", [0, 1, 2, 3])
def test_c10_an_abort_at_the_decode_engine_frees_the_blocks_at_once(num_turns: int) -> None:
    """Queued or being read, it costs P no lease."""
    pair, params = busy_prefill(faults=LoopbackFaults(delay_polls=9), decode={"max_num_seqs": 1})
    pair.decode.add("busy", 20, max_tokens=2)
    pair.decode.step()
    pair.decode.add("a", prompt_of(10), kv_transfer_params=params)
    for _ in range(num_turns):
        pair.turn(pair.decode)
    pair.decode.abort("a")
    assert_freed_at_once(pair)
    pair.run()
    pair.assert_idle()


def test_c10_without_any_word_the_lease_ends_it_and_late_notices_change_nothing() -> None:
    """Nobody comes: the blocks are free with the lease. Then somebody comes, twice."""
    pair, params = busy_prefill()
    began = pair.clock.now()
    pair.run(pair.prefill)
    # It was granted before the other request was tried, in the step that ended with a second.
    assert LEASE_S - 1 <= pair.clock.now() - began <= LEASE_S
    pair.prefill.assert_as_if_alone("b")
    for name in ("late", "later"):
        pair.decode.add(name, prompt_of(10), kv_transfer_params=params)
        pair.decode.abort(name)
    pair.decode.add("latest", prompt_of(10), kv_transfer_params=params)
    pair.run()
    pair.decode.assert_as_if_alone("latest")
    assert pair.decode.scheduler.stats().num_external_tokens == 0
    pair.assert_idle()


# C11


@pytest.mark.parametrize("has_waiting", [True, False])
def test_c11_leases_end_in_an_engine_that_has_nothing_to_run(has_waiting: bool) -> None:
    """With the pool full of kept blocks, steps without tokens still let them go in time."""
    pair = Pair(prefill={"num_usable_blocks": 8, "enable_prefix_caching": False})
    scheduler = pair.prefill.scheduler
    began = pair.clock.now()
    for index in range(2):
        pair.hand_over(f"r{index}", prompt_of(4, seed=index))
    assert pair.prefill.pool.num_free_blocks == 0
    if has_waiting:
        pair.prefill.add("waiting", prompt_of(8, seed=9), max_tokens=1)
    for _ in range(2):
        assert not pair.turn(pair.prefill)
    assert scheduler.has_requests()
    # Nothing to do, so the loop sleeps, and it knows until when.
    assert not scheduler.has_work()
    assert scheduler.next_wakeup() == began + LEASE_S
    pair.clock.advance(began + LEASE_S - pair.clock.now())
    assert scheduler.has_work()
    planned = pair.prefill.dispatch()
    assert planned == {}
    pair.prefill.land()
    assert pair.prefill.pool.num_free_blocks == 4
    pair.run(pair.prefill)
    assert pair.clock.now() <= began + LEASE_S + 1
    pair.prefill.assert_as_if_alone()
    pair.prefill.assert_idle()


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


# C20, C21


def test_c21_a_peer_that_restarts_fails_what_is_in_flight_and_serves_what_comes_anew() -> None:
    """One load in flight, one queued, one still to come: each ends right, nothing is left."""
    pair = Pair(faults=LoopbackFaults(delay_polls=5), decode={"max_num_parked": 1})
    decode = pair.decode
    params = [pair.hand_over(f"r{index}", prompt_of(3, seed=index)) for index in range(2)]
    for index, ticket in enumerate(params):
        prompt = prompt_of(3, seed=index)
        decode.add(f"r{index}", prompt, kv_transfer_params=ticket)
    pair.turn(decode)
    assert decode.scheduler.explain("r1").code is SkipCode.TOO_MANY_PARKED
    pair.fabric.restart("prefill")
    pair.run()
    assert [decode.end(f"r{index}").num_external_tokens for index in range(2)] == [0, 0]
    pair.send("new", prompt_of(3, seed=5))
    pair.run()
    assert decode.end("new").num_external_tokens == 3 * BLOCK_SIZE - 1
    decode.assert_as_if_alone()
    pair.assert_idle()


def test_c20_a_dead_or_silent_peer_holds_up_no_other() -> None:
    """One of two prefill engines is gone: the other's load is served, and the pair goes on."""
    pair = Pair(
        faults=lambda load: LoopbackFaults(lose=load.request.request_id == "silent"),
        decode={"load_timeout_s": 50.0},
    )
    second = pair.join("second")
    for name in ("dead", "silent"):
        pair.send(name, prompt_of(3, seed=len(pair.decode.requests)))
    prompt = prompt_of(3, seed=7)
    second.add("good", prompt, max_tokens=1, kv_transfer_params=HAND_OVER)
    second.step()
    params = second.end("good").kv_transfer_params
    pair.decode.add("good", prompt, kv_transfer_params=params)
    began = pair.clock.now()
    pair.fabric.kill("prefill")
    while not pair.decode.ends["good"]:
        pair.turn(pair.decode)
    assert pair.clock.now() == began
    assert pair.decode.end("good").num_external_tokens == 3 * BLOCK_SIZE - 1
    pair.run(pair.decode)
    pair.decode.assert_as_if_alone()
    pair.decode.assert_idle()


# C27

LOAD_FAILURES: dict[str, tuple[Callable[[Pair], None], LoopbackFaults, str]] = {
    "silence": (lambda pair: None, LoopbackFaults(lose=True), "no completion within 20 s"),
    "transport": (lambda pair: None, LoopbackFaults(fail="cable pulled"), "cable pulled"),
    "partial": (
        lambda pair: None,
        LoopbackFaults(num_valid_tokens=16),
        "only 16 of 47 tokens arrived",
    ),
    "dead": (
        lambda pair: pair.fabric.kill("prefill"),
        LoopbackFaults(delay_polls=3),
        "engine 'prefill' is gone",
    ),
    "restarted": (
        lambda pair: pair.fabric.restart("prefill"),
        LoopbackFaults(delay_polls=3),
        "engine 'prefill' restarted",
    ),
    "lapsed": (
        lambda pair: pair.clock.advance(LEASE_S) and None,
        LoopbackFaults(delay_polls=3),
        "its lease of 30 s ended",
    ),
}


@pytest.mark.parametrize("kind", LOAD_FAILURES)
def test_c27_a_load_that_fails_ends_its_request_with_the_cause(kind: str) -> None:
    """Neither "stop" nor "length", no token, and words that fit this failure and no other."""
    happen, faults, words = LOAD_FAILURES[kind]
    pair = Pair(
        faults=faults,
        decode={"on_load_failure": "fail", "load_timeout_s": 100.0 if kind == "lapsed" else 20.0},
    )
    pair.send("a", prompt_of(3))
    pair.turn(pair.decode)
    happen(pair)
    pair.run(pair.decode)
    end = pair.decode.end("a")
    assert (end.finish_reason, pair.decode.tokens["a"]) == (FinishReason.ERROR, [])
    assert str(end.cause).startswith("remote KV could not be loaded: ")
    others = [other for name, (_, _, other) in LOAD_FAILURES.items() if name != kind]
    assert words in str(end.cause)
    assert not any(other in str(end.cause) for other in others)
    pair.decode.assert_idle()


@pytest.mark.parametrize("max_load_retries", [1, 2])
def test_c27_with_tries_left_a_failed_load_is_not_the_end(max_load_retries: int) -> None:
    """Under the policy "fail" too, the request fails only when its last try has failed."""
    pair = Pair(
        faults=lambda load: LoopbackFaults(
            fail="cable" if load.transfer.attempt <= max_load_retries else None
        ),
        decode={"on_load_failure": "fail", "max_load_retries": max_load_retries},
    )
    pair.send("a", prompt_of(3))
    pair.run()
    assert pair.decode.end("a").num_external_tokens == 3 * BLOCK_SIZE - 1
    pair.decode.assert_as_if_alone()
    pair.assert_idle()


@pytest.mark.parametrize("kind", ["raises", "keeps nothing"])
def test_c27_a_hand_over_that_fails_is_no_success(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A prefill for another engine that leaves nothing to it ends with an error that says so."""
    if kind == "raises":
        fabric = LoopbackFabric()
        connector = LoopbackConnector(fabric, engine_id="p", block_size=BLOCK_SIZE)
        engine = Engine(connector=connector)
        engine.scheduler._core.connector._grant = None  # type: ignore[union-attr]
    else:
        engine = Engine(connector=NullConnector())
    engine.add("a", prompt_of(3), max_tokens=1, kv_transfer_params=HAND_OVER)
    engine.add("plain", 20, max_tokens=3)
    output = engine.schedule()
    engine.execute(output)
    result = engine.land()
    place = result.request_ids.index("a")
    assert result.finish_reasons[place] == FinishReason.ERROR
    assert engine.reason("a") is FinishReason.ERROR
    assert engine.end("a").kv_transfer_params is None
    words = "request_finished() raised TypeError" if kind == "raises" else "kept nothing of its 48"
    assert f"its KV could not be handed over: {words}" in str(engine.end("a").cause).replace(
        "the connector ", ""
    )
    engine.run()
    engine.assert_as_if_alone("plain")
    engine.assert_idle()


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


# C33


@pytest.fixture
def quiet_log() -> Iterator[None]:
    """Cutting off a peer is worth a warning, but not thousands of them."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


class Storm:
    """Requests come, and all are aborted, each at a moment of its own, on either side."""

    def __init__(self, random: Random, *, num_requests: int) -> None:
        self.random = random
        self.pair = Pair(
            faults=lambda load: LoopbackFaults(
                delay_polls=random.choice((0, 0, 1, 4)),
                late_write=random.random() < 0.5,
                lose=random.random() < 0.1,
                duplicate=random.random() < 0.2,
            ),
            lease_s=random.choice((3.0, 30.0)),
            prefill={"num_usable_blocks": random.randint(6, 40), "max_num_seqs": 4},
            decode={
                "num_usable_blocks": random.randint(6, 40),
                "max_num_seqs": 4,
                "load_timeout_s": 15.0,
                "quarantine_timeout_s": 5.0,
                "max_num_parked": random.choice((2, 100)),
            },
        )
        self._num_requests = num_requests
        self._sent: set[str] = set()

    def run(self) -> None:
        """Every request is aborted on the side where it is found; some are found too late."""
        random, pair = self.random, self.pair
        for index in range(self._num_requests):
            self._add(f"r{index}")
            for _ in range(random.choice((0, 0, 0, 1, 2))):
                self._turn()
            for _ in range(random.choice((0, 1, 1, 2))):
                self._abort(f"r{random.randint(max(0, index - 8), index)}")
        for index in range(self._num_requests):
            self._abort(f"r{index}")
        pair.run()

    def probe(self) -> None:
        """One request goes all the way, and both pools are as they were in the beginning."""
        pair = self.pair
        pair.fabric.faults = LoopbackFaults()
        prompt = prompt_of(3, seed=99)
        pair.send("probe", prompt, max_tokens=10)
        pair.run()
        assert pair.decode.end("probe").num_external_tokens == prompt.size - 1
        pair.decode.assert_as_if_alone("probe")

    def check(self) -> None:
        for engine in (self.pair.prefill, self.pair.decode):
            engine.assert_so_far_as_if_alone()
            assert all(len(ends) == 1 for ends in engine.ends.values())
        self.pair.assert_idle()

    def _add(self, name: str) -> None:
        prompt = prompt_of(self.random.randint(0, 4), more=self.random.randint(1, 15))
        prompt = np.concatenate((prompt, [4 + self.random.randint(0, 3)])).astype(np.int32)
        self.pair.prefill.add(name, prompt, max_tokens=1, kv_transfer_params=HAND_OVER)

    def _turn(self) -> None:
        pair = self.pair
        for engine in (pair.prefill, pair.decode):
            pair.turn(engine)
        for name, ends in list(pair.prefill.ends.items()):
            if ends and name not in self._sent:
                self._sent.add(name)
                params, prompt = ends[0].kv_transfer_params, pair.prefill.requests[name]
                # The router loses one in ten.
                if params is not None and self.random.random() < 0.9:
                    pair.decode.add(name, prompt.prompt_token_ids, kv_transfer_params=params)
        pair.clock.advance(self.random.choice((0.0, 0.1, 1.0)))

    def _abort(self, name: str) -> None:
        side = self.random.choice((self.pair.prefill, self.pair.decode))
        for engine in (side, self.pair.prefill, self.pair.decode):
            if engine.scheduler.status(name) is not None:
                engine.abort(name)
                return


@pytest.mark.usefixtures("quiet_log")
@pytest.mark.parametrize("seed", range(4))
def test_c33_a_storm_of_cancels_leaves_both_engines_alive_and_empty(seed: int) -> None:
    """300 requests aborted at random phases; then a probe is loaded and served."""
    storm = Storm(Random(seed), num_requests=300)
    storm.run()
    storm.check()
    storm.probe()
    storm.check()


@pytest.mark.usefixtures("quiet_log")
@settings(max_examples=settings.default.max_examples // 4)
@given(random=st.randoms(use_true_random=False), num_requests=st.integers(1, 25))
def test_c33_any_small_storm_is_survived(random: Random, num_requests: int) -> None:
    """The same of all sizes, so that what is found is small."""
    storm = Storm(random, num_requests=num_requests)
    storm.run()
    storm.probe()
    storm.check()
