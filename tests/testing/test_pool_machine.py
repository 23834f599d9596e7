"""The pool machine: it passes right pools, and every broken one fails."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from pdcore.errors import BlockMisuse, OutOfBlocks, PdcoreError
from pdcore.kvcache.base import BlockPool
from pdcore.kvcache.events import BlockStored, KVEvent
from pdcore.kvcache.holds import Hold
from pdcore.testing import BlockPoolMachine, NaiveBlockPool, block_pool_machine

QUICK = settings(
    max_examples=100,
    stateful_step_count=40,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)

TestNaiveBlockPool = block_pool_machine(NaiveBlockPool, with_events=True).TestCase
TestNaiveBlockPool.settings = settings(QUICK, max_examples=50)


class MostRecentFirst(NaiveBlockPool):
    """Evicts the prefix released last: a legal pool with an order of its own."""

    def _take_one(self) -> int:
        return self._take(self._state.free[0] if self._state.free else self._state.evictable[-1])


TestOwnOrder = block_pool_machine(MostRecentFirst, exact_order=False, with_events=True).TestCase
TestOwnOrder.settings = settings(QUICK, max_examples=30)


class AcceptsDoubleRelease(NaiveBlockPool):
    """Ignores a release without a reference."""

    def release(self, ids: Any) -> None:
        known = [b for b in ids.tolist() if 0 < b < self.num_blocks and self._state.num_refs[b]]
        super().release(np.array(sorted(set(known), key=known.index), dtype=np.int32))


class ForgetsToDropKeys(NaiveBlockPool):
    """Hands out a block and leaves its old key in the index."""

    def _take(self, block: int) -> int:
        if self._take_from_evictable(block):
            self._state.free.append(block)
        return super()._take(block)


class HandsOutTheNullBlock(NaiveBlockPool):
    """Treats block 0 like any other."""

    def allocate(self, n: int) -> Any:
        ids = super().allocate(n)
        return np.where(ids == self.num_blocks - 1, 0, ids).astype(np.int32)


class AllocatesWhatThereIs(NaiveBlockPool):
    """Takes some blocks before it finds that there are too few."""

    def allocate(self, n: int) -> Any:
        if n > self.num_free_blocks:
            available = self.num_free_blocks
            super().allocate(available)
            raise OutOfBlocks(n, available)
        return super().allocate(n)


class ReleasesInTheWrongOrder(NaiveBlockPool):
    """Reuses the last released block of a call first."""

    def release(self, ids: Any) -> None:
        super().release(ids[::-1])


class RollbackForgetsTheOrder(NaiveBlockPool):
    """Brings back which blocks are evictable, in order of their numbers."""

    def rollback(self, step: int) -> None:
        super().rollback(step)
        self._state.evictable.sort()


class RollbackForgetsHolds(NaiveBlockPool):
    """Keeps the holds that the undone step made."""

    def rollback(self, step: int) -> None:
        holds = dict(self._state.holds)
        super().rollback(step)
        self._state.holds = holds


class CountsQuarantineAsFree(NaiveBlockPool):
    """Promises blocks that something may still write to."""

    @property
    def num_free_blocks(self) -> int:
        return super().num_free_blocks + self.counts().quarantined


class KeepsTheGeneration(NaiveBlockPool):
    """Hands out a cached block under its old generation."""

    def _take(self, block: int) -> int:
        was_evictable = block in self._state.evictable
        super()._take(block)
        self._generations[block] -= was_evictable
        return block


class RollsBackGenerations(NaiveBlockPool):
    """Lets a generation be used twice."""

    def begin(self, step: int) -> None:
        super().begin(step)
        self._before = list(self._generations)

    def rollback(self, step: int) -> None:
        super().rollback(step)
        self._generations = self._before


class LooksUpPastHoles(NaiveBlockPool):
    """Returns blocks behind an unknown key."""

    def lookup(self, keys: Sequence[bytes]) -> Any:
        known = [self._state.index[key][0] for key in keys if key in self._state.index]
        return np.array(known, dtype=np.int32)


class LooksUpTheNewest(NaiveBlockPool):
    """Returns the block that was published last."""

    def lookup(self, keys: Sequence[bytes]) -> Any:
        found = super().lookup(keys)
        newest = [self._state.index[key][-1] for key, _ in zip(keys, found, strict=False)]
        return np.array(newest, dtype=np.int32)


class EvictsEveryBlockOfAKey(NaiveBlockPool):
    """Forgets the second block of a key with the first."""

    def _drop_key(self, block: int) -> None:
        key = self._state.keys.get(block)
        if key is None:
            return
        super()._drop_key(block)
        for other in list(self._state.index.get(key, ())):
            super()._drop_key(other)
            if self._take_from_evictable(other):
                self._give_back([other])


class TellsEventsEarly(NaiveBlockPool):
    """Tells of a block before the step that writes it is done."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._early: list[KVEvent] = []

    def publish(self, ids: Any, keys: Any, step: int, *, parents: Any = None) -> None:
        super().publish(ids, keys, step, parents=parents)
        for block, key in zip(ids.tolist(), keys, strict=True):
            self._early.append(BlockStored(key, self._state.parents[block], block))

    def events(self) -> list[KVEvent]:
        early, self._early = self._early, []
        for event in early:
            assert isinstance(event, BlockStored)
            self._told[event.block_id] = (event.key, event.parent_key)
        return early + [event for event in super().events() if event not in early]


class ForgetsToTellRemovals(NaiveBlockPool):
    """Tells what is stored and not what is gone."""

    def events(self) -> list[KVEvent]:
        return [event for event in super().events() if isinstance(event, BlockStored)]


class LosesParents(NaiveBlockPool):
    """Tells every block but the first of a call without its parent."""

    def publish(self, ids: Any, keys: Any, step: int, *, parents: Any = None) -> None:
        super().publish(ids, keys, step, parents=parents)
        for block in ids.tolist()[1:]:
            self._state.parents[block] = None


class TellsSubscribersOfEveryStep(NaiveBlockPool):
    """Says that blocks are written before their step is."""

    def commit(self, step: int) -> None:
        provisional = list(self._state.provisional)
        super().commit(step)
        self._tell_committed([b for b in provisional if b in self._state.provisional])


class WithdrawsEverybodysKeys(NaiveBlockPool):
    """Drops the uncommitted keys of other steps as well."""

    def _provisional_blocks(self, step: int) -> list[int]:
        return list(self._state.provisional)


class IgnoresHolds(NaiveBlockPool):
    """Gives back a released block though it is held."""

    def release(self, ids: Any) -> None:
        holds, self._state.holds = self._state.holds, {}
        super().release(ids)
        self._state.holds = holds


class EndsHoldsTwice(NaiveBlockPool):
    """Lets a hold end again."""

    def release_hold(self, hold: Hold) -> None:
        if hold.hold_id in self._state.holds:
            super().release_hold(hold)


class RetainsFreeBlocks(NaiveBlockPool):
    """Lets a free block be shared, as if it held something."""

    def retain(self, ids: Any) -> None:
        for block in self._real(ids):
            if block in self._state.free:
                self._state.free.remove(block)
        super().retain(ids)


class PublishesOverKeys(NaiveBlockPool):
    """Replaces a key that a block has."""

    def publish(self, ids: Any, keys: Any, step: int, *, parents: Any = None) -> None:
        for block in self._real(ids):
            if block in self._state.keys and self._has_owner(block):
                self._drop_key(block)
        super().publish(ids, keys, step, parents=parents)


class ResetsUnderItsUsers(NaiveBlockPool):
    """Drops every key though blocks are in use."""

    def reset(self) -> bool:
        for block in list(self._state.keys):
            self._drop_key(block)
        evictable, self._state.evictable = self._state.evictable, []
        self._give_back(evictable)
        return True


class RollsBackOldSteps(NaiveBlockPool):
    """Undoes the newest step under the name of an older one."""

    def rollback(self, step: int) -> None:
        if self._saved is None:
            raise BlockMisuse("nothing to undo")
        super().rollback(self._saved[0])


class ConstantFingerprint(NaiveBlockPool):
    """Has one fingerprint for every state."""

    def fingerprint(self) -> bytes:
        return b"same"


class HoldsWhatComesFirst(NaiveBlockPool):
    """Takes cached blocks out of the order of eviction before it finds one that cannot be held."""

    def hold(self, ids: Any, **options: Any) -> Hold:
        try:
            return super().hold(ids, **options)
        except BlockMisuse:
            for block in ids.tolist():
                self._take_from_evictable(block)
            raise


class PublishesWhatComesFirst(NaiveBlockPool):
    """Gives keys to some blocks before it finds one that cannot have one."""

    def publish(self, ids: Any, keys: Any, step: int, **options: Any) -> None:
        try:
            super().publish(ids, keys, step, **options)
        except BlockMisuse:
            if len(ids) > 1:
                super().publish(ids[:1], keys[:1], step)
            raise


class CountsTheNullBlock(NaiveBlockPool):
    """Wants a reference for whatever is released, also for the block that nobody counts."""

    def release(self, ids: Any) -> None:
        if 0 in ids.tolist():
            raise BlockMisuse("block 0 has no references")
        super().release(ids)


BROKEN: list[type[NaiveBlockPool]] = [
    CountsTheNullBlock,
    AcceptsDoubleRelease,
    ForgetsToDropKeys,
    HandsOutTheNullBlock,
    AllocatesWhatThereIs,
    ReleasesInTheWrongOrder,
    RollbackForgetsTheOrder,
    RollbackForgetsHolds,
    CountsQuarantineAsFree,
    KeepsTheGeneration,
    RollsBackGenerations,
    LooksUpPastHoles,
    LooksUpTheNewest,
    EvictsEveryBlockOfAKey,
    TellsEventsEarly,
    ForgetsToTellRemovals,
    LosesParents,
    TellsSubscribersOfEveryStep,
    WithdrawsEverybodysKeys,
    IgnoresHolds,
    EndsHoldsTwice,
    RetainsFreeBlocks,
    PublishesOverKeys,
    ResetsUnderItsUsers,
    RollsBackOldSteps,
    ConstantFingerprint,
    HoldsWhatComesFirst,
    PublishesWhatComesFirst,
]


@pytest.mark.parametrize("make_pool", BROKEN, ids=lambda pool: pool.__name__)
def test_a_broken_pool_fails(make_pool: type[NaiveBlockPool]):
    """Each of these pools breaks one promise, and the machine notices."""
    machine = block_pool_machine(make_pool, with_events=True)
    with pytest.raises((AssertionError, PdcoreError)):
        run_state_machine_as_test(machine, settings=QUICK)


def test_a_failure_shows_the_values_that_differ(tmp_path: Path):
    """In a test run the machine's own claims say what they saw, as those of a test's file do."""
    (tmp_path / "test_it.py").write_text(
        "from pdcore.testing import NaiveBlockPool, block_pool_machine\n"
        "class CountsTwice(NaiveBlockPool):\n"
        "    @property\n"
        "    def num_free_blocks(self):\n"
        "        return 1000\n"
        "TestIt = block_pool_machine(CountsTwice).TestCase\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "assert 1000 == " in done.stdout


def test_a_pool_of_another_order_fails_when_the_order_is_exact():
    """The most recent prefix may go first only where the order is the pool's own."""
    with pytest.raises(AssertionError):
        run_state_machine_as_test(block_pool_machine(MostRecentFirst), settings=QUICK)


def test_a_machine_takes_its_settings_from_the_call():
    """The class that comes back knows its pool and what to ask of it."""
    made: list[tuple[int, int]] = []

    def make_pool(num_blocks: int, block_size: int) -> BlockPool:
        made.append((num_blocks, block_size))
        return NaiveBlockPool(num_blocks, block_size)

    machine = block_pool_machine(make_pool, sizes=(3,))
    assert issubclass(machine, BlockPoolMachine)
    run_state_machine_as_test(machine, settings=settings(QUICK, max_examples=5))
    assert {num_blocks for num_blocks, _ in made} == {3}
