"""Which cached block goes first when the pool runs out of free ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

__all__ = ["EvictionOrder", "LRUOrder"]

Blocks = npt.NDArray[np.intp]
Undo = Callable[[], None]


class EvictionOrder(ABC):
    """The evictable blocks, in the order in which they go.

    Blocks are given and returned as arrays of `numpy.intp`. Each change returns a function that
    undoes it, given that every later change was undone before.
    """

    @abstractmethod
    def __len__(self) -> int:
        """How many blocks are evictable."""

    @abstractmethod
    def append(self, ids: Blocks) -> Undo:
        """Blocks without an owner, just released: the first in ``ids`` goes before the others."""

    @abstractmethod
    def discard(self, ids: Blocks) -> Undo:
        """Blocks of the order that got an owner again, or lost their key."""

    @abstractmethod
    def pop(self, n: int) -> tuple[Blocks, Undo]:
        """Take out the ``n`` blocks that go first; there are at least so many."""

    @abstractmethod
    def contains(self, ids: Blocks) -> npt.NDArray[np.bool_]:
        """Which of the blocks are in the order."""

    @abstractmethod
    def ids(self) -> Blocks:
        """All of them, the one that goes first in front. Cost: O(length)."""


class LRUOrder(EvictionOrder):
    """Least recently released first.

    A ring of block ids with each block's position beside it. A block that leaves from the middle
    only forgets its position; the stale entry is passed over later. Every change costs amortised
    O(1) a block and a fixed number of array operations.
    """

    def __init__(self, num_blocks: int) -> None:
        capacity = 1 << (2 * int(num_blocks) - 1).bit_length()
        self._mask = capacity - 1
        self._ring = np.zeros(capacity, np.int32)
        self._position = np.full(num_blocks, -1, np.int64)
        self._head = 0
        self._tail = 0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, ids: Blocks) -> Undo:
        undo_compaction = self._make_room(ids.size)
        tail = self._tail
        positions = np.arange(tail, tail + ids.size)
        start = tail & self._mask
        if start + ids.size <= self._ring.size:
            self._ring[start : start + ids.size] = ids
        else:
            self._ring[positions & self._mask] = ids
        self._position[ids] = positions
        self._tail += ids.size
        self._length += ids.size

        def undo() -> None:
            self._position[ids] = -1
            self._tail = tail
            self._length -= ids.size
            if undo_compaction is not None:
                undo_compaction()

        return undo

    def discard(self, ids: Blocks) -> Undo:
        positions = self._position[ids]
        self._position[ids] = -1
        self._length -= ids.size
        return lambda: self._put_back(ids, positions, self._head)

    def pop(self, n: int) -> tuple[Blocks, Undo]:
        head = self._head
        found: list[Blocks] = []
        missing = n
        while missing:
            window = np.arange(self._head, min(self._head + max(missing, 8), self._tail))
            candidates = self._ring[window & self._mask].astype(np.intp)
            live = np.flatnonzero(self._position[candidates] == window)[:missing]
            found.append(candidates[live])
            missing -= live.size
            self._head = int(window[-1 if missing else live[-1]]) + 1
        ids = found[0] if len(found) == 1 else np.concatenate(found)
        positions = self._position[ids]
        self._position[ids] = -1
        self._length -= n
        return ids, lambda: self._put_back(ids, positions, head)

    def contains(self, ids: Blocks) -> npt.NDArray[np.bool_]:
        contained: npt.NDArray[np.bool_] = self._position[ids] >= 0
        return contained

    def ids(self) -> Blocks:
        window = np.arange(self._head, self._tail)
        candidates = self._ring[window & self._mask].astype(np.intp)
        live: Blocks = candidates[self._position[candidates] == window]
        return live

    def _put_back(self, ids: Blocks, positions: npt.NDArray[np.int64], head: int) -> None:
        # The ring's slots may have been reused since, so the ids are written again.
        self._ring[positions & self._mask] = ids
        self._position[ids] = positions
        self._head = head
        self._length += ids.size

    def _make_room(self, n: int) -> Undo | None:
        """Drop the stale entries when the ring has no room for ``n`` more."""
        if self._tail - self._head + n <= self._ring.size:
            return None
        before = (self._ring.copy(), self._position.copy(), self._head, self._tail)
        live = self.ids()
        self._head = self._tail
        self._tail += live.size
        positions = np.arange(self._head, self._tail)
        self._ring[positions & self._mask] = live
        self._position[live] = positions

        def undo() -> None:
            self._ring, self._position, self._head, self._tail = before

        return undo
