"""The block pool's contract in its plainest form: slow, short, and easy to believe."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from pdcore.errors import BlockMisuse, InvariantBroken, OutOfBlocks
from pdcore.kvcache.base import BlockCounts, BlockPool
from pdcore.kvcache.events import BlockRemoved, BlockStored, CacheCleared, KVEvent
from pdcore.kvcache.holds import Hold, HoldReason

__all__ = ["NaiveBlockPool", "PoolState"]

BlockIds = npt.NDArray[np.int32]


@attrs.define(eq=False, kw_only=True)
class PoolState:
    """All that `NaiveBlockPool.rollback` brings back.

    Args:
        free: blocks without owner and key; the next one to go is at the end.
        evictable: blocks without owner and with a key; the next one to go is at the front.
        num_refs: references of each block.
        keys: the key of each block that has one.
        parents: the key before it.
        index: the blocks of each key, the first published in front.
        provisional: which step published a key that is not committed.
        holds: by their ids.
    """

    free: list[int]
    evictable: list[int]
    num_refs: list[int]
    keys: dict[int, bytes] = attrs.field(factory=dict)
    parents: dict[int, bytes | None] = attrs.field(factory=dict)
    index: dict[bytes, list[int]] = attrs.field(factory=dict)
    provisional: dict[int, int] = attrs.field(factory=dict)
    holds: dict[int, Hold] = attrs.field(factory=dict)

    def copy(self) -> PoolState:
        return PoolState(
            free=list(self.free),
            evictable=list(self.evictable),
            num_refs=list(self.num_refs),
            keys=dict(self.keys),
            parents=dict(self.parents),
            index={key: list(blocks) for key, blocks in self.index.items()},
            provisional=dict(self.provisional),
            holds=dict(self.holds),
        )


class NaiveBlockPool(BlockPool):
    """A `BlockPool` of lists and dictionaries. `begin` copies everything, `rollback` puts it back.

    `BlockPoolMachine` holds other pools against it. Where the contract leaves an order open, this
    pool's is the reference: blocks that `withdraw` or `reset` make free are reused in the order
    given, published, or evictable, the first of them first.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._state = PoolState(
            free=list(range(num_blocks - 1, 0, -1)), evictable=[], num_refs=[0] * num_blocks
        )
        self._generations = [0] * num_blocks
        self._num_holds_made = 0
        self._saved: tuple[int, PoolState] | None = None
        self._told: dict[int, tuple[bytes, bytes | None]] = {}
        self._was_cleared = False

    @property
    def num_free_blocks(self) -> int:
        return len(self._state.free) + len(self._state.evictable)

    def allocate(self, n: int) -> BlockIds:
        if n > self.num_free_blocks:
            raise OutOfBlocks(n, self.num_free_blocks)
        ids = [self._take_one() for _ in range(n)]
        return np.array(ids, dtype=np.int32)

    def retain(self, ids: BlockIds) -> None:
        blocks = self._real(ids)
        for block in blocks:
            if block in self._state.free:
                raise BlockMisuse(f"retain: block {block} is free; allocate it")
        for block in blocks:
            self._state.num_refs[block] += 1
            self._take_from_evictable(block)

    def release(self, ids: BlockIds) -> None:
        blocks = self._real(ids)
        for block in blocks:
            if blocks.count(block) > self._state.num_refs[block]:
                raise BlockMisuse(
                    f"release: block {block} is mentioned {blocks.count(block)} times and has "
                    f"{self._state.num_refs[block]} references"
                )
        for block in blocks:
            self._state.num_refs[block] -= 1
        self._give_back([b for i, b in enumerate(blocks) if b not in blocks[i + 1 :]])

    def lookup(self, keys: Sequence[bytes]) -> BlockIds:
        found: list[int] = []
        for key in keys:
            if key not in self._state.index:
                break
            found.append(self._state.index[key][0])
        return np.array(found, dtype=np.int32)

    def num_evictable(self, ids: BlockIds) -> int:
        return sum(block in self._state.evictable for block in ids.tolist())

    def publish(
        self,
        ids: BlockIds,
        keys: Sequence[bytes],
        step: int,
        *,
        parents: Sequence[bytes | None] | None = None,
    ) -> None:
        blocks = self._real(ids)
        if len(blocks) != len(keys) or len(set(blocks)) != len(blocks):
            raise BlockMisuse(f"publish: {ids.tolist()} are not {len(keys)} distinct blocks")
        for block in blocks:
            if block in self._state.keys or not self._has_owner(block):
                raise BlockMisuse(f"publish: block {block} has a key already, or no owner")
        if parents is None:
            parents = [None, *keys[:-1]][: len(keys)]
        for block, key, parent in zip(blocks, keys, parents, strict=True):
            self._state.keys[block] = key
            self._state.parents[block] = parent
            self._state.index.setdefault(key, []).append(block)
            self._state.provisional[block] = step

    def begin(self, step: int) -> None:
        self._saved = (step, self._state.copy())

    def commit(self, step: int) -> None:
        committed = list(self._provisional_blocks(step))
        for block in committed:
            del self._state.provisional[block]
        self._tell_committed(committed)

    def withdraw(self, step: int, ids: BlockIds | None = None) -> None:
        published = self._provisional_blocks(step)
        wanted = published if ids is None else ids.tolist()
        blocks = [block for block in wanted if block in published]
        for block in blocks:
            self._drop_key(block)
        self._give_back([block for block in blocks if self._take_from_evictable(block)])

    def rollback(self, step: int) -> None:
        if self._saved is None or self._saved[0] != step:
            raise BlockMisuse(f"rollback: step {step} is not the one that was begun last")
        self._state, self._saved = self._saved[1], None

    def hold(
        self,
        ids: BlockIds,
        *,
        owner: Hashable,
        reason: HoldReason,
        deadline: float | None = None,
    ) -> Hold:
        blocks = self._real(ids)
        if len(blocks) != ids.size or len(set(blocks)) != len(blocks):
            raise BlockMisuse(f"hold: {ids.tolist()} are not distinct blocks")
        if any(block in self._state.free for block in blocks):
            raise BlockMisuse(f"hold: one of the blocks {blocks} is free; allocate it first")
        self._num_holds_made += 1
        hold = Hold(
            hold_id=self._num_holds_made,
            block_ids=ids.copy(),
            owner=owner,
            reason=reason,
            deadline=deadline,
        )
        self._state.holds[hold.hold_id] = hold
        for block in blocks:
            self._take_from_evictable(block)
        return hold

    def release_hold(self, hold: Hold) -> None:
        if self._state.holds.get(hold.hold_id) is not hold:
            raise BlockMisuse(f"release_hold: the hold of {hold.owner!r} ended before")
        del self._state.holds[hold.hold_id]
        self._give_back(hold.block_ids.tolist()[::-1])

    def holds(self) -> tuple[Hold, ...]:
        return tuple(self._state.holds[hold_id] for hold_id in sorted(self._state.holds))

    def generation(self, ids: BlockIds) -> npt.NDArray[np.int64]:
        return np.array([self._generations[block] for block in ids.tolist()], dtype=np.int64)

    def keys(self, ids: BlockIds) -> list[bytes | None]:
        return [self._state.keys.get(block) for block in ids.tolist()]

    def counts(self) -> BlockCounts:
        owned = [block for block in range(1, self.num_blocks) if self._has_owner(block)]
        referenced = [block for block in owned if self._state.num_refs[block]]
        held = [block for block in owned if not self._state.num_refs[block]]
        quarantined = [b for b in held if HoldReason.QUARANTINE in self._hold_reasons(b)]
        return BlockCounts(
            free=len(self._state.free),
            evictable=len(self._state.evictable),
            referenced=len(referenced),
            held=len(held) - len(quarantined),
            quarantined=len(quarantined),
        )

    def reset(self) -> bool:
        if self.num_free_blocks != self.num_usable_blocks:
            return False
        blocks, self._state.evictable = self._state.evictable, []
        for block in blocks:
            self._drop_key(block)
        self._give_back(blocks)
        self._saved = None
        self._was_cleared = True
        self._told.clear()
        return True

    def events(self) -> list[KVEvent]:
        """As promised by `BlockPool`; a change that was undone before anyone asked is not told."""
        final = {
            block: (key, self._state.parents[block])
            for block, key in self._state.keys.items()
            if block not in self._state.provisional
        }
        events: list[KVEvent] = [CacheCleared()] if self._was_cleared else []
        for block, told in self._told.items():
            if final.get(block) != told:
                events.append(BlockRemoved(told[0], block))
        for block, (key, parent) in final.items():
            if self._told.get(block) != (key, parent):
                events.append(BlockStored(key, parent, block))
        self._told, self._was_cleared = final, False
        return events

    def check(self) -> None:
        free, evictable = self._state.free, self._state.evictable
        for block in range(1, self.num_blocks):
            places = free.count(block) + evictable.count(block) + self._has_owner(block)
            if places != 1:
                raise InvariantBroken(f"block {block} is in {places} classes")
            if self._state.num_refs[block] < 0:
                raise InvariantBroken(f"block {block} has {self._state.num_refs[block]} references")
            key = self._state.keys.get(block)
            if (key is None and block in evictable) or (key is not None and block in free):
                raise InvariantBroken(f"block {block} with key {key!r} is in the wrong class")
            if key is not None and block not in self._state.index[key]:
                raise InvariantBroken(f"the index does not lead from {key!r} to block {block}")
        if 0 in free or 0 in evictable or self._state.num_refs[0] or 0 in self._state.keys:
            raise InvariantBroken("the null block is in use")

    def fingerprint(self) -> bytes:
        state = self._state
        reasons = [
            sorted(reason.value for reason in self._hold_reasons(block))
            for block in range(self.num_blocks)
        ]
        parts = (
            state.free,
            state.evictable,
            state.num_refs,
            reasons,
            sorted(state.index.items()),
            sorted(state.provisional.items()),
        )
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()

    def _real(self, ids: BlockIds) -> list[int]:
        """The blocks as numbers, without the null block."""
        blocks: list[int] = ids.tolist()
        if any(not 0 <= block < self.num_blocks for block in blocks):
            raise BlockMisuse(f"blocks {blocks} are not all in 0..{self.num_blocks - 1}")
        return [block for block in blocks if block != 0]

    def _hold_reasons(self, block: int) -> list[HoldReason]:
        return [h.reason for h in self._state.holds.values() if block in h.block_ids.tolist()]

    def _has_owner(self, block: int) -> bool:
        return self._state.num_refs[block] > 0 or bool(self._hold_reasons(block))

    def _take_one(self) -> int:
        return self._take(self._state.free[-1] if self._state.free else self._state.evictable[0])

    def _take(self, block: int) -> int:
        """Hand out one block that is free or evictable."""
        if self._take_from_evictable(block):
            self._drop_key(block)
        else:
            self._state.free.remove(block)
        self._state.num_refs[block] = 1
        self._generations[block] += 1
        return block

    def _take_from_evictable(self, block: int) -> bool:
        if block not in self._state.evictable:
            return False
        self._state.evictable.remove(block)
        return True

    def _give_back(self, blocks: list[int]) -> None:
        """Put blocks without an owner where they belong; the first are to be reused first."""
        loose = [block for block in blocks if not self._has_owner(block)]
        self._state.evictable.extend(block for block in loose if block in self._state.keys)
        self._state.free.extend(b for b in reversed(loose) if b not in self._state.keys)

    def _drop_key(self, block: int) -> None:
        key = self._state.keys.pop(block)
        del self._state.parents[block]
        self._state.provisional.pop(block, None)
        self._state.index[key].remove(block)
        if not self._state.index[key]:
            del self._state.index[key]

    def _provisional_blocks(self, step: int) -> list[int]:
        return [block for block, by in self._state.provisional.items() if by == step]
