"""A decode engine's tickets: renewed while they may be used, given back once, lapsed."""

from __future__ import annotations

import attrs
import numpy as np
from nixl_engines import an_empty_plan, until
from nixl_halves import PROMPT, Half, decode_request, half, sent_by

from pdcore.clock import VirtualClock
from pdcore.messages import NewRequestData
from pdcore.request import SamplingParams


def new_request_data(uid: int) -> NewRequestData:
    """What a plan says of a request that starts."""
    return NewRequestData(
        row=0,
        epoch=0,
        uid=uid,
        request_id="d",
        token_ids=np.array(PROMPT, dtype=np.int32),
        num_prompt_tokens=len(PROMPT),
        num_computed_tokens=12,
        block_ids=np.zeros(4, dtype=np.int32),
        sampling=SamplingParams(),
    )


def test_nothing_to_read_gives_the_ticket_back_once(
    prefill: Half, decode: Half, notices: list[str]
) -> None:
    """With the whole prefix here the ticket goes back when the request is admitted, one time."""
    prompt = PROMPT[:13]
    ticket = prefill.ticket(prompt)
    request = decode_request(ticket, prompt)
    uid = decode.add(request)
    assert decode.match(request, 12) == 0
    assert sent_by(prefill) == []
    plan = attrs.evolve(an_empty_plan(), scheduled_new_reqs=(new_request_data(uid),))
    decode.connector.build_connector_meta(plan)
    until(lambda: sent_by(prefill) == [ticket["transfer_id"]])
    decode.connector.build_connector_meta(plan)
    decode.end(request, uid)
    decode.connector.close()
    assert notices == [ticket["transfer_id"]]
    assert sent_by(prefill) == [ticket["transfer_id"]]
    assert decode.match(request, 0) == 0


def test_a_link_that_nobody_uses_any_more_is_let_go(prefill: Half) -> None:
    """With its last ticket's end it has no users; others have come for a while by then."""
    clock = VirtualClock()
    with half(clock=clock, idle_peer_timeout_s=5.0) as decode, half() as other:
        links = decode.connector._parts.links
        request = decode_request(prefill.ticket())
        uid = decode.add(request)
        (link,) = (entry.link for entry in links._entries.values())
        decode.add(decode_request(prefill.ticket()))
        assert link.num_users == 2
        clock.advance(6.0)
        decode.add(decode_request(other.ticket()))
        assert len(links._entries) == 2
        for number in (uid, uid + 1):
            decode.end(request, number)
        assert link.num_users == 0
        clock.advance(6.0)
        decode.add(decode_request(other.ticket()))
        assert link not in [entry.link for entry in links._entries.values()]


def test_an_abort_in_the_queue_gives_the_ticket_back(prefill: Half, decode: Half) -> None:
    """A request that ends before it is admitted frees P's blocks at once."""
    ticket = prefill.ticket()
    request = decode_request(ticket)
    uid = decode.add(request)
    decode.end(request, uid)
    until(lambda: sent_by(prefill) == [ticket["transfer_id"]])
    assert not decode.connector.has_pending()


def test_a_closing_engine_gives_its_tickets_back(prefill: Half, decode: Half) -> None:
    """Tickets of requests that never ran go back when the engine closes."""
    ticket = prefill.ticket()
    decode.add(decode_request(ticket))
    decode.connector.close()
    assert sent_by(prefill) == [ticket["transfer_id"]]


def test_a_lapsed_ticket_fails_its_load() -> None:
    """Data read after the lease ended is refused, with the cause, however good it looks."""
    clock = VirtualClock()
    with half(clock=clock, lease_s=30) as prefill, half() as decode:
        request = decode_request(prefill.ticket())
        uid = decode.add(request)
        load = decode.load(request, uid, num_local=4)
        decode.plan_with_read()
        clock.advance(31)
        decode.workers_say(finished=load)
        decode.until_event()
        (failure,) = decode.failed
        assert decode.received == []
        assert failure.num_valid_tokens == 4
        assert "its lease of 30 s ended without a renewal" in failure.cause
        assert decode.match(request) == 0


def test_a_ticket_that_lapsed_in_the_queue_fails_its_load() -> None:
    """A ticket that is found dead before its load is offered once, so that the failure shows."""
    clock = VirtualClock()
    with half(clock=clock, lease_s=30) as prefill, half() as decode:
        ticket = prefill.ticket()
        clock.advance(31)
        request = decode_request(ticket)
        uid = decode.add(request)
        until(lambda: decode.num_notices >= 2)
        decode.take_events()
        load = decode.load(request, uid, num_local=8)
        decode.take_events()
        (failure,) = decode.failed
        assert (failure.transfer, failure.num_valid_tokens) == (load.transfer, 8)
        assert "its lease of 30 s ended" in failure.cause
        assert decode.match(request) == 0
        assert decode.plan() is None


def test_a_queued_request_renews_its_lease(prefill: Half, decode: Half) -> None:
    """A ticket outlives its lease many times while its request waits, and not once it ended."""
    with half(lease_s=0.3) as prefill:
        ticket = prefill.ticket()
        request = decode_request(ticket)
        uid = decode.add(request)
        start = prefill.connector.next_wakeup()
        assert start is not None
        until(lambda: (prefill.connector.next_wakeup() or 0) > start + 1.0)
        assert sent_by(prefill) == []
        decode.end(request, uid)
        until(lambda: sent_by(prefill) == [ticket["transfer_id"]])


def test_two_consumers_cannot_share_a_ticket(prefill: Half, decode: Half) -> None:
    """Of two engines that read with one ticket, the second is told no."""
    ticket = prefill.ticket()
    with half() as rival:
        request = decode_request(ticket)
        loads = [engine.load(request, engine.add(request)) for engine in (decode, rival)]
        decode.plan_with_read()
        rival.plan_with_read()
        for engine, load in zip((decode, rival), loads, strict=True):
            engine.workers_say(finished=load)
            engine.until_event()
        assert decode.received
        assert "it was accepted before" in rival.failed[0].cause
