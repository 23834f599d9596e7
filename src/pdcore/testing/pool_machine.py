"""A state machine that finds out whether a block pool keeps its contract."""

from __future__ import annotations

from functools import partial

from pdcore.errors import BlockMisuse
from pdcore.kvcache.holds import HoldReason
from pdcore.testing.extras import require_hypothesis
from pdcore.testing.pool_comparison import (
    BLOCK_SIZE,
    CHAINS,
    BlockIds,
    MakePool,
    Model,
    PoolComparison,
    block_array,
)

require_hypothesis("pdcore.testing.block_pool_machine")

from hypothesis import settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis.stateful import initialize, precondition, rule  # noqa: E402

__all__ = ["BlockPoolMachine", "MakePool", "block_pool_machine"]

_UNDOABLE = (
    "allocate_all",
    "release_all",
    "retain",
    "serve",
    "publish",
    "withdraw",
    "hold_all",
    "release_all_holds",
    "read_events",
)


class BlockPoolMachine(PoolComparison):
    """Calls a pool and `NaiveBlockPool` in the same random ways and compares all that can be seen.

    Made by `block_pool_machine`. After every call, legal or not, it checks the results,
    the errors, that a call which raised changed nothing, the counts, keys, generations and holds,
    the pool's own `check`, that different states have different fingerprints, that a rollback
    brings back the fingerprint, and that the events keep a mirror of the index true. It does not
    roll back past a `commit` or a `reset`: what they tell the outside cannot be untold.

    Attributes:
        make_pool: makes the pool under test.
        exact_order: whether the pool must reuse blocks in the contract's order. Without it, free
            blocks must still go before evictable ones.
        with_events: whether the pool tells events, so that a mirror of them is kept and compared.
        sizes: the numbers of blocks that are tried; small pools find more.
    """

    @initialize(data=st.data(), reads_always=st.booleans())
    def start(self, data: st.DataObject, reads_always: bool) -> None:
        """Make a new pool, and decide whether its events are read after every call or seldom."""
        self.reads_always = reads_always
        num_blocks = data.draw(st.sampled_from(self.sizes), label="num_blocks")
        self.pool = type(self).make_pool(num_blocks, BLOCK_SIZE)
        self.model = Model(num_blocks, BLOCK_SIZE)
        for pool, told in zip((self.pool, self.model), self.told, strict=True):
            pool.subscribe(partial(_note, told))

    # Taking and giving back.

    @rule(n=st.integers(0, 2))
    def allocate(self, n: int) -> None:
        """Take some blocks, if there are so many."""
        self._allocate(n)

    def allocate_all(self) -> None:
        """Take every block there is, so that every cached prefix goes."""
        self._allocate(self.model.num_free_blocks)

    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        """Share owned and evictable blocks, and the null block."""
        classes = self.model.blocks_by_class()
        self._same("retain", self._draw(data, [0, *classes["owned"], *classes["evictable"]]))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Drop references that exist, and those to the null block, which nobody counts."""
        refs = [block for block, n in enumerate(self.model._state.num_refs) for _ in range(n)]
        refs += [0, 0]
        order = data.draw(st.permutations(refs), label="references")
        self._same("release", block_array(order[: data.draw(st.integers(0, len(refs)), label="n")]))

    @rule()
    def release_all(self) -> None:
        """Drop every reference, the last block first."""
        refs = [block for block, n in enumerate(self.model._state.num_refs) for _ in range(n)]
        self._same("release", block_array(refs[::-1]))

    @rule(data=st.data())
    def release_each(self, data: st.DataObject) -> None:
        """Several requests end at once: as if they ended one after the other."""
        refs = [block for block, n in enumerate(self.model._state.num_refs) for _ in range(n)]
        order = data.draw(st.permutations(refs), label="order")
        cuts = data.draw(st.lists(st.integers(0, len(refs)), max_size=3).map(sorted), label="cuts")
        bounds = list(zip([0, *cuts], [*cuts, len(refs)], strict=True))
        self._same("release_each", [block_array(order[start:end]) for start, end in bounds])

    # Keys.

    @rule(
        chain=st.sampled_from(CHAINS),
        n=st.integers(1, 3),
        releases=st.booleans(),
        commits=st.booleans(),
    )
    def serve(
        self, chain: tuple[bytes, ...], n: int, *, releases: bool = True, commits: bool = False
    ) -> None:
        """Do what a request does: allocate, publish a prefix, and perhaps leave it cached."""
        n = min(n, self.model.num_free_blocks)
        owned = self.model.blocks_by_class()["owned"]
        self._allocate(n)
        ids = block_array([b for b in self.model.blocks_by_class()["owned"] if b not in owned])
        self._same("publish", ids, chain[:n], self.step)
        if releases:
            self._same("release", ids[::-1])
        if commits:
            self.commit(age=0)

    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        """Give keys to blocks that may have them."""
        order = data.draw(st.permutations(self._plain_blocks()), label="blocks")
        self._publish(data, order)

    # Steps.

    @rule()
    def begin(self) -> None:
        """Start the next step."""
        self.step += 1
        self._same("begin", self.step)
        self.saved_fingerprint = self.pool.fingerprint()
        self.saved_holds = list(self.live_holds)

    @rule(age=st.integers(0, 2))
    def commit(self, age: int) -> None:
        """End the writes of the newest step or one before it."""
        before = self.model.fingerprint()
        self._same("commit", self.step - age)
        if age == 0 or self.model.fingerprint() != before:
            self.saved_fingerprint = None

    @rule(data=st.data(), age=st.integers(0, 2), everything=st.booleans())
    def withdraw(self, data: st.DataObject, age: int, everything: bool) -> None:
        """Take back keys of the newest step or one before it."""
        if everything:
            self._same("withdraw", self.step - age)
        else:
            blocks = self._draw(data, list(range(1, self.pool.num_blocks)))
            distinct = block_array(sorted(set(blocks.tolist())))
            self._same("withdraw", self.step - age, distinct)

    @precondition(lambda self: self.saved_fingerprint is not None)
    @rule()
    def rollback(self) -> None:
        """Undo all that was done since the newest step began."""
        expected, self.saved_fingerprint = self.saved_fingerprint, None
        self._same("rollback", self.step)
        assert self.pool.fingerprint() == expected, "rollback() did not bring back the state"
        undone = [hold for hold, _ in self.live_holds if not self._was_held(hold)]
        self.live_holds = list(self.saved_holds)
        for hold in undone:
            self._refuses(BlockMisuse, "release_hold", hold)

    @rule(data=st.data(), calls=st.lists(st.sampled_from(_UNDOABLE), min_size=1, max_size=4))
    def abandon(self, data: st.DataObject, calls: list[str]) -> None:
        """Plan a step and take it back at once."""
        self.begin()
        for call in calls:
            if call == "withdraw":
                self._same("withdraw", self.step - data.draw(st.integers(0, 2), label="age"))
            elif call == "serve":
                self.serve(data.draw(st.sampled_from(CHAINS), label="chain"), 3)
            elif call in ("retain", "publish"):
                getattr(self, call)(data)
            else:
                getattr(self, call)()
            self.mirror_keeps_up()
        self.rollback()

    @rule(reads=st.booleans())
    def abandon_growth(self, reads: bool) -> None:
        """Plan a step that evicts every cached prefix and holds all, and take it back at once."""
        self.begin()
        self.allocate_all()
        if reads:
            self.read_events()
        self.hand_over(HoldReason.QUARANTINE)
        self.rollback()

    # Holds.

    @rule(
        data=st.data(),
        reason=st.sampled_from(HoldReason),
        owner=st.sampled_from(["p", "q"]),
        deadline=st.sampled_from([None, 1.0]),
    )
    def hold(
        self, data: st.DataObject, reason: HoldReason, owner: str, deadline: float | None
    ) -> None:
        """Hold owned and evictable blocks."""
        classes = self.model.blocks_by_class()
        order = data.draw(st.permutations([*classes["owned"], *classes["evictable"]]))
        if order:
            n = data.draw(st.integers(1, len(order)), label="n")
            self._hold(block_array(order[:n]), owner, reason, deadline)

    @rule(reason=st.sampled_from(HoldReason))
    def hand_over(self, reason: HoldReason) -> None:
        """Do what the end of a prefill does: hold the blocks, then drop every reference."""
        blocks = [block for block, n in enumerate(self.model._state.num_refs) if n]
        if blocks:
            self._hold(block_array(blocks), "peer", reason, 1.0)
        self.release_all()

    def hold_all(self) -> None:
        """Hold every block that is owned or cached."""
        classes = self.model.blocks_by_class()
        blocks = block_array([*classes["owned"], *classes["evictable"]])
        if blocks.size:
            self._hold(blocks, "all", HoldReason.SEND, None)

    @precondition(lambda self: self.live_holds)
    @rule(data=st.data())
    def release_hold(self, data: st.DataObject) -> None:
        """End a hold."""
        self._release_hold(data.draw(st.integers(0, len(self.live_holds) - 1), label="hold"))

    @rule()
    def release_all_holds(self) -> None:
        """End every hold, the newest first."""
        while self.live_holds:
            self._release_hold(len(self.live_holds) - 1)

    @precondition(lambda self: self.model.counts().free < self.num_usable)
    @rule()
    def reset(self) -> None:
        """Drop every key, if nothing is owned."""
        if self._same("reset") is not None and self.model.counts().free == self.num_usable:
            self.saved_fingerprint = None


def block_pool_machine(
    make_pool: MakePool,
    *,
    exact_order: bool = True,
    with_events: bool = False,
    sizes: tuple[int, ...] = (8, 5, 12, 2),
) -> type[BlockPoolMachine]:
    """Make the state machine for one block pool; its ``TestCase`` is what pytest runs.

    ::

        TestMyPool = block_pool_machine(lambda num_blocks, block_size: MyPool(...)).TestCase

    Args:
        make_pool: makes a new pool from a number of blocks and a block size.
        exact_order: whether the pool must reuse blocks in the contract's order.
        with_events: whether the pool tells events, so that a mirror of them is kept and compared.
        sizes: the numbers of blocks that are tried, the null block included.
    """
    members = {
        "make_pool": staticmethod(make_pool),
        "exact_order": exact_order,
        "with_events": with_events,
        "sizes": sizes,
        "__doc__": BlockPoolMachine.__doc__,
    }
    machine: type[BlockPoolMachine] = type("BlockPoolMachine", (BlockPoolMachine,), members)
    # One fault at a time, by short traces: they shrink to something that can be read.
    machine.TestCase.settings = settings(
        settings.default, stateful_step_count=20, report_multiple_bugs=False, deadline=None
    )
    return machine


def _note(told: list[tuple[int, bytes]], ids: BlockIds, keys: list[bytes]) -> None:
    told.extend(zip(ids.tolist(), keys, strict=True))
