"""Faults of leases: how long a ticket lasts, and who ends it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pd_pair import BLOCK_SIZE, LEASE_S, Pair, prompt_of

from pdcore.connector.loopback import LoopbackFaults
from pdcore.errors import DuplicateRequest, InvalidRequest
from pdcore.request import FinishReason, RequestStatus
from pdcore.scheduler import SkipCode

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


def test_c11_a_lease_whose_end_a_reader_finds_out_is_work_for_its_engine() -> None:
    """P's loop is late, and D asks before it: P does not sleep on with its blocks held."""
    pair = Pair()
    params = pair.hand_over("a", prompt_of(2))
    pair.turn(pair.prefill)
    pair.turn(pair.prefill)
    assert not pair.prefill.scheduler.has_work()
    pair.clock.advance(LEASE_S)
    pair.decode.add("a", prompt_of(2), kv_transfer_params=params)
    assert pair.prefill.scheduler.stats().num_held_for_peers == 1
    assert pair.prefill.scheduler.has_work()
    pair.run()
    pair.decode.assert_as_if_alone()
    pair.assert_idle()


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
