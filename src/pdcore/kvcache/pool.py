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
from pdcore.kvcache.holds import Hold, HoldReason
from pdcore.kvcache.keys import BlockKeys
from pdcore.masks import all_set, any_set

__all__ = ["LRUBlockPool"]

BlockIds = npt.NDArray[np.int32]

_NULL_REFS = 1 << 30


class LRUBlockPool(BlockPool):
    """A `BlockPool` that evicts the least recently released prefix.

    Every call costs a fixed number of array operations, plus a dictionary operation or two for each
    key that is published, found or dropped. A pool takes about 50 bytes a block.

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
        self._num_refs = np.zeros(num_blocks, np.int32)
        # So many that it never counts as given back, however often it is released.
        self._num_refs[0] = _NULL_REFS
        self._num_holds = np.zeros(num_blocks, np.int32)
        self._num_quarantines = np.zeros(num_blocks, np.int32)
        self._generation = np.zeros(num_blocks, np.int64)
        self._keys = BlockKeys(num_blocks, enable_events=enable_events)
        # Popped from the end, so that a new pool hands out 1, 2, 3, ...
        self._free = np.arange(num_blocks - 1, 0, -1, dtype=np.int32)
        self._num_free = num_blocks - 1
        self._evictable = LRUOrder(num_blocks) if eviction is None else eviction
        self._scratch = np.zeros(num_blocks, np.int32)
        self._holds: dict[int, Hold] = {}
        self._num_holds_made = 0
        self._step: int | None = None
        self._undo: list[Callable[[], None]] = []

    @property
    def num_free_blocks(self) -> int:
        return self._num_free + len(self._evictable)

    def allocate(self, n: int) -> BlockIds:
        if not isinstance(n, int | np.integer) or n < 0:
            raise BlockMisuse(f"allocate({n!r}): pass how many blocks, an integer >= 0")
        num_plain = self._num_free
        if n > num_plain:
            if n > self.num_free_blocks:
                raise OutOfBlocks(n, self.num_free_blocks)
            # Evicting comes first: an eviction order of somebody else's may raise.
            evicted = self._evict(n - num_plain)
            ids = np.concatenate((self._pop_free(num_plain), evicted))
        else:
            ids = self._pop_free(n)
        self._num_refs[ids] = 1
        self._generation[ids] += 1
        if self._step is not None:
            self._undo.append(lambda: self._num_refs.__setitem__(ids, 0))
        return ids

    def retain(self, ids: BlockIds) -> None:
        ids = self._in_range(ids)
        if not all_set(self._num_refs[ids] > 0):
            ownerless = self._ownerless(ids)
            if not all_set(self._evictable.contains(ownerless)):
                raise BlockMisuse(
                    f"retain({ids.tolist()}): a free block cannot be retained, only allocated"
                )
            self._record(self._evictable.discard(ownerless))
        self._add_refs(ids)
        self._record(lambda: self._take_refs_back(ids))

    def release(self, ids: BlockIds) -> None:
        ids = self._in_range(ids)
        if self._drop_refs(ids):
            self._give_back(self._ownerless(ids))

    def release_each(self, groups: Sequence[BlockIds]) -> None:
        if len(groups) < 2:
            for group in groups:
                self.release(group)
            return
        ids = self._in_range(np.concatenate(groups))
        if self._drop_refs(ids):
            loose = self._ownerless(ids)
            keyed = self._keys.is_keyed[loose]
            self._give_back(loose[keyed])
            plain = loose[~keyed]
            if plain.size:
                # The group released last is reused first; within a group, the order stays.
                group_of = np.repeat(np.arange(len(groups)), [group.size for group in groups])
                self._scratch[ids] = group_of
                self._give_back(plain[np.argsort(-self._scratch[plain], kind="stable")])

    def lookup(self, keys: Sequence[bytes]) -> BlockIds:
        return np.array(self._keys.lookup(keys), np.int32)

    def num_evictable(self, ids: BlockIds) -> int:
        return int(np.count_nonzero(self._evictable.contains(ids)))

    def publish(
        self,
        ids: BlockIds,
        keys: Sequence[bytes],
        step: int,
        *,
        parents: Sequence[bytes | None] | None = None,
    ) -> None:
        ids = self._in_range(ids)
        if ids.size != len(keys):
            raise BlockMisuse(f"publish() got {ids.size} blocks and {len(keys)} keys")
        blocks = dict.fromkeys(ids.tolist())
        if len(blocks) != ids.size:
            raise BlockMisuse(f"publish({ids.tolist()}) names a block twice: each gets one key")
        owned = self._num_refs[ids] > 0
        if self._holds:
            owned |= self._num_holds[ids] > 0
        if not all_set(owned) or any_set(self._keys.is_keyed[ids]) or 0 in blocks:
            unfit = ids[~owned | self._keys.is_keyed[ids] | (ids == 0)]
            raise BlockMisuse(
                f"blocks {unfit.tolist()} cannot be published: they have a key or no owner"
            )
        self._keys.publish(ids, blocks, keys, step, parents)
        self._record(lambda: self._unpublish(ids))

    def begin(self, step: int) -> None:
        self._step = step
        self._undo.clear()

    def commit(self, step: int) -> None:
        if step == self._step:
            self._step = None
            self._undo.clear()
        self._keys.commit(step)

    def withdraw(self, step: int, ids: BlockIds | None = None) -> None:
        blocks = self._keys.provisional(step)
        if ids is not None:
            provisional = set(blocks)
            blocks = [block for block in ids.tolist() if block in provisional]
        if not blocks:
            return
        array = np.array(blocks, np.int32)
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
        ids = np.array(ids, np.int32)
        inside = ids.size and ids.min() > 0 and ids.max() < self.num_blocks
        if not inside or self._distinct(ids).size != ids.size:
            raise BlockMisuse(
                f"hold({ids.tolist()}): needs distinct blocks in 1..{self.num_blocks}"
            )
        ownerless = self._ownerless(ids)
        if not all_set(self._evictable.contains(ownerless)):
            raise BlockMisuse(f"hold({ids.tolist()}): a free block cannot be held")
        self._record(self._evictable.discard(ownerless))
        self._num_holds_made += 1
        hold = Hold(
            hold_id=self._num_holds_made,
            block_ids=ids,
            owner=owner,
            reason=reason,
            deadline=deadline,
        )
        self._add_hold(hold, 1)
        self._record(lambda: self._add_hold(hold, -1))
        return hold

    def release_hold(self, hold: Hold) -> None:
        if self._holds.get(hold.hold_id) is not hold:
            raise BlockMisuse(f"the hold of {hold.owner!r} on {hold.block_ids.tolist()} has ended")
        self._add_hold(hold, -1)
        self._record(lambda: self._add_hold(hold, 1))
        self._give_back(self._ownerless(hold.block_ids[::-1]))

    def holds(self) -> tuple[Hold, ...]:
        return tuple(self._holds[hold_id] for hold_id in sorted(self._holds))

    def generation(self, ids: BlockIds) -> npt.NDArray[np.int64]:
        return self._generation[ids]

    def keys(self, ids: BlockIds) -> list[bytes | None]:
        return self._keys.of(ids)

    def counts(self) -> BlockCounts:
        referenced = self._num_refs > 0
        referenced[0] = False
        quarantined = ~referenced & (self._num_quarantines > 0)
        held = ~referenced & (self._num_holds > 0) & ~quarantined
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
        faults = {
            f"the classes add up to {counts.total}, not {self.num_usable_blocks}: {counts}": (
                counts.total != self.num_usable_blocks
            ),
            "a block is free or evictable twice, or is the null block": (
                np.bincount(np.concatenate((free, evictable, [0])), minlength=1).max() > 1
            ),
            "a free or evictable block has an owner": bool(
                (self._num_refs[free] + self._num_holds[free]).any()
                or (self._num_refs[evictable] + self._num_holds[evictable]).any()
            ),
            "a count is negative": bool(
                min(self._num_refs.min(), self._num_holds.min(), self._num_quarantines.min()) < 0
            ),
            "a free block has a key": bool(is_keyed[free].any()),
            "an evictable block has no key": not is_keyed[evictable].all(),
            "the index and the blocks' keys differ": not self._keys.is_consistent(),
            "the length of the eviction order is wrong": len(self._evictable) != evictable.size,
            "the null block has an owner or a key": bool(
                self._num_refs[0] != _NULL_REFS or self._num_holds[0] or is_keyed[0]
            ),
        }
        broken = [fault for fault, present in faults.items() if present]
        if broken:
            raise InvariantBroken("; ".join(broken))

    def fingerprint(self) -> bytes:
        digest = hashlib.blake2b(digest_size=16)
        for array in (
            self._free[: self._num_free],
            self._evictable.ids(),
            self._num_refs,
            self._num_holds,
            self._num_quarantines,
        ):
            digest.update(array.tobytes())
        digest.update(self._keys.fingerprint())
        return digest.digest()

    def _record(self, undo: Callable[[], None]) -> None:
        if self._step is not None:
            self._undo.append(undo)

    def _in_range(self, ids: BlockIds) -> BlockIds:
        ids = np.asarray(ids, np.int32)
        # Seen without a sign, a negative number is out of range at the other end.
        if any_set(ids.view(np.uint32) >= self.num_blocks):
            raise BlockMisuse(f"blocks {ids.tolist()} are not all in 0..{self.num_blocks - 1}")
        return ids

    def _add_refs(self, ids: BlockIds) -> None:
        if self._are_distinct(ids):
            self._num_refs[ids] += 1
        else:
            np.add.at(self._num_refs, ids, 1)
        self._num_refs[0] = _NULL_REFS

    def _take_refs_back(self, ids: BlockIds) -> None:
        np.subtract.at(self._num_refs, ids, 1)
        self._num_refs[0] = _NULL_REFS

    def _drop_refs(self, ids: BlockIds) -> bool:
        """Drop a reference for each mention; return whether a block has none left."""
        num_refs = self._num_refs
        before = num_refs[ids]
        if self._are_distinct(ids):
            left = before - 1
            num_refs[ids] = left
        else:
            np.subtract.at(num_refs, ids, 1)
            left = num_refs[ids]
        if any_set(left < 0):
            num_refs[ids] = before
            raise BlockMisuse(
                f"release({ids.tolist()}): blocks {ids[left < 0].tolist()} have fewer references "
                "than that. Each retain or allocate allows one release."
            )
        num_refs[0] = _NULL_REFS
        self._record(lambda: self._add_refs(ids))
        return any_set(left == 0)

    def _ownerless(self, ids: BlockIds) -> BlockIds:
        """Those without a reference or a hold, each once, in the order of their last mention."""
        ownerless = self._num_refs[ids] == 0
        if self._holds:
            ownerless &= self._num_holds[ids] == 0
        return self._distinct(ids if all_set(ownerless) else ids[ownerless])

    def _distinct(self, ids: BlockIds) -> BlockIds:
        """Drop all but the last mention of each block, keeping the order."""
        return ids if self._are_distinct(ids) else ids[self._last_mentions(ids)]

    def _are_distinct(self, ids: BlockIds) -> bool:
        return ids.size < 2 or all_set(self._last_mentions(ids))

    def _last_mentions(self, ids: BlockIds) -> npt.NDArray[np.bool_]:
        places = np.arange(ids.size, dtype=np.int32)
        self._scratch[ids] = places
        last: npt.NDArray[np.bool_] = self._scratch[ids] == places
        return last

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

    def _evict(self, n: int) -> BlockIds:
        ids, undo = self._evictable.pop(n)
        self._record(undo)
        self._record(self._keys.forget(ids))
        return ids

    def _give_back(self, ids: BlockIds) -> None:
        """Blocks that just lost their last owner become evictable, or free without a key."""
        if not ids.size:
            return
        keyed = self._keys.is_keyed[ids]
        if any_set(keyed):
            self._record(self._evictable.append(ids if all_set(keyed) else ids[keyed]))
        if not all_set(keyed):
            plain = ids[~keyed]
            top = self._num_free
            self._num_free = top + plain.size
            self._free[top : self._num_free] = plain[::-1]
            self._record(lambda: setattr(self, "_num_free", top))

    def _unpublish(self, ids: BlockIds) -> None:
        self._keys.forget(ids[::-1])

    def _add_hold(self, hold: Hold, sign: int) -> None:
        self._num_holds[hold.block_ids] += sign
        if hold.reason is HoldReason.QUARANTINE:
            self._num_quarantines[hold.block_ids] += sign
        if sign > 0:
            self._holds[hold.hold_id] = hold
        else:
            del self._holds[hold.hold_id]
