"""A prefill engine's record of its hand-overs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pdcore.clock import VirtualClock
from pdcore.connector.ticket_contents import TicketContents
from pdcore.connector.tickets import TicketRegistry
from pdcore.errors import ConfigError, TransferError

CONTENTS = TicketContents(
    block_ids=[4, 5], generations=[1, 2], num_tokens=30, block_size=16, prompt_digest="p"
)
DIGEST = CONTENTS.digest()


def granted(lease_s: float = 10.0) -> tuple[VirtualClock, TicketRegistry]:
    """A registry with one open ticket, ``t``."""
    clock = VirtualClock()
    registry = TicketRegistry(clock)
    registry.grant("t", CONTENTS, lease_s=lease_s)
    return clock, registry


def test_an_open_ticket_is_accepted() -> None:
    """A ticket within its lease is accepted, and its hold may go."""
    _, registry = granted()
    assert registry.accept("t", DIGEST, consumer="d").ok
    assert registry.take_released() == ("t",)


def test_acceptance_looks_at_the_clock_itself() -> None:
    """A lapsed ticket is refused although nobody swept it out."""
    clock, registry = granted(lease_s=10)
    clock.advance(10)
    answer = registry.accept("t", DIGEST, consumer="d")
    assert not answer
    assert answer.reason == "its lease of 10 s ended without a renewal"


def test_a_lapsed_ticket_cannot_be_renewed() -> None:
    """A renewal that comes too late does not bring a ticket back."""
    clock, registry = granted(lease_s=10)
    clock.advance(11)
    assert not registry.renew("t")
    assert not registry.accept("t", DIGEST, consumer="d")


def test_a_renewal_starts_the_lease_afresh() -> None:
    """After a renewal the whole lease runs again, and the next release says so."""
    clock, registry = granted(lease_s=10)
    clock.advance(9)
    assert registry.renew("t").remaining_s == 10
    assert registry.next_release() == 19
    clock.advance(9)
    assert registry.accept("t", DIGEST, consumer="d")


@pytest.mark.parametrize(
    "changes",
    [
        {"block_ids": [4, 6]},
        {"block_ids": [5, 4]},
        {"generations": [1, 3]},
        {"num_tokens": 29},
        {"block_size": 8},
        {"prompt_digest": "another"},
    ],
)
def test_what_was_changed_on_the_way_is_refused(changes: dict[str, Any]) -> None:
    """A reader that was told anything else gets a no; the ticket stays open for the right one."""
    _, registry = granted()
    changed = attrs.evolve(CONTENTS, **changes)
    answer = registry.accept("t", changed.digest(), consumer="d")
    assert answer.reason == "what its reader was told is not what the ticket stands for"
    assert registry.accept("t", DIGEST, consumer="d")


ids = st.lists(st.integers(0, 30), max_size=3)


@st.composite
def contents(draw: st.DrawFn) -> TicketContents:
    """Small ones, so that two are often nearly equal."""
    blocks = draw(ids)
    return TicketContents(
        block_ids=blocks,
        generations=draw(st.lists(st.integers(0, 2), min_size=len(blocks), max_size=len(blocks))),
        num_tokens=draw(st.integers(0, 12)),
        block_size=draw(st.integers(1, 12)),
        prompt_digest=draw(st.sampled_from(["", "1", "12", "a", "('"])),
    )


@given(contents(), contents())
def test_two_contents_have_one_digest_only_if_they_are_equal(
    one: TicketContents, other: TicketContents
) -> None:
    """No field runs into the next one."""
    assert (one.digest() == other.digest()) == (one == other)


@given(contents())
def test_arrays_and_lists_have_one_digest(one: TicketContents) -> None:
    """The pool counts in numpy integers, JSON in Python's."""
    arrays = attrs.evolve(
        one, block_ids=np.array(one.block_ids, np.int32), generations=np.array(one.generations)
    )
    assert arrays.digest() == one.digest()


def test_accepting_again_gives_the_same_answer_to_the_same_consumer() -> None:
    """A repeated accept is a yes for the consumer that had it and a no for any other."""
    _, registry = granted()
    assert registry.accept("t", DIGEST, consumer="d")
    assert registry.accept("t", DIGEST, consumer="d")
    assert registry.accept("t", DIGEST, consumer="e").reason == "it was accepted before"
    assert registry.take_released() == ("t",)


def test_a_released_ticket_is_refused_with_its_reason() -> None:
    """A release frees at once; later calls learn why; repeats change nothing."""
    _, registry = granted()
    assert registry.release("t", reason="its reader gave it back: aborted")
    assert not registry.release("t")
    assert registry.accept("t", DIGEST, consumer="d").reason == "its reader gave it back: aborted"
    assert registry.take_released() == ("t",)
    assert registry.take_released() == ()


def test_unknown_tickets_are_refused() -> None:
    """Nothing that names an unknown ticket does anything."""
    _, registry = granted()
    assert registry.renew("x").reason == "the ticket is unknown here"
    assert not registry.accept("x", DIGEST, consumer="d")
    assert not registry.release("x")


def test_take_released_sweeps_lapsed_tickets() -> None:
    """A lease that ended is told by the next call, and no deadline is left."""
    clock, registry = granted(lease_s=1)
    clock.advance(1)
    assert registry.has_pending
    assert registry.take_released() == ("t",)
    assert registry.next_release() is None
    assert not registry.has_pending


@pytest.mark.parametrize(
    ("seconds", "call"),
    [
        (1, lambda registry: registry.accept("t", DIGEST, consumer="d")),
        (1, lambda registry: registry.release("t")),
        (11, lambda registry: registry.renew("t")),
        (11, lambda registry: registry.is_open("t")),
        (11, lambda registry: registry.expire()),
    ],
    ids=["accept", "release", "late renew", "late is_open", "expire"],
)
def test_an_end_is_due_until_it_is_told(
    seconds: int, call: Callable[[TicketRegistry], object]
) -> None:
    """Whoever ended the ticket or noticed its end: the hold may go now, and not at a deadline."""
    clock, registry = granted(lease_s=10)
    clock.advance(seconds)
    call(registry)
    assert registry.num_open == 0
    assert registry.next_release() == seconds
    assert registry.take_released() == ("t",)
    assert registry.next_release() is None


@pytest.mark.parametrize("lease_s", [0.0, -1.0, float("nan"), float("inf")])
def test_leases_must_be_positive(lease_s: float) -> None:
    """A lease that is not a positive number of seconds is a named error."""
    with pytest.raises(TransferError, match="lease_s"):
        TicketRegistry(VirtualClock()).grant("t", CONTENTS, lease_s=lease_s)


def test_ids_are_not_used_twice() -> None:
    """A name that was used before, also for an ended ticket, is a named error."""
    _, registry = granted()
    registry.release("t")
    with pytest.raises(TransferError, match="used before"):
        registry.grant("t", CONTENTS, lease_s=1.0)


def test_every_block_needs_a_generation() -> None:
    """Blocks without generations are a named error."""
    with pytest.raises(TransferError, match="2 blocks come with 1 generations"):
        attrs.evolve(CONTENTS, generations=[1])


def test_memory_of_ended_tickets_is_bounded() -> None:
    """Only so many ended tickets are remembered, the newest ones."""
    registry = TicketRegistry(VirtualClock(), max_num_remembered=2)
    for name in "abc":
        registry.grant(name, CONTENTS, lease_s=1.0)
        registry.release(name)
    registry.check()
    assert registry.renew("a").reason == "the ticket is unknown here"
    assert registry.renew("b").reason == "its reader gave it back"
    with pytest.raises(ConfigError, match="max_num_remembered"):
        TicketRegistry(VirtualClock(), max_num_remembered=0)


def test_one_of_many_threads_gets_the_ticket() -> None:
    """Of consumers that ask at the same time exactly one gets a yes."""
    _, registry = granted()
    gate = threading.Barrier(8)
    answers: list[bool] = []

    def ask(name: str) -> None:
        gate.wait()
        answers.append(registry.accept("t", DIGEST, consumer=name).ok)

    threads = [threading.Thread(target=ask, args=(str(i),)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert answers.count(True) == 1
    assert len(answers) == 8


@attrs.define
class ModelTicket:
    """What the simple model knows of a ticket."""

    deadline: float
    lease_s: float
    state: str = "open"
    winner: str = ""
    is_told: bool = False


class TicketMachine(RuleBasedStateMachine):
    """Random calls, against a dictionary of states."""

    names = st.sampled_from("abcde")

    @initialize()
    def begin(self) -> None:
        self.clock = VirtualClock()
        self.registry = TicketRegistry(self.clock)
        self.model: dict[str, ModelTicket] = {}

    def lapse(self) -> None:
        for ticket in self.model.values():
            if ticket.state == "open" and self.clock.now() >= ticket.deadline:
                ticket.state = "lapsed"

    def state(self, name: str) -> str:
        self.lapse()
        return self.model[name].state if name in self.model else "unknown"

    @rule(name=names, lease_s=st.integers(1, 5))
    def grant(self, name: str, lease_s: int) -> None:
        if name in self.model:
            with pytest.raises(TransferError):
                self.registry.grant(name, CONTENTS, lease_s=lease_s)
            return
        self.registry.grant(name, CONTENTS, lease_s=lease_s)
        self.model[name] = ModelTicket(self.clock.now() + lease_s, lease_s)

    @rule(seconds=st.integers(0, 3))
    def advance(self, seconds: int) -> None:
        self.clock.advance(seconds)

    @rule(name=names)
    def renew(self, name: str) -> None:
        is_open = self.state(name) == "open"
        assert self.registry.renew(name).ok == is_open
        if is_open:
            self.model[name].deadline = self.clock.now() + self.model[name].lease_s

    @rule(name=names, is_right=st.sampled_from([True, True, False]), consumer=st.sampled_from("xy"))
    def accept(self, name: str, is_right: bool, consumer: str) -> None:
        state = self.state(name)
        expected = state == "open" and is_right
        expected |= state == "accepted" and self.model[name].winner == consumer
        answer = self.registry.accept(name, DIGEST if is_right else "0" * 64, consumer=consumer)
        assert answer.ok == expected
        assert bool(answer.reason) != answer.ok
        if expected:
            self.model[name].state = "accepted"
            self.model[name].winner = consumer

    @rule(name=names)
    def release(self, name: str) -> None:
        is_open = self.state(name) == "open"
        assert self.registry.release(name) == is_open
        if is_open:
            self.model[name].state = "released"

    @rule()
    def expire(self) -> None:
        self.registry.expire()

    @rule()
    def take_released(self) -> None:
        self.lapse()
        expected = {n for n, t in self.model.items() if t.state != "open" and not t.is_told}
        taken = self.registry.take_released()
        assert len(taken) == len(expected)
        assert set(taken) == expected
        for name in taken:
            self.model[name].is_told = True

    @invariant()
    def agrees(self) -> None:
        self.registry.check()
        for name, ticket in self.model.items():
            assert self.registry.is_open(name) == (self.state(name) == "open"), ticket
        times = [t.deadline for t in self.model.values() if t.state == "open"]
        if any(t.state != "open" and not t.is_told for t in self.model.values()):
            times.append(self.clock.now())
        assert self.registry.next_release() == min(times, default=None)


TicketMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestTicketMachine = TicketMachine.TestCase
