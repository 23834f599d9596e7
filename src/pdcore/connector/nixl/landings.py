"""What a decode engine's staging slots are for: who may write to them, and who does no more."""

from __future__ import annotations

import enum
import math
import threading
from collections import Counter

import attrs

from pdcore.clock import Clock
from pdcore.connector.stats import LandingCounts
from pdcore.connector.tickets import TicketAnswer
from pdcore.errors import InvariantBroken

__all__ = ["LandingRegistry", "Suspect"]

_UNKNOWN = "the push is unknown here, or nobody wants it any more"


class _State(enum.Enum):
    EXPECTED = "expected"
    """Nobody may write to its slots yet."""
    CLAIMED = "claimed"
    """A peer writes to its slots."""
    LANDED = "landed"
    """The writer said that it is done."""
    QUARANTINED = "quarantined"
    """Nobody wants it, and the writer has not said that it stopped."""
    LINGERING = "lingering"
    """The writer was ended by force; what was on its way then has time to arrive."""


@attrs.frozen(kw_only=True)
class Suspect:
    """A writer that has not been heard of, or need not write any more."""

    push_id: str
    life_host: str
    life_ports: tuple[int, ...]


@attrs.define(eq=False, kw_only=True)
class _Landing:
    push_id: str
    slots: tuple[int, ...]
    prompt_digest: str
    lease_s: float
    deadline: float
    state: _State = _State.EXPECTED
    writer: str = ""
    life_host: str = ""
    life_ports: tuple[int, ...] = ()
    was_seen_alive: bool = False
    ticket_id: str = ""
    num_blocks: int = 0
    was_cut: bool = False
    is_awaited: bool = False
    was_used: bool = False

    @property
    def may_be_written(self) -> bool:
        return self.state in (_State.CLAIMED, _State.QUARANTINED)

    def is_from(self, writer: str, prompt_digest: str) -> bool:
        return (self.writer, self.prompt_digest) == (writer, prompt_digest)


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
    """

    def __init__(self, clock: Clock, *, num_slots: int, linger_s: float) -> None:
        self._clock = clock
        self._num_slots = num_slots
        self._linger_s = linger_s
        self._lock = threading.Lock()
        self._free = list(range(num_slots - 1, -1, -1))
        self._landings: dict[str, _Landing] = {}
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
            self._landings[push_id] = _Landing(
                push_id=push_id,
                slots=slots,
                prompt_digest=prompt_digest,
                lease_s=lease_s,
                deadline=self._clock.now() + lease_s,
            )
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
            return (
                landing is not None and landing.state is _State.CLAIMED and landing.writer == writer
            )

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
            if landing.state is not _State.LANDED or landing.ticket_id != ticket_id:
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

    def claim(
        self,
        push_id: str,
        *,
        slots: tuple[int, ...],
        prompt_digest: str,
        writer: str,
        life_host: str = "",
        life_ports: tuple[int, ...] = (),
    ) -> TicketAnswer:
        """Make a peer the one that may write to a push's slots. Asking again changes nothing."""
        with self._lock:
            self._sweep()
            landing = self._landings.get(push_id)
            if landing is None or landing.state not in (_State.EXPECTED, _State.CLAIMED):
                return self._refuse(_UNKNOWN)
            if (landing.slots, landing.prompt_digest) != (slots, prompt_digest):
                return self._refuse("the slots or the prompt are not those of the push")
            if landing.state is _State.CLAIMED and landing.writer != writer:
                return self._refuse("another engine pushes to these slots")
            landing.state, landing.writer = _State.CLAIMED, writer
            if (landing.life_host, landing.life_ports) != (life_host, life_ports):
                landing.life_host, landing.life_ports = life_host, life_ports
                landing.was_seen_alive = False
            landing.deadline = self._clock.now() + landing.lease_s
            return TicketAnswer(True)

    def hear(self, push_id: str, *, writer: str) -> TicketAnswer:
        """A writer's sign of life; a no says that it should stop."""
        with self._lock:
            self._sweep()
            landing = self._landings.get(push_id)
            if landing is None or landing.writer != writer or landing.state is not _State.CLAIMED:
                return TicketAnswer(False, reason=_UNKNOWN)
            landing.deadline = self._clock.now() + landing.lease_s
            return TicketAnswer(True)

    def end(
        self, push_id: str, *, writer: str, ticket_id: str, num_blocks: int, was_cut: bool
    ) -> TicketAnswer:
        """A writer says that it stopped, and what is in the slots. Repeats change nothing."""
        with self._lock:
            self._sweep()
            landing = self._landings.get(push_id)
            if landing is not None and landing.state is _State.EXPECTED:
                # Its claim was lost, and is refused if it comes now.
                self._drop(landing)
            if landing is None or not landing.may_be_written:
                return TicketAnswer(True)
            if landing.writer != writer:
                return self._refuse("another engine pushes to these slots")
            landing.was_cut = was_cut
            if landing.state is _State.QUARANTINED or not (ticket_id and num_blocks):
                self._counts["num_lost"] += landing.state is _State.CLAIMED
                self._let_go(landing)
                return TicketAnswer(True)
            self._counts["num_landed"] += 1
            landing.state = _State.LANDED
            landing.ticket_id = ticket_id
            landing.num_blocks = min(num_blocks, len(landing.slots))
            landing.deadline = self._clock.now() + landing.lease_s
            return TicketAnswer(True)

    # What is found out about writers.

    def seen_alive(self, push_id: str) -> None:
        """All ranks of a push's writer were reached once."""
        with self._lock:
            if landing := self._landings.get(push_id):
                landing.was_seen_alive = True

    def suspects(self) -> tuple[Suspect, ...]:
        """The writers whose death would be good to know of. Only of those that were reached once
        can it be known."""
        with self._lock:
            self._sweep()
            now = self._clock.now()
            return tuple(
                Suspect(push_id=it.push_id, life_host=it.life_host, life_ports=it.life_ports)
                for it in self._landings.values()
                if it.was_seen_alive and it.may_be_written and self._is_suspect(it, now)
            )

    def writer_died(self, push_id: str) -> None:
        """The process that wrote to a push's slots is proven dead."""
        with self._lock:
            landing = self._landings.get(push_id)
            if landing is not None and landing.may_be_written:
                self._counts["num_lost"] += landing.state is _State.CLAIMED
                landing.was_cut = True
                self._let_go(landing)

    @property
    def has_writers(self) -> bool:
        """Whether a peer may be writing, or its last data be on the way."""
        with self._lock:
            return any(
                it.may_be_written or it.state is _State.LINGERING for it in self._landings.values()
            )

    def counts(self) -> LandingCounts:
        """What became of all pushes so far, and where the slots are."""
        with self._lock:
            self._sweep()
            kept = Counter[_State]()
            for landing in self._landings.values():
                kept[landing.state] += len(landing.slots)
            return LandingCounts(
                **self._counts,
                num_slots=self._num_slots,
                num_free_slots=len(self._free),
                num_quarantined_slots=kept[_State.QUARANTINED] + kept[_State.LINGERING],
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

    def _is_suspect(self, landing: _Landing, now: float) -> bool:
        is_unheard = now > landing.deadline - landing.lease_s / 2
        return landing.state is _State.QUARANTINED or is_unheard

    def _sweep(self) -> None:
        now = self._clock.now()
        for landing in tuple(self._landings.values()):
            is_kept = landing.is_awaited and landing.state is _State.LANDED
            if is_kept or now < landing.deadline:
                continue
            if landing.state is _State.CLAIMED:
                self._counts["num_lost"] += 1
                landing.state, landing.deadline = _State.QUARANTINED, math.inf
            else:
                self._drop(landing)

    def _call_off(self, landing: _Landing) -> None:
        if not landing.was_used:
            self._drop(landing)

    def _drop(self, landing: _Landing) -> None:
        if landing.state is _State.CLAIMED:
            self._counts["num_lost"] += 1
            landing.state, landing.deadline = _State.QUARANTINED, math.inf
        elif landing.state in (_State.EXPECTED, _State.LANDED):
            self._let_go(landing)
        elif landing.state is _State.LINGERING and self._clock.now() >= landing.deadline:
            self._free_slots(landing)

    def _let_go(self, landing: _Landing) -> None:
        """Nobody writes to a landing's slots any more, and nobody wants them."""
        if landing.was_cut:
            landing.state = _State.LINGERING
            landing.deadline = self._clock.now() + self._linger_s
        else:
            self._free_slots(landing)

    def _free_slots(self, landing: _Landing) -> None:
        del self._landings[landing.push_id]
        self._free.extend(reversed(landing.slots))

    def _refuse(self, reason: str) -> TicketAnswer:
        self._counts["num_refused"] += 1
        return TicketAnswer(False, reason=reason)

    def __repr__(self) -> str:
        with self._lock:
            return f"<LandingRegistry {len(self._landings)} pushes, {len(self._free)} slots free>"
