"""What a decode engine's staging slots are for: who may write to them, and who does no more."""

from __future__ import annotations

import math
import threading
from collections import Counter

from pdcore.clock import Clock
from pdcore.connector.nixl.push.landing import Landing, LandingState, Suspect
from pdcore.connector.stats import LandingCounts
from pdcore.connector.tickets import TicketAnswer
from pdcore.errors import InvariantBroken

__all__ = ["LandingRegistry"]

_CLAIMABLE = (LandingState.EXPECTED, LandingState.CLAIMED)
_UNKNOWN = "the push is unknown here, or nobody wants it any more"


class LandingRegistry:
    """A decode engine's record of its staging slots.

    A slot belongs to at most one push. It is free for another one only when nobody can write to it
    any more: the push was never claimed, its writer said that it stopped, or its writer has died;
    after a writer's end by force ``linger_s`` must pass as well. Otherwise it stays in quarantine.

    What a push brought is given out for the ticket that its writer named alone, and only after the
    writer said that it stopped.

    Every method may be called from any thread and returns at once.

    Args:
        clock: whose seconds leases are counted in.
        num_slots: how many there are.
        linger_s: how long after its writer's end by force data may still arrive.
        overdue_s: how long a quarantine lasts at most if the writer lives and goes on.
    """

    def __init__(self, clock: Clock, *, num_slots: int, linger_s: float, overdue_s: float) -> None:
        self._clock = clock
        self._num_slots = num_slots
        self._linger_s = linger_s
        self._overdue_s = overdue_s
        self._lock = threading.Lock()
        self._free = list(range(num_slots - 1, -1, -1))
        self._landings: dict[str, Landing] = {}
        self._next_deadline = math.inf
        self._newly_overdue: list[Landing] = []
        self._counts: Counter[str] = Counter()

    # What the engine itself asks.

    def expect(
        self, push_id: str, *, prompt_digest: str, max_num_slots: int, lease_s: float
    ) -> tuple[int, ...]:
        """Set slots aside for a push: as many as there are, up to a number. None may be left."""
        with self._lock:
            self._sweep()
            num_slots = min(max_num_slots, len(self._free))
            if num_slots <= 0:
                self._counts["num_declined"] += 1
                return ()
            self._counts["num_expected"] += 1
            slots = tuple(self._free.pop() for _ in range(num_slots))
            landing = self._landings[push_id] = Landing(
                push_id=push_id,
                slots=slots,
                prompt_digest=prompt_digest,
                lease_s=lease_s,
                deadline=math.inf,
            )
            self._wait(landing, lease_s)
            return slots

    def want(self, push_id: str, *, writer: str, prompt_digest: str) -> None:
        """A request came for what a push brings: it stays until `drop`, however long that takes."""
        with self._lock:
            self._sweep()
            landing = self._landings.get(push_id)
            if landing is not None and landing.is_from(writer, prompt_digest):
                landing.is_awaited = True

    def is_landing(self, push_id: str, *, writer: str) -> bool:
        """Whether a peer may still write to a push's slots, and somebody wants what it writes."""
        with self._lock:
            self._sweep()
            landing = self._landings.get(push_id)
            return landing is not None and landing.is_written_by(writer)

    def take(
        self, push_id: str, *, writer: str, ticket_id: str, prompt_digest: str
    ) -> tuple[int, ...]:
        """The slots of a ticket's first blocks, to be read until `drop`; empty if there are none.
        They count as used.

        A push that has not ended brings nothing: nobody wants it any more.
        """
        with self._lock:
            self._sweep()
            landing = self._landings.get(push_id)
            if landing is None or not landing.is_from(writer, prompt_digest):
                return ()
            if landing.state is not LandingState.LANDED or landing.ticket_id != ticket_id:
                self._call_off(landing)
                return ()
            self._counts["num_used"] += not landing.was_used
            landing.is_awaited = landing.was_used = True
            return landing.slots[: landing.num_blocks]

    def drop(self, push_id: str, *, prompt_digest: str) -> None:
        """Nobody wants a push any more, or nobody reads what it brought. Repeats are harmless."""
        with self._lock:
            landing = self._landings.get(push_id)
            if landing is not None and landing.prompt_digest == prompt_digest:
                self._drop(landing)

    def call_off(self, push_id: str, *, prompt_digest: str) -> None:
        """Nobody will come for a push. If it is read already, its slots stay until `drop`."""
        with self._lock:
            landing = self._landings.get(push_id)
            if landing is not None and landing.prompt_digest == prompt_digest:
                self._call_off(landing)

    # What its writer says.

    def is_expected(self, push_id: str) -> bool:
        """Whether a claim of a push may be granted."""
        with self._lock:
            self._sweep()
            landing = self._landings.get(push_id)
            return landing is not None and landing.state in _CLAIMABLE

    def claim(
        self,
        push_id: str,
        *,
        slots: tuple[int, ...],
        prompt_digest: str,
        writer: str,
        life_host: str = "",
        life_ports: tuple[int, ...] = (),
        was_seen_alive: bool = False,
    ) -> TicketAnswer:
        """Make a peer the one that may write to a push's slots. Asking again changes nothing else
        than where it can be seen to live.

        Args:
            push_id, slots, prompt_digest: the push, as its leave names it.
            writer: the peer.
            life_host, life_ports: where its ranks can be seen to live.
            was_seen_alive: whether all of them were seen there, so that their death can be proven.
        """
        with self._lock:
            self._sweep()
            landing = self._landings.get(push_id)
            if landing is None or landing.state not in _CLAIMABLE:
                return self._refuse(_UNKNOWN)
            if (landing.slots, landing.prompt_digest) != (slots, prompt_digest):
                return self._refuse("the slots or the prompt are not those of the push")
            if landing.state is LandingState.CLAIMED and landing.writer != writer:
                return self._refuse("another engine pushes to these slots")
            landing.state, landing.writer = LandingState.CLAIMED, writer
            is_moved = (landing.life_host, landing.life_ports) != (life_host, life_ports)
            landing.life_host, landing.life_ports = life_host, life_ports
            landing.was_seen_alive = was_seen_alive or (landing.was_seen_alive and not is_moved)
            self._wait(landing, landing.lease_s)
            return TicketAnswer(True)

    def count_refusal(self) -> None:
        """A claim was refused before it came here."""
        with self._lock:
            self._counts["num_refused"] += 1

    def hear(self, push_id: str, *, writer: str) -> TicketAnswer:
        """A writer's sign of life; a no says that it should stop."""
        with self._lock:
            self._sweep()
            landing = self._landings.get(push_id)
            if landing is None or not landing.is_written_by(writer):
                return TicketAnswer(False, reason=_UNKNOWN)
            self._wait(landing, landing.lease_s)
            return TicketAnswer(True)

    def end(
        self, push_id: str, *, writer: str, ticket_id: str, num_blocks: int, was_cut: bool
    ) -> TicketAnswer:
        """A writer says that it stopped, and what is in the slots. Repeats change nothing."""
        with self._lock:
            self._sweep()
            landing = self._landings.get(push_id)
            if landing is not None and landing.state is LandingState.EXPECTED:
                # Its claim was lost, and is refused if it comes now.
                self._drop(landing)
            if landing is None or not landing.may_be_written:
                return TicketAnswer(True)
            if landing.writer != writer:
                return self._refuse("another engine pushes to these slots")
            landing.was_cut = was_cut
            if landing.state is LandingState.QUARANTINED or not (ticket_id and num_blocks):
                self._counts["num_lost"] += landing.state is LandingState.CLAIMED
                self._let_go(landing)
                return TicketAnswer(True)
            self._counts["num_landed"] += 1
            landing.state = LandingState.LANDED
            landing.ticket_id = ticket_id
            landing.num_blocks = min(num_blocks, len(landing.slots))
            self._wait(landing, landing.lease_s)
            return TicketAnswer(True)

    # What is found out about writers.

    def suspects(self) -> tuple[Suspect, ...]:
        """The engines whose death would be good to know of, each once. It can be known only of
        those that were seen alive."""
        with self._lock:
            self._sweep()
            now = self._clock.now()
            suspects = (it.suspect for it in self._landings.values() if it.is_suspect(now))
            return tuple(dict.fromkeys(suspects))

    def writer_died(self, suspect: Suspect) -> tuple[str, ...]:
        """All processes of an engine are proven dead; returns the pushes that this ended."""
        with self._lock:
            everything = self._landings.values()
            dead = [it for it in everything if it.may_be_written and it.suspect == suspect]
            for landing in dead:
                self._counts["num_lost"] += landing.state is LandingState.CLAIMED
                landing.was_cut = True
                self._let_go(landing)
            return tuple(landing.push_id for landing in dead)

    def take_overdue(self) -> tuple[Landing, ...]:
        """The pushes that have been in quarantine for too long since the last call, to be read."""
        with self._lock:
            self._sweep()
            overdue, self._newly_overdue = self._newly_overdue, []
            return tuple(it for it in overdue if it.state is LandingState.QUARANTINED)

    @property
    def has_writers(self) -> bool:
        """Whether a peer may be writing, or its last data be on the way."""
        with self._lock:
            landings = self._landings.values()
            return any(it.may_be_written or it.state is LandingState.LINGERING for it in landings)

    def counts(self) -> LandingCounts:
        """What became of all pushes so far, and where the slots are."""
        with self._lock:
            self._sweep()
            kept = Counter[LandingState]()
            num_overdue = 0
            for landing in self._landings.values():
                kept[landing.state] += len(landing.slots)
                num_overdue += len(landing.slots) if landing.is_overdue else 0
            return LandingCounts(
                **self._counts,
                num_slots=self._num_slots,
                num_free_slots=len(self._free),
                num_quarantined_slots=kept[LandingState.QUARANTINED] + kept[LandingState.LINGERING],
                num_overdue_slots=num_overdue,
            )

    def check(self) -> None:
        """Audit the record; raise `InvariantBroken` with what is wrong."""
        with self._lock:
            owned = [slot for it in self._landings.values() for slot in it.slots]
            if sorted(owned + self._free) != list(range(self._num_slots)):
                raise InvariantBroken(
                    f"{self._num_slots} slots are not each free or one push's: "
                    f"{sorted(self._free)} are free, {sorted(owned)} are owned"
                )

    def _wait(self, landing: Landing, seconds: float) -> None:
        landing.deadline = self._clock.now() + seconds
        self._next_deadline = min(self._next_deadline, landing.deadline)

    def _sweep(self) -> None:
        """Do what time does. It costs nothing while no deadline has come."""
        now = self._clock.now()
        if now < self._next_deadline:
            return
        for landing in tuple(self._landings.values()):
            is_kept = landing.is_awaited and landing.state is LandingState.LANDED
            if is_kept or now < landing.deadline:
                continue
            if landing.state is LandingState.QUARANTINED:
                landing.is_overdue, landing.deadline = True, math.inf
                self._newly_overdue.append(landing)
            else:
                self._drop(landing)
        kept = (it.deadline for it in self._landings.values() if now < it.deadline)
        self._next_deadline = min(kept, default=math.inf)

    def _call_off(self, landing: Landing) -> None:
        if not landing.was_used:
            self._drop(landing)

    def _drop(self, landing: Landing) -> None:
        if landing.state is LandingState.CLAIMED:
            self._counts["num_lost"] += 1
            landing.state = LandingState.QUARANTINED
            self._wait(landing, self._overdue_s)
        elif landing.state in (LandingState.EXPECTED, LandingState.LANDED):
            self._let_go(landing)
        elif landing.state is LandingState.LINGERING and self._clock.now() >= landing.deadline:
            self._free_slots(landing)

    def _let_go(self, landing: Landing) -> None:
        """Nobody writes to a landing's slots any more, and nobody wants them."""
        landing.is_overdue = False
        if landing.was_cut:
            landing.state = LandingState.LINGERING
            self._wait(landing, self._linger_s)
        else:
            self._free_slots(landing)

    def _free_slots(self, landing: Landing) -> None:
        del self._landings[landing.push_id]
        self._free.extend(reversed(landing.slots))

    def _refuse(self, reason: str) -> TicketAnswer:
        self._counts["num_refused"] += 1
        return TicketAnswer(False, reason=reason)

    def __repr__(self) -> str:
        with self._lock:
            return f"<LandingRegistry {len(self._landings)} pushes, {len(self._free)} slots free>"
