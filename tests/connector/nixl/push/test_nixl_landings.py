"""Whose the staging slots are: never two writers', never anybody's while an old one may write."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from pdcore.clock import VirtualClock
from pdcore.connector.nixl.push.landing import Suspect
from pdcore.connector.nixl.push.landings import LandingRegistry

LEASE_S, LINGER_S, OVERDUE_S = 10.0, 5.0, 60.0
DIGEST = "ab" * 32
P, Q = "p:1", "q:1"


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def registry(clock: VirtualClock) -> LandingRegistry:
    """Eight slots."""
    return a_registry(clock)


def a_registry(clock: VirtualClock, num_slots: int = 8) -> LandingRegistry:
    return LandingRegistry(clock, num_slots=num_slots, linger_s=LINGER_S, overdue_s=OVERDUE_S)


def expect(registry: LandingRegistry, push_id: str, num: int = 4) -> tuple[int, ...]:
    return registry.expect(push_id, prompt_digest=DIGEST, max_num_slots=num, lease_s=LEASE_S)


def claim(registry: LandingRegistry, push_id: str, agreed: tuple[int, ...], **changes: Any) -> str:
    """Claim a push; return why that was refused, or nothing."""
    fields: dict[str, Any] = {"slots": agreed, "prompt_digest": DIGEST, "writer": P}
    fields |= {"life_host": "127.0.0.1", "life_ports": (1,)}
    return registry.claim(push_id, **fields | changes).reason


def end(registry: LandingRegistry, push_id: str, **changes: Any) -> bool:
    fields: dict[str, Any] = {"writer": P, "ticket_id": "t", "num_blocks": 3, "was_cut": False}
    return bool(registry.end(push_id, **fields | changes))


def take(registry: LandingRegistry, push_id: str, **changes: Any) -> tuple[int, ...]:
    fields: dict[str, Any] = {"writer": P, "ticket_id": "t", "prompt_digest": DIGEST}
    return registry.take(push_id, **fields | changes)


def test_a_push_from_leave_to_use(registry: LandingRegistry) -> None:
    """What the writer vouched for is given out, and the slots are free again afterwards."""
    slots = expect(registry, "a")
    assert claim(registry, "a", slots) == ""
    assert registry.is_landing("a", writer=P)
    assert end(registry, "a")
    assert not registry.is_landing("a", writer=P)
    assert take(registry, "a") == slots[:3]
    registry.drop("a", prompt_digest=DIGEST)
    counts = registry.counts()
    assert (counts.num_used, counts.num_free_slots, counts.num_quarantined_slots) == (1, 8, 0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"slots": (7, 6, 5, 4)}, "not those of the push"),
        ({"slots": (0, 1, 2, 99)}, "not those of the push"),
        ({"prompt_digest": "cd" * 32}, "not those of the push"),
        ({"writer": Q}, "another engine pushes"),
    ],
)
def test_a_wrong_claim(registry: LandingRegistry, changes: dict[str, Any], reason: str) -> None:
    """Slots, prompt and writer must be those of the push, also for who comes second."""
    slots = expect(registry, "a")
    assert claim(registry, "a", slots) == ""
    assert reason in claim(registry, "a", slots, **changes)
    assert claim(registry, "a", slots) == ""
    assert "unknown" in claim(registry, "b", slots)


@pytest.mark.parametrize(
    "changes", [{"writer": Q}, {"ticket_id": "u"}, {"prompt_digest": "cd" * 32}]
)
def test_a_foreign_ticket_gets_nothing(registry: LandingRegistry, changes: dict[str, Any]) -> None:
    """Only the ticket that the writer named brings what it wrote."""
    claim(registry, "a", expect(registry, "a"))
    end(registry, "a")
    assert take(registry, "a", **changes) == ()


def test_a_foreign_end(registry: LandingRegistry) -> None:
    """Only the writer can say that it stopped."""
    claim(registry, "a", expect(registry, "a"))
    assert not end(registry, "a", writer=Q)
    assert registry.is_landing("a", writer=P)


def test_a_foreign_drop(registry: LandingRegistry) -> None:
    """Parameters of another prompt cannot call a push off."""
    slots = expect(registry, "a")
    claim(registry, "a", slots)
    registry.drop("a", prompt_digest="cd" * 32)
    end(registry, "a")
    registry.drop("a", prompt_digest="cd" * 32)
    assert take(registry, "a") == slots[:3]


def test_an_end_that_is_told_twice(registry: LandingRegistry) -> None:
    """The second time changes nothing, whoever has the slots by then."""
    slots = expect(registry, "a")
    claim(registry, "a", slots)
    end(registry, "a")
    registry.drop("a", prompt_digest=DIGEST)
    assert end(registry, "a")
    assert expect(registry, "b") == slots
    assert end(registry, "a")
    assert registry.counts().num_landed == 1
    assert claim(registry, "b", slots) == ""


def test_a_late_end_brings_nothing(registry: LandingRegistry, clock: VirtualClock) -> None:
    """A writer that was given up frees its slots when it says that it stopped, and no more."""
    claim(registry, "a", expect(registry, "a", 8))
    clock.advance(LEASE_S)
    assert registry.counts().num_quarantined_slots == 8
    assert not registry.hear("a", writer=P)
    assert "unknown" in claim(registry, "a", tuple(range(8)))
    assert end(registry, "a")
    assert take(registry, "a") == ()
    assert registry.counts().num_free_slots == 8


def test_signs_of_life(registry: LandingRegistry, clock: VirtualClock) -> None:
    """A writer that is heard of keeps its slots for as long as it takes."""
    claim(registry, "a", expect(registry, "a"))
    for _ in range(5):
        clock.advance(LEASE_S * 0.9)
        assert registry.hear("a", writer=P)
        assert not registry.hear("a", writer=Q)
    assert registry.is_landing("a", writer=P)


def test_a_claim_that_never_comes(registry: LandingRegistry, clock: VirtualClock) -> None:
    """Nobody can have written to slots that were not claimed: they are free after a lease."""
    slots = expect(registry, "a", 8)
    assert expect(registry, "b") == ()
    clock.advance(LEASE_S)
    assert len(expect(registry, "b")) == 4
    assert "unknown" in claim(registry, "a", slots)


def test_a_request_that_waits_its_turn(registry: LandingRegistry, clock: VirtualClock) -> None:
    """Once its request is here, what was pushed stays for longer than a lease."""
    slots = expect(registry, "a")
    claim(registry, "a", slots)
    end(registry, "a")
    registry.want("a", writer=Q, prompt_digest=DIGEST)
    registry.want("a", writer=P, prompt_digest=DIGEST)
    clock.advance(10 * LEASE_S)
    assert take(registry, "a") == slots[:3]
    clock.advance(10 * LEASE_S)
    assert registry.counts().num_free_slots == 4
    registry.drop("a", prompt_digest=DIGEST)
    assert registry.counts().num_free_slots == 8


def test_nobody_comes(registry: LandingRegistry, clock: VirtualClock) -> None:
    """What was pushed for a request that does not come is dropped after a lease."""
    claim(registry, "a", expect(registry, "a"))
    end(registry, "a")
    registry.want("a", writer=Q, prompt_digest=DIGEST)
    clock.advance(LEASE_S)
    assert take(registry, "a") == ()
    assert registry.counts().num_free_slots == 8


def test_an_end_before_the_claim(registry: LandingRegistry) -> None:
    """A claim that was overtaken by its end is refused."""
    slots = expect(registry, "a")
    assert end(registry, "a", num_blocks=0)
    assert "unknown" in claim(registry, "a", slots)
    assert registry.counts().num_free_slots == 8


def test_death_must_be_proven(registry: LandingRegistry, clock: VirtualClock) -> None:
    """A silent writer is looked for once it was reached; after its death the slots linger."""
    slots = expect(registry, "a")
    claim(registry, "a", slots)
    clock.advance(LEASE_S * 0.9)
    assert registry.suspects() == ()
    claim(registry, "a", slots, was_seen_alive=True)
    assert registry.suspects() == ()
    clock.advance(LEASE_S)
    (suspect,) = registry.suspects()
    assert suspect == Suspect(writer=P, life_host="127.0.0.1", life_ports=(1,))
    assert registry.writer_died(suspect) == ("a",)
    clock.advance(LINGER_S * 0.9)
    assert registry.counts().num_free_slots == 4
    clock.advance(LINGER_S * 0.1)
    assert registry.counts().num_free_slots == 8


def test_a_death_ends_all_pushes_of_an_engine(
    registry: LandingRegistry, clock: VirtualClock
) -> None:
    """It is one look and one proof, however many pushes the engine had; others are not touched."""
    for push_id, writer in {"a": P, "b": P, "c": Q}.items():
        claim(registry, push_id, expect(registry, push_id, 2), writer=writer, was_seen_alive=True)
    end(registry, "a")
    claim(registry, "d", expect(registry, "d", 2), was_seen_alive=True)
    clock.advance(LEASE_S * 0.9)
    suspects = {suspect.writer: suspect for suspect in registry.suspects()}
    assert suspects.keys() == {P, Q}
    assert registry.writer_died(suspects[P]) == ("b", "d")
    assert registry.is_landing("c", writer=Q)
    assert len(take(registry, "a")) == 2


def test_a_quarantine_that_lasts(registry: LandingRegistry, clock: VirtualClock) -> None:
    """Slots whose writer should have ended are counted and told once, until it does."""
    claim(registry, "a", expect(registry, "a"))
    clock.advance(LEASE_S)
    registry.counts()
    clock.advance(OVERDUE_S * 0.99)
    assert (registry.counts().num_overdue_slots, registry.take_overdue()) == (0, ())
    clock.advance(OVERDUE_S * 0.01)
    (overdue,) = registry.take_overdue()
    assert (overdue.push_id, registry.take_overdue()) == ("a", ())
    counts = registry.counts()
    assert (counts.num_overdue_slots, counts.num_quarantined_slots) == (4, 4)
    end(registry, "a", was_cut=True)
    counts = registry.counts()
    assert (counts.num_overdue_slots, counts.num_quarantined_slots) == (0, 4)
    clock.advance(LINGER_S)
    assert registry.counts().num_free_slots == 8


def test_a_flood_of_leaves(clock: VirtualClock) -> None:
    """There are never more leaves than slots; those never used are free again after a lease."""
    registry = a_registry(clock, num_slots=100)
    given = [expect(registry, f"a{i}", 1 + i % 3) for i in range(5000)]
    counts = registry.counts()
    num_given = sum(1 for slots in given if slots)
    assert sum(map(len, given)) == 100
    assert (counts.num_expected, counts.num_declined) == (num_given, 5000 - num_given)
    assert repr(registry) == f"<LandingRegistry {num_given} pushes, 0 slots free>"
    clock.advance(LEASE_S)
    assert registry.counts().num_free_slots == 100
    assert repr(registry) == "<LandingRegistry 0 pushes, 100 slots free>"


def test_a_cut_write_lingers(registry: LandingRegistry, clock: VirtualClock) -> None:
    """What arrived before a write was cut is good; the slots wait for what is on its way."""
    slots = expect(registry, "a")
    claim(registry, "a", slots)
    end(registry, "a", num_blocks=2, was_cut=True)
    assert take(registry, "a") == slots[:2]
    registry.drop("a", prompt_digest=DIGEST)
    assert registry.counts().num_quarantined_slots == 4
    assert registry.has_writers
    clock.advance(LINGER_S)
    assert registry.counts().num_free_slots == 8


def test_a_push_that_is_still_written_is_not_used(registry: LandingRegistry) -> None:
    """A load that does not wait for the end gets nothing, and nobody gets the slots."""
    claim(registry, "a", expect(registry, "a", 8))
    assert take(registry, "a") == ()
    assert end(registry, "a")
    assert take(registry, "a") == ()
    assert registry.counts().num_free_slots == 8


class Slots(RuleBasedStateMachine):
    """Random lives; the model knows who may still write where, and until when."""

    pushes = Bundle("pushes")

    def __init__(self) -> None:
        super().__init__()
        self.clock = VirtualClock()
        self.registry = LandingRegistry(
            self.clock, num_slots=8, linger_s=LINGER_S, overdue_s=OVERDUE_S
        )
        self.num_pushes = 0
        self.writers: dict[str, set[int]] = {}
        self.late: list[tuple[float, set[int]]] = []
        self.readers: dict[str, set[int]] = {}

    def is_written(self, slots: set[int]) -> bool:
        late = [slots for until, slots in self.late if self.clock.now() < until]
        return any(slots & other for other in (*self.writers.values(), *late))

    @rule(target=pushes, num=st.integers(1, 5))
    def expected(self, num: int) -> tuple[str, tuple[int, ...]]:
        self.num_pushes += 1
        push_id = str(self.num_pushes)
        slots = expect(self.registry, push_id, num)
        assert not self.is_written(set(slots))
        assert not any(set(slots) & other for other in self.readers.values())
        return push_id, slots

    @rule(push=pushes, writer=st.sampled_from([P, Q]))
    def claimed(self, push: tuple[str, tuple[int, ...]], writer: str) -> None:
        push_id, slots = push
        if claim(self.registry, push_id, slots, writer=writer, was_seen_alive=True) == "":
            self.writers[push_id + writer] = set(slots)
            assert not (push_id + P in self.writers and push_id + Q in self.writers)

    @rule(
        push=consumes(pushes),
        writer=st.sampled_from([P, Q]),
        num_blocks=st.integers(0, 5),
        was_cut=st.booleans(),
    )
    def ended(
        self, push: tuple[str, tuple[int, ...]], writer: str, num_blocks: int, was_cut: bool
    ) -> None:
        push_id, _ = push
        written = self.writers.pop(push_id + writer, None)
        if written and was_cut:
            self.late.append((self.clock.now() + LINGER_S, written))
        end(self.registry, push_id, writer=writer, num_blocks=num_blocks, was_cut=was_cut)
        slots = take(self.registry, push_id, writer=writer)
        if slots:
            assert written is not None
            assert set(slots) <= written
            assert len(slots) <= num_blocks
            self.readers[push_id] = set(slots)

    @rule(push=pushes)
    def called_off(self, push: tuple[str, tuple[int, ...]]) -> None:
        self.registry.drop(push[0], prompt_digest=DIGEST)

    @rule(push=pushes)
    def taken(self, push: tuple[str, tuple[int, ...]]) -> None:
        assert take(self.registry, push[0]) == ()

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        if self.readers:
            push_id = data.draw(st.sampled_from(sorted(self.readers)))
            del self.readers[push_id]
            self.registry.drop(push_id, prompt_digest=DIGEST)

    @rule(seconds=st.sampled_from([1.0, LINGER_S, LEASE_S]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(data=st.data())
    def died(self, data: st.DataObject) -> None:
        suspects = self.registry.suspects()
        if suspects:
            suspect = data.draw(st.sampled_from(suspects))
            for push in [push for push in self.writers if push.endswith(suspect.writer)]:
                self.late.append((self.clock.now() + LINGER_S, self.writers.pop(push)))
            self.registry.writer_died(suspect)

    @invariant()
    def is_sound(self) -> None:
        self.registry.check()


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
