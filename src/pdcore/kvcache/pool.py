"""The reference block pool: arrays for owners, a stack of free blocks, an LRU of cached ones."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import numpy.typing as npt

from pdcore.errors import BlockMisuse, InvariantBroken, OutOfBlocks
from pdcore.kvcache.base import BlockCounts, BlockPool
from pdcore.kvcache.events import KVEvent
from pdcore.kvcache.eviction import EvictionOrder, LRUOrder
from pdcore.kvcache.holds import Hold, HoldBook, HoldReason
from pdcore.kvcache.keys import BlockKeys
from pdcore.kvcache.references import References
from pdcore.masks import all_set, any_set

__all__ = ["LRUBlockPool"]

BlockIds = npt.NDArray[np.int32]
Blocks = npt.NDArray[np.intp]

# An array, since numpy adds it faster than one of Python's integers.
_ONE = np.array(1, np.uint32)
_NO_BLOCKS = np.zeros(0, np.int32)
# Named, since `int | np.integer` is made anew wherever it is written.
_INTEGERS = (int, np.integer)


class LRUBlockPool(BlockPool):
    """A `BlockPool` that evicts the least recently released prefix.

    Every call costs a fixed number of array operations, plus a dictionary operation or two for each
    key that is published, found or dropped. A pool takes about 25 bytes a block; the
    order of eviction and the index grow with what is cached.

    Args:
        num_blocks: how many blocks there are, the null block included; at least 2.
        block_size: tokens in a block.
        eviction: the order in which cached blocks go; `LRUOrder` when None.
        enable_events: whether `events` reports changes; without it, it is always empty.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        eviction: EvictionOrder | None = None,
        enable_events: bool = False,
    ) -> None:
        super().__init__(num_blocks, block_size)
        self._end = np.array(num_blocks, np.uintp)
        self._refs = References(num_blocks)
        # Begins anew after 2**32, which no ticket lives to see.
        self._generation = np.zeros(num_blocks, np.uint32)
        self.reports_events = enable_events
        self._keys = BlockKeys(num_blocks, enable_events=enable_events)
        # Popped from the end, so that a new pool hands out 1, 2, 3, ...
        self._free = np.arange(num_blocks - 1, 0, -1, dtype=np.int32)
        self._num_free = num_blocks - 1
        self._evictable = LRUOrder(num_blocks) if eviction is None else eviction
        self._holds = HoldBook(num_blocks)
        self._step: int | None = None
        self._undo: list[Callable[[], None]] = []

    @property
    def num_free_blocks(self) -> int:
        return self._num_free + len(self._evictable)

    def allocate(self, n: int) -> BlockIds:
        if not isinstance(n, _INTEGERS) or n < 0:
            raise BlockMisuse(f"allocate({n!r}): pass how many blocks, an integer >= 0")
        n, num_plain = int(n), self._num_free
        if n <= num_plain:
            ids = self._pop_free(n)
            at = ids.astype(np.intp)
        else:
            if n > self.num_free_blocks:
                raise OutOfBlocks(n, self.num_free_blocks)
            # Evicting comes first: an eviction order of somebody else's may raise.
            at = self._evict(n - num_plain)
            if num_plain:
                at = np.concatenate((self._pop_free(num_plain), at))
            ids = at.astype(np.int32)
        self._refs.give(at)
        self._generation[at] += _ONE
        if self._step is not None:
            self._undo.append(lambda: self._refs.take(at))
        return ids

    def retain(self, ids: BlockIds) -> None:
        at = self._in_range(ids)
        if not all_set(self._refs.are_referenced(at)):
            ownerless = self._ownerless(at)
            if not all_set(self._evictable.contains(ownerless)):
                raise BlockMisuse(
                    f"retain({ids.tolist()}): a free block cannot be retained, only allocated"
                )
            self._record(self._evictable.discard(ownerless))
        self._refs.add(at)
        self._record(lambda: self._refs.remove(at))

    def release(self, ids: BlockIds) -> None:
        at = self._in_range(ids)
        loose = self._drop_refs(at)
        self._give_back(at if all_set(loose) else at[loose])

    def release_each(self, groups: Sequence[BlockIds]) -> None:
        if len(groups) < 2:
            for group in groups:
                self.release(group)
            return
        at = self._in_range(np.concatenate(groups))
        loose = self._drop_refs(at)
        keyed = self._keys.is_keyed[at]
        kept, plain = loose & keyed, loose & ~keyed
        if any_set(kept):
            self._record(self._evictable.append(at[kept]))
        if any_set(plain):
            # The group released last is reused first; within a group, the order stays.
            sizes = [group.size for group in groups]
            age = np.arange(len(groups), 0, -1).repeat(sizes)[plain]
            self._push_free(at[plain][age.argsort(kind="stable")])

    def lookup(self, keys: Sequence[bytes]) -> BlockIds:
        blocks = self._keys.lookup(keys)
        return np.array(blocks, np.int32) if blocks else _NO_BLOCKS

    def num_evictable(self, ids: BlockIds) -> int:
        return int(np.count_nonzero(self._evictable.contains(ids.astype(np.intp))))

    def publish(
        self,
        ids: BlockIds,
        keys: Sequence[bytes],
        step: int,
        *,
        parents: Sequence[bytes | None] | None = None,
    ) -> None:
        at = self._in_range(ids)
        if at.size != len(keys):
            raise BlockMisuse(f"publish() got {at.size} blocks and {len(keys)} keys")
        blocks = dict.fromkeys(at.tolist())
        if not set(map(type, keys)) <= {bytes}:
            raise BlockMisuse("publish() got keys that are not all bytes")
        if parents is not None and len(parents) != at.size:
            raise BlockMisuse(f"publish() got {at.size} blocks and {len(parents)} parents")
        if not isinstance(step, _INTEGERS):
            raise BlockMisuse(f"publish() got step={step!r}: pass an integer")
        if len(blocks) != at.size:
            raise BlockMisuse(f"publish({at.tolist()}) names a block twice: each gets one key")
        owned = self._refs.are_referenced(at)
        if self._holds:
            owned |= self._holds.are_held(at)
        if not all_set(owned) or any_set(self._keys.is_keyed[at]) or 0 in blocks:
            unfit = at[~owned | self._keys.is_keyed[at] | (at == 0)]
            raise BlockMisuse(
                f"blocks {unfit.tolist()} cannot be published: they have a key or no owner"
            )
        self._keys.publish(at, blocks, keys, step, parents)
        self._record(lambda: self._unpublish(at))

    def begin(self, step: int) -> None:
        self._step = step
        self._undo.clear()

    def commit(self, step: int) -> None:
        if step == self._step:
            self._step = None
            self._undo.clear()
        committed = self._keys.provisional(step) if self._listeners else []
        self._keys.commit(step)
        self._tell_committed(committed)

    def withdraw(self, step: int, ids: BlockIds | None = None) -> None:
        blocks = self._keys.provisional(step)
        if ids is not None:
            provisional = set(blocks)
            blocks = [block for block in ids.tolist() if block in provisional]
        if not blocks:
            return
        array = np.array(blocks, np.intp)
        self._record(self._keys.forget(array))
        loose = array[self._evictable.contains(array)]
        self._record(self._evictable.discard(loose))
        self._give_back(loose)

    def rollback(self, step: int) -> None:
        if step != self._step:
            raise BlockMisuse(
                f"rollback({step}) comes after begin({self._step}): only the newest step can be "
                "undone exactly"
            )
        while self._undo:
            self._undo.pop()()
        self._step = None

    def hold(
        self,
        ids: BlockIds,
        *,
        owner: Hashable,
        reason: HoldReason,
        deadline: float | None = None,
    ) -> Hold:
        at = self._in_range(ids)
        ids = at.astype(np.int32)
        if not at.size or not at.all() or len(set(at.tolist())) != at.size:
            raise BlockMisuse(
                f"hold({ids.tolist()}): needs distinct blocks in 1..{self.num_blocks - 1}"
            )
        ownerless = self._ownerless(at)
        if not all_set(self._evictable.contains(ownerless)):
            raise BlockMisuse(f"hold({ids.tolist()}): a free block cannot be held")
        self._record(self._evictable.discard(ownerless))
        hold = self._holds.make(ids, owner=owner, reason=reason, deadline=deadline)
        self._holds.add(hold)
        self._record(lambda: self._holds.remove(hold))
        return hold

    def release_hold(self, hold: Hold) -> None:
        if hold not in self._holds:
            raise BlockMisuse(f"the hold of {hold.owner!r} on {hold.block_ids.tolist()} has ended")
        self._holds.remove(hold)
        self._record(lambda: self._holds.add(hold))
        self._give_back(self._ownerless(hold.block_ids[::-1].astype(np.intp)))

    def holds(self) -> tuple[Hold, ...]:
        return self._holds.all()

    def generation(self, ids: BlockIds) -> npt.NDArray[np.int64]:
        return self._generation[ids].astype(np.int64)

    def keys(self, ids: BlockIds) -> list[bytes | None]:
        return self._keys.of(ids)

    def counts(self) -> BlockCounts:
        referenced = self._refs.are_referenced(slice(None))
        referenced[0] = False
        held = quarantined = np.zeros(0, np.bool_)
        if self._holds:
            quarantined = ~referenced & self._holds.are_quarantined()
            held = ~referenced & self._holds.are_held(slice(None)) & ~quarantined
        return BlockCounts(
            free=self._num_free,
            evictable=len(self._evictable),
            referenced=int(np.count_nonzero(referenced)),
            held=int(np.count_nonzero(held)),
            quarantined=int(np.count_nonzero(quarantined)),
        )

    def reset(self) -> bool:
        if self.num_free_blocks != self.num_usable_blocks:
            return False
        ids = self._evictable.ids()
        self._keys.clear()
        self._evictable.discard(ids)
        self._undo.clear()
        self._step = None
        self._give_back(ids)
        return True

    def events(self) -> list[KVEvent]:
        return self._keys.take_events()

    def check(self) -> None:
        counts = self.counts()
        free, evictable = self._free[: self._num_free], self._evictable.ids()
        is_keyed = self._keys.is_keyed
        is_owned = self._refs.are_referenced(slice(None))
        if self._holds:
            is_owned |= self._holds.are_held(slice(None))
        faults = {
            f"the classes add up to {counts.total}, not {self.num_usable_blocks}: {counts}": (
                counts.total != self.num_usable_blocks
            ),
            "a block is free or evictable twice, or is the null block": (
                np.bincount(np.concatenate((free, evictable, [0])), minlength=1).max() > 1
            ),
            "a free or evictable block has an owner": bool(
                is_owned[free].any() or is_owned[evictable].any()
            ),
            "the counts of references are wrong": not self._refs.is_consistent(),
            "the blocks' holds are not those there are": not self._holds.is_consistent(),
            "a free block has a key": bool(is_keyed[free].any()),
            "an evictable block has no key": not is_keyed[evictable].all(),
            "the index and the blocks' keys differ": not self._keys.is_consistent(),
            "the length of the eviction order is wrong": len(self._evictable) != evictable.size,
            "the null block has a key": bool(is_keyed[0]),
        }
        broken = [fault for fault, present in faults.items() if present]
        if broken:
            raise InvariantBroken("; ".join(broken))

    def fingerprint(self) -> bytes:
        digest = hashlib.blake2b(digest_size=16)
        for array in (
            self._free[: self._num_free],
            self._evictable.ids(),
            self._refs.counts,
        ):
            digest.update(array.tobytes())
        digest.update(self._holds.fingerprint())
        digest.update(self._keys.fingerprint())
        return digest.digest()

    def _record(self, undo: Callable[[], None]) -> None:
        if self._step is not None:
            self._undo.append(undo)

    def _in_range(self, ids: BlockIds) -> Blocks:
        """Blocks as indices, by which numpy reads columns several times faster."""
        given = np.asarray(ids)
        if given.dtype.kind not in "iu" and given.size:
            raise BlockMisuse(f"blocks {given.tolist()} are not integers")
        at = given.astype(np.intp)
        # Seen without a sign, a negative number is out of range at the other end.
        if any_set(at.view(np.uintp) >= self._end):
            raise BlockMisuse(f"blocks {at.tolist()} are not all in 0..{self.num_blocks - 1}")
        return at

    def _ownerless(self, at: Blocks) -> Blocks:
        """Those without a reference or a hold, each once, in the order of their last mention."""
        ownerless = self._refs.are_missing(at)
        if self._holds:
            ownerless &= ~self._holds.are_held(at)
        return at if all_set(ownerless) else at[ownerless]

    def _drop_refs(self, at: Blocks) -> npt.NDArray[np.bool_]:
        """Drop a reference for each mention; return which are the last of an ownerless block."""
        loose = self._refs.drop(at)
        self._record(lambda: self._refs.add(at))
        if self._holds:
            loose &= ~self._holds.are_held(at)
        return loose

    def _pop_free(self, n: int) -> BlockIds:
        self._num_free -= n
        top = self._num_free
        ids = self._free[top : top + n][::-1].copy()

        def undo() -> None:
            self._free[top : top + n] = ids[::-1]
            self._num_free += n

        if n:
            self._record(undo)
        return ids

    def _evict(self, n: int) -> Blocks:
        at, undo = self._evictable.pop(n)
        if at.size != n:
            undo()
            raise InvariantBroken(
                f"the eviction order's pop({n}) gave {at.size} blocks of {len(self._evictable)}; "
                f"{type(self._evictable).__name__}.pop must give exactly as many as it is asked for"
            )
        self._record(undo)
        self._record(self._keys.forget(at))
        return at

    def _give_back(self, at: Blocks) -> None:
        """Blocks that just lost their last owner become evictable, or free without a key."""
        if not at.size:
            return
        keyed = self._keys.is_keyed[at]
        if any_set(keyed):
            self._record(self._evictable.append(at if all_set(keyed) else at[keyed]))
        if not all_set(keyed):
            self._push_free(at[~keyed])

    def _push_free(self, at: Blocks) -> None:
        """Put blocks on the stack of free ones, the first on top."""
        top = self._num_free
        self._num_free = top + at.size
        self._free[top : self._num_free] = at[::-1]
        self._record(lambda: setattr(self, "_num_free", top))

    def _unpublish(self, at: Blocks) -> None:
        self._keys.forget(at[::-1])
