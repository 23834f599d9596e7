"""How a block pool is compared with `NaiveBlockPool`: what the pool machine checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from pdcore.errors import BlockError, BlockMisuse, OutOfBlocks
from pdcore.kvcache.base import BlockPool
from pdcore.kvcache.events import BlockRemoved, BlockStored, CacheCleared
from pdcore.kvcache.holds import Hold, HoldReason
from pdcore.testing.extras import require_hypothesis
from pdcore.testing.naive_pool import NaiveBlockPool

require_hypothesis("pdcore.testing.block_pool_machine")

from hypothesis import strategies as st  # noqa: E402
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule  # noqa: E402

__all__ = ["BLOCK_SIZE", "CHAINS", "MakePool", "Model", "PoolComparison", "block_array"]

BlockIds = npt.NDArray[np.int32]
MakePool = Callable[[int, int], BlockPool]
"""Makes a new pool from a number of blocks (the null block included) and a block size."""

CHAINS = tuple(tuple(f"{name}{depth}".encode() for depth in range(3)) for name in "ab")
"""The chained keys that are published: few, so that they meet."""
BLOCK_SIZE = 4


class Model(NaiveBlockPool):
    """The reference, with the two things that only the machine asks for."""

    def take(self, ids: Sequence[int]) -> None:
        """Hand out exactly these blocks."""
        for block in ids:
            self._take(block)

    def blocks_by_class(self) -> dict[str, list[int]]:
        """The blocks that are free, evictable, and owned."""
        free, evictable = self._state.free, self._state.evictable
        owned = [b for b in range(1, self.num_blocks) if b not in free and b not in evictable]
        return {"free": list(free), "evictable": list(evictable), "owned": owned}

    def stored(self) -> dict[int, tuple[bytes, bytes | None]]:
        """What a mirror must hold: key and parent of every committed block."""
        return {
            block: (key, self._state.parents[block])
            for block, key in self._state.keys.items()
            if block not in self._state.provisional
        }


class PoolComparison(RuleBasedStateMachine):
    """A pool beside its model, and everything that must be equal after every call.

    `BlockPoolMachine` adds the calls.
    """

    make_pool: ClassVar[MakePool] = staticmethod(NaiveBlockPool)
    exact_order: ClassVar[bool] = True
    with_events: ClassVar[bool] = False
    sizes: ClassVar[tuple[int, ...]] = (8, 5, 12, 2)

    def __init__(self) -> None:
        super().__init__()
        self.pool: BlockPool = NaiveBlockPool(2, BLOCK_SIZE)
        self.model = Model(2, BLOCK_SIZE)
        self.reads_always = False
        self.num_calls = 0
        self.step = 0
        self.saved_fingerprint: bytes | None = None
        self.live_holds: list[tuple[Hold, Hold]] = []
        self.saved_holds: list[tuple[Hold, Hold]] = []
        self.mirror: dict[int, tuple[bytes, bytes | None]] = {}
        self.seen: dict[bytes, bytes] = {}
        self.told: list[list[tuple[int, bytes]]] = [[], []]

    # What is refused.

    @invariant()
    def misuse_is_refused(self) -> None:
        """Whatever the contract forbids in this state raises and changes nothing.

        It takes many calls to try, so it is tried after every fourth.
        """
        self.num_calls += 1
        if self.num_calls % 4:
            return
        classes = self.model.blocks_by_class()
        held = [b for b in classes["owned"] if not self.model._state.num_refs[b]]
        keyed = [b for b in classes["owned"] if b not in self._plain_blocks()]
        outside = [-1, self.pool.num_blocks]
        self._refuses(OutOfBlocks, "allocate", self.model.num_free_blocks + 1)
        self._refuses_each("retain", [*classes["free"][:1], *outside])
        without_reference = [*classes["free"][:1], *classes["evictable"][:1], *held[:1]]
        self._refuses_each("release", [*without_reference, *outside])
        for block in [0, *classes["free"][:1], *classes["evictable"][:1], *keyed[:1], *outside]:
            self._refuses(BlockMisuse, "publish", block_array([block]), [b"new"], self.step)
            for plain in self._plain_blocks()[:1]:
                self._refuses(
                    BlockMisuse, "publish", block_array([plain, block]), [b"x", b"y"], self.step
                )
        for block in [0, *classes["free"][:1], *outside]:
            self._refuses_hold([block])
            self._refuses_hold([*classes["evictable"][:1], *classes["owned"][:1], block])
        for block in classes["owned"][:1]:
            twice = [block] * (self.model._state.num_refs[block] + 1)
            self._refuses(BlockMisuse, "release", block_array(twice))
            self._refuses(BlockMisuse, "publish", block_array([block] * 2), [b"x", b"y"], self.step)
            self._refuses_hold([block, block])
        if self.step > 1:
            self._refuses(BlockMisuse, "rollback", self.step - 1)

    # What must hold after every call.

    @invariant()
    def classes_agree(self) -> None:
        """Every block is in the class that the contract says."""
        self.pool.check()
        assert self.pool.counts() == self.model.counts()
        assert self.pool.num_free_blocks == self.model.num_free_blocks
        assert self.pool.counts().total == self.num_usable

    @invariant()
    def blocks_agree(self) -> None:
        """Every block has the key and the generation that the contract says."""
        ids = np.arange(1, self.pool.num_blocks, dtype=np.int32)
        assert self.pool.keys(ids) == self.model.keys(ids)
        assert self.pool.generation(ids).tolist() == self.model.generation(ids).tolist()
        assert self.pool.num_evictable(ids) == self.model.num_evictable(ids)
        for chain in CHAINS:
            for start in range(len(chain)):
                self._same("lookup", chain[start:])
                self._same("lookup", (*chain[:start], b"unknown", *chain[start:]))

    @invariant()
    def holds_agree(self) -> None:
        """The pool knows the holds that have not ended, oldest first."""
        assert [_plain(h) for h in self.pool.holds()] == [_plain(h) for h in self.model.holds()]

    @invariant()
    def fingerprints_tell_states_apart(self) -> None:
        """Two states that the contract tells apart have different fingerprints."""
        if self.exact_order:
            expected = self.seen.setdefault(self.pool.fingerprint(), self.model.fingerprint())
            assert expected == self.model.fingerprint(), "one fingerprint stands for two states"

    @invariant()
    def listeners_agree(self) -> None:
        """Who subscribed was told of each block that was committed, once, with its key."""
        told, expected = map(sorted, self.told)
        assert told == expected, "subscribers were told of other blocks"

    @invariant()
    def mirror_keeps_up(self) -> None:
        """As `read_events`, after every call."""
        if self.reads_always:
            self.read_events()

    @rule()
    def read_events(self) -> None:
        """A mirror that follows the events holds what is committed, and nothing else."""
        if not self.with_events:
            return
        for event in self.pool.events():
            if isinstance(event, CacheCleared):
                self.mirror.clear()
            elif isinstance(event, BlockRemoved):
                assert self.mirror.pop(event.block_id, (None, None))[0] == event.key, event
            elif isinstance(event, BlockStored):
                assert event.block_id not in self.mirror, event
                self.mirror[event.block_id] = (event.key, event.parent_key)
        assert self.mirror == self.model.stored()

    def teardown(self) -> None:
        self.read_events()

    # How it compares.

    @property
    def num_usable(self) -> int:
        return self.pool.num_blocks - 1

    def _same(self, method: str, *args: Any, **kwargs: Any) -> tuple[Any, Any] | None:
        """Call both; return both results when neither raised, and None when both did."""
        refusal: type[BlockError] | None = None
        expected: Any = None
        try:
            expected = getattr(self.model, method)(*args, **kwargs)
        except BlockError as error:
            refusal = type(error)
        if refusal is not None:
            self._refuses(refusal, method, *args, **kwargs)
            return None
        found = getattr(self.pool, method)(*args, **kwargs)
        assert _comparable(found) == _comparable(expected), f"{method}{args}{kwargs or ''}"
        return found, expected

    def _refuses(self, error: type[BlockError], method: str, *args: Any, **kwargs: Any) -> None:
        call = f"{method}{args}{kwargs or ''}"
        before = self.pool.fingerprint()
        try:
            found = getattr(self.pool, method)(*args, **kwargs)
        except error:
            found = error
        assert found is error, f"{call} gave {found}; expected it to raise {error.__name__}"
        assert self.pool.fingerprint() == before, f"{call} raised and changed the pool"

    def _refuses_each(self, method: str, blocks: list[int]) -> None:
        """One bad block spoils the call, in company of good ones as well."""
        good = [b for b, n in enumerate(self.model._state.num_refs) if n][:1]
        for block in blocks:
            self._refuses(BlockMisuse, method, block_array([*good, block]))

    def _refuses_hold(self, blocks: list[int]) -> None:
        reason = HoldReason.SEND
        self._refuses(BlockMisuse, "hold", block_array(blocks), owner="owner", reason=reason)

    def _hold(
        self, blocks: BlockIds, owner: str, reason: HoldReason, deadline: float | None
    ) -> None:
        outcome = self._same("hold", blocks, owner=owner, reason=reason, deadline=deadline)
        if outcome is not None:
            self.live_holds.append(outcome)

    def _release_hold(self, place: int) -> None:
        pool_hold, model_hold = self.live_holds.pop(place)
        self.pool.release_hold(pool_hold)
        self.model.release_hold(model_hold)
        self._refuses(BlockMisuse, "release_hold", pool_hold)

    def _allocate(self, n: int) -> None:
        if n > self.model.num_free_blocks:
            self._refuses(OutOfBlocks, "allocate", n)
        elif self.exact_order:
            self._same("allocate", n)
        else:
            self._adopt(self.pool.allocate(n), n)

    def _adopt(self, ids: BlockIds, n: int) -> None:
        """Follow the choice of a pool that has an order of its own."""
        classes = self.model.blocks_by_class()
        blocks = ids.tolist()
        assert len(blocks) == len(set(blocks)) == n
        assert set(blocks) <= {*classes["free"], *classes["evictable"]}
        num_evicted = len(set(blocks) & set(classes["evictable"]))
        assert num_evicted == max(0, n - len(classes["free"])), "free blocks go first"
        self.model.take(blocks)

    def _publish(self, data: st.DataObject, blocks: list[int]) -> None:
        chain = data.draw(st.sampled_from(CHAINS), label="chain")
        start = data.draw(st.integers(0, len(chain) - 1), label="start")
        most = min(len(blocks), len(chain) - start)
        n = data.draw(st.integers(min(1, most), most), label="n")
        parents = None if start == 0 else chain[start - 1 : start + n - 1]
        keys = chain[start : start + n]
        self._same("publish", block_array(blocks[:n]), keys, self.step, parents=parents)

    def _plain_blocks(self) -> list[int]:
        """Blocks that may get a key."""
        owned = self.model.blocks_by_class()["owned"]
        return [block for block in owned if self.model.keys(block_array([block])) == [None]]

    def _draw(self, data: st.DataObject, blocks: list[int]) -> BlockIds:
        lists = st.lists(st.sampled_from(blocks), max_size=4)
        return block_array(data.draw(lists, label="blocks"))

    def _was_held(self, hold: Hold) -> bool:
        """Whether a hold was there when the newest step began."""
        return any(saved is hold for saved, _ in self.saved_holds)


def block_array(blocks: Sequence[int]) -> BlockIds:
    """Blocks as a pool takes them."""
    return np.array(blocks, dtype=np.int32)


def _plain(hold: Hold) -> tuple[Any, ...]:
    return (hold.owner, hold.reason, hold.deadline, hold.block_ids.tolist())


def _comparable(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        assert value.dtype == np.int32, f"block ids are int32, not {value.dtype}"
        return value.tolist()
    return _plain(value) if isinstance(value, Hold) else value
