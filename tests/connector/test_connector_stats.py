"""What a connector counts: exact numbers for each way in which a hand-over or a load can end."""

from __future__ import annotations

import attrs
import pytest
from loopback_engines import LEASE_S, PROMPT, Halves, make_pair, solo

from pdcore.clock import VirtualClock
from pdcore.connector import ConnectorStats, LoadCounts, NullConnector, TicketCounts
from pdcore.connector.load_tally import LoadTally
from pdcore.connector.loopback import LoopbackFaults
from pdcore.connector.stats import TransferStats
from pdcore.connector.ticket_contents import TicketContents
from pdcore.connector.tickets import TicketRegistry
from pdcore.messages import TransferKey
from pdcore.scheduler import SkipCode

CONTENTS = TicketContents(
    block_ids=(1,), generations=(7,), num_tokens=4, block_size=4, prompt_digest="p"
)
DIGEST = CONTENTS.digest()


def granted(*names: str) -> tuple[VirtualClock, TicketRegistry]:
    """A registry with open tickets of one block and ten seconds."""
    clock = VirtualClock()
    registry = TicketRegistry(clock)
    for name in names:
        registry.grant(name, CONTENTS, lease_s=10.0)
    return clock, registry


# The registry of a prefill engine.


def test_each_ticket_ends_in_one_count() -> None:
    """One accepted, one given back, one expired, and one that is open."""
    clock, registry = granted("a", "b", "c")
    registry.accept("a", DIGEST, consumer="d")
    registry.release("b")
    clock.advance(10)
    registry.grant("open", CONTENTS, lease_s=10.0)
    assert registry.take_released() == ("a", "b", "c")
    assert registry.counts() == TicketCounts(
        num_granted=4, num_accepted=1, num_released=1, num_expired=1
    )


def test_a_ticket_expires_once_whoever_notices() -> None:
    """Renewal, acceptance and sweep all meet the same lapsed ticket; it counts as one."""
    clock, registry = granted("a")
    clock.advance(10)
    assert not registry.renew("a")
    assert not registry.accept("a", DIGEST, consumer="d")
    assert registry.expire() == 0
    assert registry.counts() == TicketCounts(
        num_granted=1, num_expired=1, num_late=1, num_rejected=1
    )


def test_noes_are_counted() -> None:
    """Wrong contents, another consumer and an unknown ticket are three noes."""
    _, registry = granted("a")
    registry.accept("a", "0" * 64, consumer="d")
    registry.accept("a", DIGEST, consumer="d")
    registry.accept("a", DIGEST, consumer="e")
    registry.accept("unknown", DIGEST, consumer="d")
    assert registry.counts() == TicketCounts(num_granted=1, num_accepted=1, num_rejected=3)


def test_repeated_messages_are_no_news() -> None:
    """The same acceptance again, and giving back what is read or given back, are duplicates."""
    _, registry = granted("a", "b")
    for _ in range(3):
        registry.accept("a", DIGEST, consumer="d")
    registry.release("a")
    registry.release("b")
    registry.release("b")
    assert registry.counts() == TicketCounts(
        num_granted=2, num_accepted=1, num_released=1, num_duplicate=4
    )


def test_giving_back_too_late_is_late() -> None:
    """A return of a lapsed or unknown ticket, and a renewal of one that was read, are late."""
    clock, registry = granted("a", "b")
    registry.accept("b", DIGEST, consumer="d")
    registry.renew("b")
    clock.advance(10)
    registry.release("a")
    registry.release("unknown")
    assert registry.counts() == TicketCounts(
        num_granted=2, num_accepted=1, num_expired=1, num_late=3
    )


# The tally of a decode engine.


def test_a_report_is_new_late_or_repeated() -> None:
    """The first report of a load that is awaited counts nowhere; any other one does."""
    tally = LoadTally()
    tally.reported(TransferKey(1, 0), is_awaited=True)
    tally.reported(TransferKey(1, 0), is_awaited=False)
    tally.reported(TransferKey(1, 1), is_awaited=False)
    tally.reported(TransferKey(1, 1), is_awaited=False)
    assert tally.counts() == LoadCounts(num_late=1, num_duplicate=2)


def test_every_rank_is_measured() -> None:
    """What each rank measured of one load gets the same time of acceptance."""
    tally, key = LoadTally(), TransferKey(1, 0)
    stats = TransferStats(
        transfer=key,
        peer="p",
        num_bytes=8,
        num_blocks=2,
        num_descriptors=1,
        queued_at=1.0,
        started_at=1.5,
        ended_at=3.5,
    )
    tally.measured(stats)
    tally.measured(stats)
    assert tally.transfers() == ()
    tally.ended(key, is_good=True, accept_s=0.25)
    assert tally.transfers() == (attrs.evolve(stats, accept_s=0.25),) * 2
    assert (stats.queue_s, stats.wire_s, stats.num_bytes_per_s) == (0.5, 2.0, 4.0)


# Two whole engines.


def test_a_good_hand_over_counts_once_on_both_sides() -> None:
    """One ticket granted and accepted there, one load started and finished here, nothing else."""
    prefill, decode, _ = make_pair()
    decode.decode(prefill.prefill())
    assert prefill.scheduler.stats().connector == ConnectorStats(
        tickets=TicketCounts(num_granted=1, num_accepted=1)
    )
    assert decode.scheduler.stats().connector == ConnectorStats(
        loads=LoadCounts(num_started=1, num_finished=1)
    )


def test_a_lapsed_lease_is_seen_by_both_sides() -> None:
    """Data from a lapsed lease: expired and refused there, refused and computed again here."""
    prefill, decode, fabric = make_pair(LoopbackFaults(delay_s=LEASE_S + 1))
    params = prefill.prefill()
    decode.add(params)
    decode.step()
    fabric.clock.advance(LEASE_S + 1)  # type: ignore[attr-defined]
    assert decode.driver.run()["r"].token_ids == solo(decode)
    assert prefill.scheduler.stats().connector.tickets == TicketCounts(
        num_granted=1, num_expired=1, num_late=1, num_rejected=1
    )
    stats = decode.scheduler.stats()
    assert stats.connector.loads == LoadCounts(
        num_started=1, num_failed=1, num_rejected=1, num_expired=1
    )
    assert (stats.num_failed_loads, stats.num_recomputed_tokens) == (1, len(PROMPT) - 1)


def test_a_repeated_completion_is_a_duplicate() -> None:
    """A completion that comes twice finishes one load, here and in the scheduler's own count."""
    prefill, decode, _ = make_pair(LoopbackFaults(duplicate=True))
    decode.decode(prefill.prefill())
    decode.step()
    stats = decode.scheduler.stats()
    assert stats.connector.loads == LoadCounts(num_started=1, num_finished=1, num_duplicate=1)
    assert stats.num_late_events == 1


def test_an_aborted_load_is_cancelled_and_its_ticket_given_back() -> None:
    """An abort while the load is under way: cancelled here, given back there."""
    prefill, decode, _ = make_pair(LoopbackFaults(delay_polls=3))
    decode.add(prefill.prefill())
    decode.step()
    decode.scheduler.abort_requests(["r"])
    decode.step(3)
    stats = decode.scheduler.stats()
    assert stats.connector.loads == LoadCounts(num_started=1, num_cancelled=1)
    assert stats.num_failed_loads == 0
    assert prefill.scheduler.stats().connector.tickets == TicketCounts(
        num_granted=1, num_released=1
    )


def test_a_load_that_does_not_come_failed_for_its_request_and_was_cancelled() -> None:
    """The scheduler counts the request that waited in vain, the connector the load called off."""
    prefill, decode, _ = make_pair(LoopbackFaults(lose=True), load_timeout_s=5.0)
    assert decode.decode(prefill.prefill()) == solo(decode)
    stats = decode.scheduler.stats()
    assert stats.num_failed_loads == 1
    assert (stats.connector.loads.num_failed, stats.connector.loads.num_cancelled) == (0, 1)


def test_a_prompt_that_is_all_here_gives_its_ticket_back() -> None:
    """The second request with the same prompt starts no load."""
    prefill, decode, _ = make_pair()
    prompt = PROMPT[:17]  # its last block is not full without the last token
    decode.decode(prefill.prefill(prompt), prompt)
    decode.decode(prefill.prefill(prompt), prompt)
    assert decode.scheduler.stats().connector.loads == LoadCounts(num_started=1, num_finished=1)
    assert prefill.scheduler.stats().connector.tickets == TicketCounts(
        num_granted=2, num_accepted=1, num_released=1
    )


def test_an_undone_load_does_not_count() -> None:
    """A plan that was taken back started nothing."""
    halves = Halves()
    request, load = halves.allocate(1)
    assert halves.scheduler.stats().loads == LoadCounts(num_started=1)
    halves.scheduler.undo_alloc(request, load)
    assert halves.scheduler.stats().loads == LoadCounts()


def test_connectors_that_count_nothing_say_so() -> None:
    """The null connector's numbers are all zero."""
    assert NullConnector().scheduler_side().stats() == ConnectorStats()


@pytest.mark.parametrize("is_planned", [False, True])
def test_a_parked_request_names_the_engine_it_waits_for(is_planned: bool) -> None:
    """The scheduler explains a request that waits for KV by the peer and the ticket."""
    prefill, decode, _ = make_pair(LoopbackFaults(delay_polls=9))
    params = prefill.prefill()
    decode.add(params)
    if not is_planned:
        assert decode.scheduler.explain("r").code is SkipCode.NOT_REACHED
        return
    decode.step()
    skip = decode.scheduler.explain("r")
    assert skip.code is SkipCode.WAITING_FOR_REMOTE_KVS
    assert skip.waits_on == f"its KV from engine 'p' ({params['transfer_id']})"
