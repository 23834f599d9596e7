"""What a prefill engine owes: which hand-overs are open, until when, and how each one ended."""

from __future__ import annotations

import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import attrs

from pdcore.checks import check_count
from pdcore.clock import Clock
from pdcore.connector.stats import TicketCounts
from pdcore.connector.ticket_contents import TicketContents
from pdcore.errors import InvariantBroken, TransferError

__all__ = ["TicketAnswer", "TicketRegistry", "asks_for_hand_over"]


def asks_for_hand_over(params: Mapping[str, Any] | None) -> bool:
    """Whether a request's parameters ask this engine to prefill for another one."""
    return params is not None and params.get("do_remote_decode") is True


@attrs.frozen
class TicketAnswer:
    """The registry's answer to a peer. True in a condition when it is a yes.

    Args:
        ok: whether the peer got what it asked for.
        reason: why not, in words; empty when ``ok``.
        remaining_s: seconds until the lease ends, when the ticket is open; otherwise 0.
    """

    ok: bool
    reason: str = attrs.field(default="", kw_only=True)
    remaining_s: float = attrs.field(default=0.0, kw_only=True)

    def __bool__(self) -> bool:
        return self.ok


@attrs.define(eq=False, kw_only=True)
class _Ticket:
    transfer_id: str
    contents_digest: str
    lease_s: float
    deadline: float
    accepted_by: str | None = None
    has_lapsed: bool = False
    end: str = ""


class TicketRegistry:
    """A prefill engine's record of its hand-overs.

    A ticket is open from `grant` until its one end: `accept`, `release`, or its lease. The lease is
    checked against the clock in every call, so a ticket whose time is up is never accepted, whether
    or not anybody has swept it out. The end of each ticket is told once, by `take_released`.

    Every method may be called from any thread and returns at once. Each call costs O(1) in the
    number of tickets, except `expire`, `next_release` and what calls them: O(open tickets).

    Args:
        clock: whose seconds the leases are counted in.
        max_num_remembered: how many ended tickets are kept to give late callers the true reason.

    Raises:
        ConfigError: ``max_num_remembered`` is less than 1.
    """

    def __init__(self, clock: Clock, *, max_num_remembered: int = 4096) -> None:
        check_count("max_num_remembered", max_num_remembered)
        self._clock = clock
        self._max_num_remembered = max_num_remembered
        self._lock = threading.Lock()
        self._open: dict[str, _Ticket] = {}
        self._ended: OrderedDict[str, _Ticket] = OrderedDict()
        self._released: list[str] = []
        self._counts: Counter[str] = Counter()

    def grant(self, transfer_id: str, contents: TicketContents, *, lease_s: float) -> None:
        """Open a ticket for blocks that are held from now on, for ``lease_s`` seconds.

        Args:
            transfer_id: a name that was never used before.
            contents: what is held.
            lease_s: how long the hold lasts without a renewal.

        Raises:
            TransferError: the name is known, or the lease is not a positive number of seconds.
        """
        if not (math.isfinite(lease_s) and lease_s > 0):
            raise TransferError(f"lease_s={lease_s!r}: pass a finite number of seconds above 0")
        with self._lock:
            if transfer_id in self._open or transfer_id in self._ended:
                raise TransferError(f"transfer id {transfer_id!r} was used before: make a new one")
            self._counts["num_granted"] += 1
            self._open[transfer_id] = _Ticket(
                transfer_id=transfer_id,
                contents_digest=contents.digest(),
                lease_s=lease_s,
                deadline=self._clock.now() + lease_s,
            )

    def renew(self, transfer_id: str) -> TicketAnswer:
        """Start the lease afresh. The answer says how long it lasts, or why it cannot."""
        with self._lock:
            ticket = self._find_open(transfer_id)
            if ticket is None:
                self._counts["num_late"] += 1
                return self._refusal(transfer_id)
            ticket.deadline = self._clock.now() + ticket.lease_s
            return TicketAnswer(True, remaining_s=ticket.lease_s)

    def accept(self, transfer_id: str, contents_digest: str, *, consumer: str) -> TicketAnswer:
        """Vouch that what ``consumer`` read from the blocks is what the ticket promised.

        Yes means that the consumer read those blocks, for that prompt, and that they were held,
        unchanged, from `grant` until now; the hold ends here. Asking again gives the same consumer
        the same yes, and any other one a no.

        Args:
            transfer_id: the ticket.
            contents_digest: `TicketContents.digest` of what the consumer was told.
            consumer: names one read, not only its engine: of two requests that came with the same
                ticket, the second may have read blocks that the first one's yes had let go.
        """
        with self._lock:
            ticket = self._find_open(transfer_id)
            if ticket is None:
                return self._answer_again(transfer_id, consumer)
            if contents_digest != ticket.contents_digest:
                self._counts["num_rejected"] += 1
                return TicketAnswer(
                    False, reason="what its reader was told is not what the ticket stands for"
                )
            self._counts["num_accepted"] += 1
            ticket.accepted_by = consumer
            self._close(ticket, "it was accepted before")
            return TicketAnswer(True)

    def release(self, transfer_id: str, *, reason: str = "its reader gave it back") -> bool:
        """End a ticket that nobody will read; return whether it was open. Repeats are harmless."""
        with self._lock:
            ticket = self._find_open(transfer_id)
            if ticket is None:
                ended = self._ended.get(transfer_id)
                is_repeated = ended is not None and not ended.has_lapsed
                self._counts["num_duplicate" if is_repeated else "num_late"] += 1
                return False
            self._counts["num_released"] += 1
            self._close(ticket, reason)
            return True

    def expire(self, now: float | None = None) -> int:
        """End every ticket whose lease is over at ``now`` (default: the clock's). Returns how
        many there were."""
        with self._lock:
            return self._expire(self._clock.now() if now is None else now)

    def take_released(self) -> tuple[str, ...]:
        """Return the tickets that ended since the last call, in order: their holds may go."""
        with self._lock:
            self._expire(self._clock.now())
            released, self._released = tuple(self._released), []
            return released

    def next_release(self) -> float | None:
        """When `take_released` has something to tell, in seconds on the clock: now if a ticket
        ended since the last call, else at the end of the next lease; None when no ticket is open.
        """
        with self._lock:
            if self._released:
                return self._clock.now()
            return min((ticket.deadline for ticket in self._open.values()), default=None)

    def is_open(self, transfer_id: str) -> bool:
        """Whether a ticket could be accepted now."""
        with self._lock:
            return self._find_open(transfer_id) is not None

    @property
    def num_open(self) -> int:
        """How many tickets have not ended, as far as anyone has noticed."""
        with self._lock:
            return len(self._open)

    @property
    def has_pending(self) -> bool:
        """Whether `take_released` will have something to tell, now or once a lease ends."""
        with self._lock:
            return bool(self._open or self._released)

    def counts(self) -> TicketCounts:
        """What became of all tickets so far, and of what peers said about them."""
        with self._lock:
            return TicketCounts(**self._counts)

    def check(self) -> None:
        """Audit the record; raise `InvariantBroken` with what is wrong."""
        with self._lock:
            if both := self._open.keys() & self._ended.keys():
                raise InvariantBroken(f"tickets are open and ended at once: {sorted(both)}")
            if len(self._ended) > self._max_num_remembered:
                raise InvariantBroken(f"{len(self._ended)} ended tickets are remembered")
            if len(set(self._released)) != len(self._released):
                raise InvariantBroken(f"a ticket is released twice: {self._released}")
            if still := self._open.keys() & set(self._released):
                raise InvariantBroken(f"open tickets are listed as released: {sorted(still)}")

    def _find_open(self, transfer_id: str) -> _Ticket | None:
        """The ticket, if it is open now; a ticket whose lease just ended is closed on the way."""
        ticket = self._open.get(transfer_id)
        if ticket is not None and self._clock.now() >= ticket.deadline:
            self._lapse(ticket)
            return None
        return ticket

    def _expire(self, now: float) -> int:
        lapsed = [ticket for ticket in self._open.values() if now >= ticket.deadline]
        for ticket in lapsed:
            self._lapse(ticket)
        return len(lapsed)

    def _lapse(self, ticket: _Ticket) -> None:
        self._counts["num_expired"] += 1
        ticket.has_lapsed = True
        self._close(ticket, f"its lease of {ticket.lease_s:g} s ended without a renewal")

    def _close(self, ticket: _Ticket, end: str) -> None:
        ticket.end = end
        del self._open[ticket.transfer_id]
        self._released.append(ticket.transfer_id)
        self._ended[ticket.transfer_id] = ticket
        while len(self._ended) > self._max_num_remembered:
            self._ended.popitem(last=False)

    def _answer_again(self, transfer_id: str, consumer: str) -> TicketAnswer:
        ended = self._ended.get(transfer_id)
        if ended is not None and ended.accepted_by == consumer:
            self._counts["num_duplicate"] += 1
            return TicketAnswer(True)
        self._counts["num_rejected"] += 1
        return self._refusal(transfer_id)

    def _refusal(self, transfer_id: str) -> TicketAnswer:
        ended = self._ended.get(transfer_id)
        return TicketAnswer(False, reason=ended.end if ended else "the ticket is unknown here")

    def __repr__(self) -> str:
        with self._lock:
            return f"<TicketRegistry {len(self._open)} open, {len(self._released)} to release>"
