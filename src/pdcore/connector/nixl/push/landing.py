"""One push in the hands of a decode engine: its slots, and who may write to them."""

from __future__ import annotations

import enum

import attrs

__all__ = ["Landing", "LandingState", "Suspect"]


class LandingState(enum.Enum):
    """Where a push is. Somebody may write to its slots where it says so, and nowhere else."""

    EXPECTED = "expected"
    """Nobody may write to its slots yet."""
    CLAIMED = "claimed"
    """A peer writes to its slots."""
    LANDED = "landed"
    """The writer said that it is done."""
    QUARANTINED = "quarantined"
    """Nobody wants it, and the writer, who may still write, has not said that it stopped."""
    LINGERING = "lingering"
    """The writer was ended by force; what was on its way then has time to arrive."""


@attrs.frozen(kw_only=True)
class Suspect:
    """A writer that nobody wants to write any more, or that was not heard of.

    Args:
        writer: the engine.
        life_host, life_ports: where its ranks can be seen to live.
    """

    writer: str
    life_host: str
    life_ports: tuple[int, ...]


@attrs.define(eq=False, kw_only=True)
class Landing:
    """One push and its slots. `LandingRegistry` owns it.

    Args:
        push_id: the push.
        slots: where the prompt's first blocks go, by position.
        prompt_digest: of the prompt they are for.
        lease_s: how long it is kept without a sign of life.
        deadline: when that ends, or what else the state waits for, in seconds on the clock.
        state: where it is.
        writer: the engine that claimed it.
        life_host, life_ports: where the writer's ranks can be seen to live.
        was_seen_alive: whether all of them were, so that their death can be proven.
        ticket_id: the hand-over that the writer named, and num_blocks: how much of it is here.
        was_cut: whether a write was ended by force.
        is_awaited: whether a request came for it.
        was_used: whether its slots were given out to be read.
        is_overdue: whether its quarantine has outlasted every orderly end.
    """

    push_id: str
    slots: tuple[int, ...]
    prompt_digest: str
    lease_s: float
    deadline: float
    state: LandingState = LandingState.EXPECTED
    writer: str = ""
    life_host: str = ""
    life_ports: tuple[int, ...] = ()
    was_seen_alive: bool = False
    ticket_id: str = ""
    num_blocks: int = 0
    was_cut: bool = False
    is_awaited: bool = False
    was_used: bool = False
    is_overdue: bool = False

    @property
    def may_be_written(self) -> bool:
        return self.state in (LandingState.CLAIMED, LandingState.QUARANTINED)

    def is_written_by(self, writer: str) -> bool:
        """Whether a peer writes to it, and somebody wants what it writes."""
        return self.state is LandingState.CLAIMED and self.writer == writer

    @property
    def suspect(self) -> Suspect:
        """Its writer, to be looked after."""
        return Suspect(writer=self.writer, life_host=self.life_host, life_ports=self.life_ports)

    def is_from(self, writer: str, prompt_digest: str) -> bool:
        """Whether a peer claimed it, and for this prompt."""
        return (self.writer, self.prompt_digest) == (writer, prompt_digest)

    def is_suspect(self, now: float) -> bool:
        """Whether the writer's death would be good to know of, and can be known."""
        is_unheard = now > self.deadline - self.lease_s / 2
        is_of_interest = self.state is LandingState.QUARANTINED or is_unheard
        return self.was_seen_alive and self.may_be_written and is_of_interest
