"""The keys that blocks have, which of them are provisional, and what changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from pdcore.kvcache.events import BlockRemoved, BlockStored, CacheCleared, KVEvent
from pdcore.kvcache.index import PrefixIndex

__all__ = ["BlockKeys"]

BlockIds = npt.NDArray[np.int32]
Blocks = npt.NDArray[np.intp]
Parents = Sequence[bytes | None]


class BlockKeys:
    """Names for the contents of blocks.

    A key is provisional from `publish` until the `commit` of its step; it can be found all the
    while. Events tell of committed keys only. Every change costs a fixed number of array operations
    and about two dictionary operations a key.

    Args:
        num_blocks: how many blocks there are.
        enable_events: whether `take_events` reports changes.
    """

    def __init__(self, num_blocks: int, *, enable_events: bool) -> None:
        self.is_keyed = np.zeros(num_blocks, np.bool_)
        # Empty arrays of objects hold None.
        self._key = np.empty(num_blocks, np.object_)
        # In order of publication: step -> its provisional blocks.
        self._provisional: dict[int, dict[int, None]] = {}
        self._index = PrefixIndex()
        self._parent: dict[int, bytes | None] | None = {} if enable_events else None
        self._events: list[KVEvent] = []

    def lookup(self, keys: Sequence[bytes]) -> list[int]:
        """One block for each key up to the first unknown one."""
        return self._index.lookup(keys)

    def of(self, ids: BlockIds) -> list[bytes | None]:
        """The key of each block, or None."""
        keys: list[bytes | None] = self._key[ids].tolist()
        return keys

    def publish(
        self,
        ids: Blocks,
        blocks: dict[int, None],
        keys: Sequence[bytes],
        step: int,
        parents: Parents | None,
    ) -> None:
        """Give keyless blocks their keys; ``blocks`` are ``ids`` again, each once."""
        if not blocks:
            return
        self._index.add(keys, blocks)
        self._key[ids] = keys
        self.is_keyed[ids] = True
        if step in self._provisional:
            self._provisional[step].update(blocks)
        else:
            self._provisional[step] = blocks
        if self._parent is not None:
            self._parent.update(zip(blocks, parents or (None, *keys[:-1]), strict=True))

    def provisional(self, step: int) -> list[int]:
        """The blocks whose keys are provisional for a step, in order of publication."""
        return list(self._provisional.get(step, ()))

    def commit(self, step: int) -> None:
        """The step's blocks are written."""
        blocks = self._provisional.pop(step, None)
        if not blocks:
            return
        if self._parent is not None:
            keys = self._key[np.fromiter(blocks, np.intp, len(blocks))].tolist()
            self._events += [
                BlockStored(key, self._parent[block], block)
                for block, key in zip(blocks, keys, strict=True)
            ]

    def forget(self, ids: Blocks) -> Callable[[], None]:
        """Drop the keys of distinct blocks that have one; return what undoes it."""
        blocks, keys = ids.tolist(), self._key[ids].tolist()
        entries = self._index.remove(keys, blocks)
        self._key[ids] = None
        self.is_keyed[ids] = False
        pending = self._drop_provisional(blocks)
        written: list[int] = []
        if self._parent is not None:
            unwritten = set().union(*pending.values())
            written = [block for block in blocks if block not in unwritten]
        parents = self._forget_parents(blocks, keys, written)

        def undo() -> None:
            self._index.restore(keys, entries)
            self._key[ids] = keys
            self.is_keyed[ids] = True
            self._provisional.update(pending)
            if self._parent is not None:
                self._parent.update(parents)
                self._take_back_removals(written)

        return undo

    def clear(self) -> None:
        """Drop every key at once."""
        self._key[:] = None
        self.is_keyed[:] = False
        self._provisional.clear()
        self._index.clear()
        if self._parent is not None:
            self._parent.clear()
            self._events.append(CacheCleared())

    def take_events(self) -> list[KVEvent]:
        """What changed since the last call, in order."""
        events, self._events = self._events, []
        return events

    def is_consistent(self) -> bool:
        """Whether blocks, columns and index name the same keys. Cost: O(blocks)."""
        keyed = {block: key for block, key in enumerate(self._key.tolist()) if key is not None}
        indexed = [(block, key) for key, blocks in self._index.items() for block in blocks]
        pending = [block for blocks in self._provisional.values() for block in blocks]
        return (
            sorted(indexed) == sorted(keyed.items())
            and sorted(keyed) == np.flatnonzero(self.is_keyed).tolist()
            and len(set(pending)) == len(pending)
            and keyed.keys() >= set(pending)
            and (self._parent is None or sorted(self._parent) == sorted(keyed))
        )

    def fingerprint(self) -> bytes:
        """All that decides later look-ups and commits."""
        writers = [(step, list(blocks)) for step, blocks in sorted(self._provisional.items())]
        return repr((sorted(self._index.items()), writers)).encode()

    def _drop_provisional(self, blocks: list[int]) -> dict[int, dict[int, None]]:
        """Forget which steps write some blocks; return what was known of those steps."""
        # Whole, since the order of publication counts.
        before = {
            step: held
            for step, held in self._provisional.items()
            if not held.keys().isdisjoint(blocks)
        }
        for step, held in before.items():
            left = held.copy()
            for block in blocks:
                left.pop(block, None)
            self._provisional[step] = left
            if not left:
                del self._provisional[step]
        return before

    def _forget_parents(
        self, blocks: list[int], keys: list[bytes], written: list[int]
    ) -> dict[int, bytes | None]:
        """Report the removal of written blocks; return the parents' keys of all."""
        if self._parent is None:
            return {}
        parents = {block: self._parent.pop(block) for block in blocks}
        key_of = dict(zip(blocks, keys, strict=True))
        self._events += [BlockRemoved(key_of[block], block) for block in written]
        return parents

    def _take_back_removals(self, blocks: list[int]) -> None:
        """Undo the report of removals; if one was read already, report the block as stored."""
        assert self._parent is not None
        for block in reversed(blocks):
            key = self._key[block]
            removal = BlockRemoved(key, block)
            for place in range(len(self._events) - 1, -1, -1):
                if self._events[place] == removal:
                    del self._events[place]
                    break
            else:
                self._events.append(BlockStored(key, self._parent[block], block))
