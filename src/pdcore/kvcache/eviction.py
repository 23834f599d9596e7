"""Which cached block goes first when the pool runs out of free ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pdcore.masks import all_set

__all__ = ["EvictionOrder", "LRUOrder"]

Blocks = npt.NDArray[np.intp]
Undo = Callable[[], None]

_NO_BLOCKS = np.zeros(0, np.intp)
_LEAST_CAPACITY = 64
_LEAST_RUN = 8
"""Entries that are looked at together at least, since some may be stale."""


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
        """Take out the ``n`` blocks that go first; there are at least so many.

        The array is the caller's from then on: nobody changes it.
        """

    @abstractmethod
    def contains(self, ids: Blocks) -> npt.NDArray[np.bool_]:
        """Which of the blocks are in the order."""

    @abstractmethod
    def ids(self) -> Blocks:
        """All of them, the one that goes first in front. Cost: O(length)."""


class LRUOrder(EvictionOrder):
    """Least recently released first.

    A ring of block ids, with each block's place in the ring beside it. A block that leaves from the
    middle only forgets its place; the stale entry is passed over later. The ring grows with what is
    in it. Every change costs amortised O(1) a block and a fixed number of array operations.
    """

    def __init__(self, num_blocks: int) -> None:
        self._ring = np.zeros(_LEAST_CAPACITY, np.int32)
        self._mask = self._ring.size - 1
        # 0, 1, 2, ...: slices of it save making a range each time.
        self._places = np.arange(_LEAST_CAPACITY, dtype=np.int32)
        # Of blocks that are not in the order: -1.
        self._place = np.full(num_blocks, -1, np.int32)
        # Both only go up; the place of an entry is its number within the ring's size.
        self._head = 0
        self._tail = 0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, ids: Blocks) -> Undo:
        undo_compaction = self._make_room(ids.size)
        tail, start = self._tail, self._tail & self._mask
        end = start + ids.size
        if end <= self._ring.size:
            places = self._places[start:end]
            self._ring[start:end] = ids
        else:
            places = np.arange(start, end, dtype=np.int32) & self._mask
            self._ring[places] = ids
        self._place[ids] = places
        self._tail += ids.size
        self._length += ids.size

        def undo() -> None:
            self._place[ids] = -1
            self._tail = tail
            self._length -= ids.size
            if undo_compaction is not None:
                undo_compaction()

        return undo

    def discard(self, ids: Blocks) -> Undo:
        places = self._place[ids]
        self._place[ids] = -1
        self._length -= ids.size
        return lambda: self._put_back(ids, places, self._head)

    def pop(self, n: int) -> tuple[Blocks, Undo]:
        head = self._head
        found: list[Blocks] = []
        missing = n
        while missing and self._head < self._tail:
            candidates, is_live = self._entries(self._head, max(missing, _LEAST_RUN))
            if all_set(is_live):
                live = candidates[:missing]
                num_seen = live.size
            else:
                at = is_live.nonzero()[0][:missing]
                live = candidates[at]
                num_seen = candidates.size if live.size < missing else int(at[-1]) + 1
            found.append(live)
            missing -= live.size
            self._head += num_seen
        ids = found[0] if len(found) == 1 else np.concatenate(found or [_NO_BLOCKS])
        places = self._place[ids]
        self._place[ids] = -1
        self._length -= ids.size
        return ids, lambda: self._put_back(ids, places, head)

    def contains(self, ids: Blocks) -> npt.NDArray[np.bool_]:
        contained: npt.NDArray[np.bool_] = self._place[ids] >= 0
        return contained

    def ids(self) -> Blocks:
        live = [_NO_BLOCKS]
        start = self._head
        while start < self._tail:
            candidates, is_live = self._entries(start, self._tail - start)
            live.append(candidates[is_live])
            start += candidates.size
        return np.concatenate(live)

    def _entries(self, start: int, n: int) -> tuple[Blocks, npt.NDArray[np.bool_]]:
        """A run of at most ``n`` entries, up to the ring's end: blocks, and which are not stale."""
        first = start & self._mask
        end = min(first + n, self._ring.size, first + self._tail - start)
        candidates = self._ring[first:end].astype(np.intp)
        return candidates, self._place[candidates] == self._places[first:end]

    def _put_back(self, ids: Blocks, places: npt.NDArray[np.int32], head: int) -> None:
        # The ring's entries may have been reused since, so the ids are written again.
        self._ring[places] = ids
        self._place[ids] = places
        self._head = head
        self._length += ids.size

    def _make_room(self, n: int) -> Undo | None:
        """Make a new ring, without the stale entries, when this one has no room for ``n`` more."""
        if self._tail - self._head + n <= self._ring.size:
            return None
        live = self.ids()
        before = (self._ring, self._mask, self._head, self._tail)
        places = self._place[live]
        capacity = 1 << (2 * (live.size + n) - 1).bit_length()
        self._ring = np.zeros(max(capacity, _LEAST_CAPACITY), np.int32)
        self._mask = self._ring.size - 1
        if self._places.size < self._ring.size:
            self._places = np.arange(self._ring.size, dtype=np.int32)
        self._head, self._tail = 0, live.size
        self._ring[: live.size] = live
        self._place[live] = self._places[: live.size]

        def undo() -> None:
            self._ring, self._mask, self._head, self._tail = before
            self._place[live] = places

        return undo
