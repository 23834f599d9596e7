"""What a connector counts and measures, on both sides of a hand-over."""

from __future__ import annotations

import attrs

from pdcore.messages import TransferKey

__all__ = [
    "ConnectorStats",
    "LandingCounts",
    "LoadCounts",
    "OffloadCounts",
    "PushCounts",
    "TicketCounts",
    "TransferStats",
]


@attrs.frozen(kw_only=True)
class TransferStats:
    """One finished read, as the worker saw it. Times are seconds on the monotonic clock.

    Args:
        transfer: which load.
        peer: whom it was read from, for people.
        num_bytes, num_blocks: how much was moved.
        num_descriptors: in how many pieces, after neighbours were merged.
        queued_at: when the worker heard of it.
        started_at: when the read was posted.
        ended_at: when all data was there.
        accept_s: how long the peer took to vouch for it, or to refuse; None where nobody asked.
    """

    transfer: TransferKey
    peer: str
    num_bytes: int
    num_blocks: int
    num_descriptors: int
    queued_at: float
    started_at: float
    ended_at: float
    accept_s: float | None = None

    @property
    def queue_s(self) -> float:
        return self.started_at - self.queued_at

    @property
    def wire_s(self) -> float:
        return self.ended_at - self.started_at

    @property
    def num_bytes_per_s(self) -> float:
        return self.num_bytes / self.wire_s if self.wire_s > 0 else 0.0


@attrs.frozen(kw_only=True)
class TicketCounts:
    """What became of an engine's hand-overs, and of its peers' messages about them.

    Each ticket that ended is in one of ``num_accepted``, ``num_released`` and ``num_expired``.

    Args:
        num_granted: tickets issued.
        num_accepted: those that a peer read and got a yes for.
        num_released: those given back unread.
        num_expired: those whose lease ran out.
        num_rejected: noes to peers that asked whether their data is good.
        num_late: renewals and returns of tickets that had expired, or were never known.
        num_duplicate: messages that said once more what had been done; they change nothing.
    """

    num_granted: int = 0
    num_accepted: int = 0
    num_released: int = 0
    num_expired: int = 0
    num_rejected: int = 0
    num_late: int = 0
    num_duplicate: int = 0


@attrs.frozen(kw_only=True)
class LoadCounts:
    """What became of the loads that an engine began.

    Each load that ended is in one of ``num_finished``, ``num_failed`` and ``num_cancelled``.

    Args:
        num_started: loads begun; a load whose plan was taken back does not count.
        num_finished: those that arrived and were vouched for.
        num_failed: those that were not.
        num_cancelled: those that nobody wanted any more when they ended.
        num_rejected: failed ones that arrived, and that the peer did not vouch for.
        num_expired: tickets that the peer no longer honoured, or could not be asked to, before they
            were used.
        num_late: workers' reports about loads that nobody waits for.
        num_duplicate: workers' reports about loads that were reported before.
    """

    num_started: int = 0
    num_finished: int = 0
    num_failed: int = 0
    num_cancelled: int = 0
    num_rejected: int = 0
    num_expired: int = 0
    num_late: int = 0
    num_duplicate: int = 0


@attrs.frozen(kw_only=True)
class OffloadCounts:
    """What became of the blocks that an engine keeps beyond its pool. All in blocks.

    Args:
        num_saved: copied to host memory.
        num_loaded_from_host, num_loaded_from_disk: those that came back, by where from.
        num_lost: those that were to come back and were not what they should be.
        num_in_host, num_on_disk: those that are kept now, as far as the scheduler's half knows.
    """

    num_saved: int = 0
    num_loaded_from_host: int = 0
    num_loaded_from_disk: int = 0
    num_lost: int = 0
    num_in_host: int = 0
    num_on_disk: int = 0


@attrs.frozen(kw_only=True)
class PushCounts:
    """What became of the pushes that an engine was asked for.

    Args:
        num_started: pushes that the other engine agreed to.
        num_ended: those that it was told the end of, or could not be told of any more.
        num_refused: those that it did not agree to, or that could not be asked for.
        num_blocks: blocks that were sent and vouched for.
        num_restarts: how often a push began anew, since its request had lost its blocks.
    """

    num_started: int = 0
    num_ended: int = 0
    num_refused: int = 0
    num_blocks: int = 0
    num_restarts: int = 0


@attrs.frozen(kw_only=True)
class LandingCounts:
    """What became of the pushes that an engine expected, and of its staging slots.

    Args:
        num_expected: pushes that slots were set aside for.
        num_declined: those for which no slot was free.
        num_refused: claims and ends that were not what had been agreed on.
        num_landed: pushes whose writer vouched for what it wrote.
        num_used: those of them that a load took its KV from.
        num_lost: claimed ones that brought nothing, or that nobody wanted.
        num_slots, num_free_slots: slots there are, and those that nobody uses, now.
        num_quarantined_slots: those that nobody wants and somebody may still write to, now.
        num_overdue_slots: those of them whose writer should long have said that it stopped, and is
            not known to be dead, now.
    """

    num_expected: int = 0
    num_declined: int = 0
    num_refused: int = 0
    num_landed: int = 0
    num_used: int = 0
    num_lost: int = 0
    num_slots: int = 0
    num_free_slots: int = 0
    num_quarantined_slots: int = 0
    num_overdue_slots: int = 0


@attrs.frozen(kw_only=True)
class ConnectorStats:
    """A snapshot of a connector's scheduler half; counters since it was made.

    Args:
        tickets: what it handed over. All zero on an engine that only decodes.
        loads: what it loaded. All zero on an engine that only prefills.
        transfers: the newest thousand reads, in the order in which they ended. Empty for connectors
            that measure nothing.
        offload: what it keeps beyond the pool. All zero on connectors that keep nothing.
        pushes: what it sent ahead of its hand-overs.
        landings: what it was sent ahead.
    """

    tickets: TicketCounts = TicketCounts()
    loads: LoadCounts = LoadCounts()
    transfers: tuple[TransferStats, ...] = ()
    offload: OffloadCounts = OffloadCounts()
    pushes: PushCounts = PushCounts()
    landings: LandingCounts = LandingCounts()
