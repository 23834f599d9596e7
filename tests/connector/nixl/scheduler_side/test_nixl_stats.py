"""What the NIXL connector counts and explains, over a real side channel and without workers."""

from __future__ import annotations

import socket

import attrs
import pytest
from nixl_engines import until
from nixl_halves import PROMPT, Half, half

from pdcore.clock import MonotonicClock
from pdcore.connector import ConnectorStats, LoadCounts, TicketCounts, TransferStats
from pdcore.connector.base import KVLoad
from pdcore.connector.nixl import NixlConfig, NixlConnector
from pdcore.connector.nixl.doorbell import DoorbellListener, ring
from pdcore.connector.nixl.notices import NoticeKind, NoticeSender
from pdcore.errors import ConfigError
from pdcore.messages import TransferKey, TransferReport
from pdcore.request import Request


def reading(prefill: Half, decode: Half) -> tuple[Request, int, KVLoad]:
    """A request whose load the workers have."""
    request = Request("d", PROMPT, kv_transfer_params=prefill.ticket())
    uid = decode.add(request)
    load = decode.load(request, uid)
    decode.plan_with_read()
    return request, uid, load


def counted_by(prefill: Half, **counts: int) -> bool:
    """Whether the prefill engine's count of its one ticket is this; it may take a moment."""
    return prefill.connector.stats().tickets == TicketCounts(num_granted=1, **counts)


def test_a_good_load(prefill: Half, decode: Half) -> None:
    """One load with its measurements and the time of acceptance; one ticket accepted."""
    _, _, load = reading(prefill, decode)
    assert decode.connector.stats() == ConnectorStats(loads=LoadCounts(num_started=1))
    stats = TransferStats(
        transfer=load.transfer,
        peer="p",
        num_bytes=256,
        num_blocks=4,
        num_descriptors=2,
        queued_at=1.0,
        started_at=2.0,
        ended_at=3.0,
    )
    decode.connector.update_connector_output(
        TransferReport(finished_recving=(load.transfer,), measured=(stats,))
    )
    assert decode.connector.stats().transfers == ()
    decode.until_event()
    found = decode.connector.stats()
    assert found.loads == LoadCounts(num_started=1, num_finished=1)
    (transfer,) = found.transfers
    assert transfer.accept_s is not None
    assert 0 < transfer.accept_s < 1
    assert attrs.evolve(transfer, accept_s=None) == stats
    assert counted_by(prefill, num_accepted=1)


def test_late_and_repeated_reports(prefill: Half, decode: Half) -> None:
    """A load that is reported three times and one that never was: two duplicates, one late."""
    _, uid, load = reading(prefill, decode)
    for _ in range(3):
        decode.workers_say(finished=load)
    decode.workers_say(failed=attrs.evolve(load, transfer=TransferKey(uid, 7)))
    decode.until_event()
    assert decode.connector.stats().loads == LoadCounts(
        num_started=1, num_finished=1, num_late=1, num_duplicate=2
    )


def test_a_load_that_the_peer_does_not_vouch_for(prefill: Half, decode: Half) -> None:
    """A ticket that was read by another engine before is one rejection on each side."""
    ticket = prefill.ticket()
    with half() as rival:
        for engine in (rival, decode):
            request = Request("d", PROMPT, kv_transfer_params=ticket)
            load = engine.load(request, engine.add(request))
            engine.plan_with_read()
            engine.workers_say(finished=load)
            engine.until_event()
    assert decode.connector.stats().loads == LoadCounts(num_started=1, num_failed=1, num_rejected=1)
    assert prefill.connector.stats().tickets.num_rejected == 1


def test_a_cancelled_load(prefill: Half, decode: Half) -> None:
    """A load that nobody wants when its data comes is cancelled, and its ticket given back."""
    request, uid, load = reading(prefill, decode)
    decode.connector.cancel(load.transfer)
    decode.end(request, uid)
    decode.workers_say(finished=load)
    assert decode.connector.stats().loads == LoadCounts(num_started=1, num_cancelled=1)
    until(lambda: counted_by(prefill, num_released=1))


def test_a_failed_load_keeps_its_ticket(prefill: Half, decode: Half) -> None:
    """A read that failed can be tried again; the second load is counted for itself."""
    request, uid, load = reading(prefill, decode)
    decode.workers_say(failed=load)
    decode.take_events()
    again = decode.load(request, uid, attempt=1)
    decode.plan_with_read()
    decode.workers_say(finished=again)
    until(lambda: decode.take_events() or decode.received)
    assert decode.connector.stats().loads == LoadCounts(num_started=2, num_finished=1, num_failed=1)
    assert counted_by(prefill, num_accepted=1)


def test_a_lost_ticket_has_expired(decode: Half) -> None:
    """A lease that ends before it is renewed counts on both sides."""
    with half(lease_s=0.05) as prefill:
        ticket = prefill.ticket()
        until(lambda: prefill.take_events() or prefill.sent)
        decode.add(Request("d", PROMPT, kv_transfer_params=ticket))
        until(lambda: decode.take_events() or decode.connector.stats().loads.num_expired)
        assert decode.connector.stats().loads == LoadCounts(num_expired=1)
        assert counted_by(prefill, num_expired=1, num_late=1)


def test_an_undone_load(prefill: Half, decode: Half) -> None:
    """A plan that was taken back started nothing."""
    request = Request("d", PROMPT, kv_transfer_params=prefill.ticket())
    load = decode.load(request, decode.add(request))
    decode.connector.undo_alloc(request, load)
    assert decode.connector.stats().loads == LoadCounts()


def test_before_the_start_all_is_zero() -> None:
    """The numbers can be asked for at any time."""
    connector = NixlConnector(NixlConfig(block_size=4)).scheduler_side()
    assert connector.stats() == ConnectorStats()


# What a request waits for.


def test_every_state_is_explained(prefill: Half, decode: Half) -> None:
    """In queue, handed to the next plan, being read, being vouched for, and done."""
    request = Request("d", PROMPT, kv_transfer_params=prefill.ticket())
    uid = decode.add(request)
    assert decode.connector.explain(request) is None
    until(lambda: decode.take_events() or _knows_peer(decode, uid))
    load = decode.load(request, uid)
    assert _ending(decode, request) == "is to be read with the next step"
    decode.plan_with_read()
    assert _ending(decode, request) == "is being read"
    decode.workers_say(finished=load)
    assert _ending(decode, request) == "was read and waits to be accepted"
    decode.until_event()
    assert decode.connector.explain(request) is None


def test_a_silent_peer_is_explained(decode: Half, prefill: Half) -> None:
    """While nobody answers the handshake, that is what the request waits for, and from whom."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ticket = prefill.ticket() | {"port": silent.getsockname()[1]}
        request = Request("d", PROMPT, kv_transfer_params=ticket)
        decode.load(request, decode.add(request))
        assert decode.connector.explain(request) == (
            f"KV of 13 tokens from engine {ticket['engine_id'][:16]} at "
            f"127.0.0.1:{ticket['port']}, which waits for the handshake"
        )


def _ending(engine: Half, request: Request) -> str:
    return (engine.connector.explain(request) or "").rpartition(", which ")[2]


def _knows_peer(engine: Half, uid: int) -> bool:
    return engine.connector._parts.tickets.get(uid).peer is not None


# How the workers wake the scheduler's half.


def test_a_worker_wakes_the_loop(prefill: Half, decode: Half) -> None:
    """Orders name a doorbell; ringing it wakes the engine's loop, a stranger's ring does not."""
    request = Request("d", PROMPT, kv_transfer_params=prefill.ticket())
    decode.load(request, decode.add(request))
    doorbell = decode.plan_with_read().doorbell
    assert doorbell is not None
    before = decode.num_notices
    for address in (attrs.evolve(doorbell, token=bytes(32)), doorbell):
        sender = NoticeSender(address, rank=0)
        sender.send(NoticeKind.REPORT)
        sender.close()
    until(lambda: decode.num_notices > before)
    assert decode.num_notices == before + 1


def test_a_doorbell_elsewhere_is_refused() -> None:
    """An address of another machine is an error that names the setting, and leaves no socket."""
    config = NixlConfig(block_size=4, doorbell_host="192.0.2.1")
    connector = NixlConnector(config).scheduler_side()
    with pytest.raises(ConfigError, match=r"doorbell_host='192\.0\.2\.1' cannot be listened on"):
        connector.start(clock=MonotonicClock(), notify=lambda: None)
    connector.close()


def test_all_rings_are_taken_at_once() -> None:
    """Taking rings never waits, and returns the last one's seconds."""
    listener = DoorbellListener("127.0.0.1")
    assert listener.take() is None
    ring(listener.address, 3.0)
    ring(listener.address, 0.0)
    assert until(lambda: listener.take() is not None)
    assert listener.take() is None
    listener.close()


def test_a_known_peer_needs_no_second_handshake(prefill: Half, decode: Half) -> None:
    """The second request of a peer goes into the next plan at once."""
    reading(prefill, decode)
    request = Request("e", PROMPT, kv_transfer_params=prefill.ticket())
    load = decode.load(request, decode.add(request))
    meta = decode.plan()
    assert meta is not None
    assert [task.transfer for task in meta.reads] == [load.transfer]
