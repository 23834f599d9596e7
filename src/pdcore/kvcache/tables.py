"""The block tables of running requests, one row each, as columns of one array."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import attrs
import numpy as np
import numpy.typing as npt

from pdcore.errors import InvariantBroken
from pdcore.kvcache.base import BlockPool
from pdcore.rows import index_of

__all__ = ["BlockTableDelta", "BlockTables"]

BlockIds = npt.NDArray[np.int32]
Rows = npt.NDArray[np.intp]

_NO_BLOCKS = np.zeros(0, np.int32)
_NO_ROWS = np.zeros(0, np.intp)
_Count = TypeVar("_Count", int, npt.NDArray[np.intp])


@attrs.frozen(eq=False)
class BlockTableDelta:
    """Changes to block tables: ``table[rows[i], positions[i]] = ids[i]``."""

    rows: Rows
    positions: Rows
    ids: BlockIds

    @classmethod
    def join(cls, deltas: list[BlockTableDelta]) -> BlockTableDelta:
        """Several changes as one, in order."""
        if not deltas:
            return _NO_DELTA
        if len(deltas) == 1:
            return deltas[0]
        return cls(
            np.concatenate([delta.rows for delta in deltas]),
            np.concatenate([delta.positions for delta in deltas]),
            np.concatenate([delta.ids for delta in deltas]),
        )


_NO_DELTA = BlockTableDelta(_NO_ROWS, _NO_ROWS, _NO_BLOCKS)


class BlockTables:
    """Which blocks each row has, and how many of them have had their keys.

    A decode step for all rows is a few array operations (`grow`). Changes between `begin` and `end`
    can be undone by `rollback`; the pool undoes its own.

    Args:
        pool: where blocks come from.
        sliding_window: how many tokens a token sees, itself included, or None when it sees all.

    Attributes:
        block_table: int32 (rows, blocks).
        num_blocks: int64, how many each row has, those behind a sliding window included.
        num_published: int64, how many of them, from the start, have had their keys.
    """

    def __init__(self, pool: BlockPool, *, sliding_window: int | None) -> None:
        self._pool = pool
        self._sliding_window = sliding_window
        self._block_size = pool.block_size
        # An array, since numpy multiplies by it faster than by one of Python's integers.
        self._block_size_array = np.array(pool.block_size, np.int64)
        # Rows with a key behind a block that lost its own.
        self._with_holes: set[int] = set()
        self._recording = False
        self._undo: list[Callable[[], None]] = []
        self.reserve(0, 0)

    def reserve(self, num_rows: int, num_blocks: int) -> None:
        """Make room for so many tables of so many blocks. All are empty afterwards."""
        self.block_table = np.zeros((num_rows, num_blocks), np.int32)
        self.num_blocks = np.zeros(num_rows, np.int64)
        self.num_published = np.zeros(num_rows, np.int64)
        self._num_pruned = np.zeros(num_rows, np.int64)

    def begin(self) -> None:
        """Start recording."""
        self._recording = True
        self._undo.clear()

    def end(self) -> None:
        """What follows cannot be rolled back."""
        self._recording = False

    def rollback(self) -> None:
        """Undo every change since `begin`."""
        self._recording = False
        while self._undo:
            self._undo.pop()()

    def record(self, undo: Callable[[], None]) -> None:
        """Remember how to undo a change."""
        if self._recording:
            self._undo.append(undo)

    def bind(self, rows: list[int], blocks: list[BlockIds], *, num_published: list[int]) -> None:
        """Give rows their blocks; of each the first ``num_published`` have their keys already."""
        for row, ids, published in zip(rows, blocks, num_published, strict=True):
            self.block_table[row, : ids.size] = ids
            self.num_blocks[row] = ids.size
            self.num_published[row] = published
            if self._sliding_window is not None:
                self._num_pruned[row] = np.count_nonzero(ids == 0)
        if self._with_holes:
            self._with_holes.difference_update(rows)
        self.record(lambda: self._unbind(rows))

    def needed_blocks(self, rows: Rows, num_tokens: Rows) -> Rows:
        """How many blocks each row lacks so that its first ``num_tokens`` tokens have slots."""
        needed = (num_tokens + (self._block_size - 1)) // self._block_size
        needed -= self.num_blocks[rows]
        return np.maximum(needed, 0, out=needed)

    def grow(self, rows: Rows, needed: Rows) -> BlockTableDelta:
        """Add ``needed`` blocks to each row: the decode path. A fixed number of array operations.

        Raises:
            OutOfBlocks: there are not enough for all rows; nothing has changed.
        """
        total = int(needed.sum())
        if not total:
            return _NO_DELTA
        growing = needed > 0
        rows, needed = rows[growing], needed[growing]
        if total == rows.size:
            return self.add_blocks(rows)
        ids = self._pool.allocate(total)
        start = self.num_blocks[rows]
        within = np.arange(total)
        within -= np.repeat(np.cumsum(needed) - needed, needed)
        delta = BlockTableDelta(np.repeat(rows, needed), np.repeat(start, needed) + within, ids)
        self.block_table[delta.rows, delta.positions] = ids
        self.num_blocks[rows] = start + needed
        self.record(lambda: self.num_blocks.__setitem__(rows, start))
        return delta

    def full_rows(self, rows: Rows | slice, num_tokens: Rows) -> npt.NDArray[np.bool_]:
        """Which rows have no slot left behind their first ``num_tokens`` tokens."""
        full: npt.NDArray[np.bool_] = self.num_blocks[rows] * self._block_size_array <= num_tokens
        return full

    def add_blocks(self, rows: Rows) -> BlockTableDelta:
        """Add one block to each row.

        Raises:
            OutOfBlocks: there are not enough for all rows; nothing has changed.
        """
        ids = self._pool.allocate(rows.size)
        positions = self.num_blocks[rows]
        self.block_table[rows, positions] = ids
        self.num_blocks[rows] = positions + 1
        self.record(lambda: self.num_blocks.__setitem__(rows, positions))
        return BlockTableDelta(rows, positions, ids)

    def filling(self, rows: Rows | slice, num_tokens: Rows) -> npt.NDArray[np.bool_]:
        """Which rows' first ``num_tokens`` tokens fill a block that has had no key yet."""
        unnamed = num_tokens - self.num_published[rows] * self._block_size_array
        filling: npt.NDArray[np.bool_] = unnamed >= self._block_size_array
        return filling

    def prune(self, rows: Rows, num_processed: Rows) -> BlockTableDelta:
        """Give back blocks that lie wholly behind the sliding window.

        Args:
            rows: rows about to run.
            num_processed: for each, the tokens whose steps are done; steps in flight may
                still read behind the window of those that are only planned.
        """
        if self._sliding_window is None:
            return _NO_DELTA
        behind = self.num_behind_window(num_processed)
        deltas = []
        for row, end in zip(rows.tolist(), behind.tolist(), strict=True):
            start = int(self._num_pruned[row])
            if end > start:
                deltas.append(self._prune(row, start, end))
        return BlockTableDelta.join(deltas)

    def recount_published(self, rows: Rows) -> None:
        """After keys were withdrawn: count anew which blocks of each row still have theirs."""
        for row in rows.tolist():
            start = int(self._num_pruned[row])
            keys = self._pool.keys(self.block_table[row, start : self.num_published[row]])
            kept = next((place for place, key in enumerate(keys) if key is None), len(keys))
            self.num_published[row] = start + kept
            if any(key is not None for key in keys[kept:]):
                self._with_holes.add(row)

    def has_hole(self, row: int) -> bool:
        """Whether a row has a block with a key behind one that lost its own."""
        return row in self._with_holes

    def have_hole(self, rows: Rows) -> bool:
        """Whether one of the rows has a hole."""
        return bool(self._with_holes) and not self._with_holes.isdisjoint(rows.tolist())

    def row_blocks(self, row: int) -> BlockIds:
        """A copy of a row's table, in order of position."""
        ids: BlockIds = self.block_table[row, : self.num_blocks[row]].copy()
        return ids

    def free(self, row: int) -> None:
        """Release a row's blocks, the last first, so that the start of a prefix stays longest."""
        ids = self.row_blocks(row)
        self._pool.release(ids[::-1])
        self.num_blocks[row] = 0
        published, has_hole = self.num_published.item(row), self.has_hole(row)

        def undo() -> None:
            self.bind([row], [ids], num_published=[published])
            if has_hole:
                self._with_holes.add(row)

        self.record(undo)

    def free_rows(self, rows: list[int]) -> None:
        """`free` each row, in order, at once; cannot be rolled back."""
        table, num_blocks = self.block_table, self.num_blocks
        at = index_of(rows)
        sizes = num_blocks[at].tolist()
        ends = zip(rows, sizes, strict=True)
        self._pool.release_each([table[row, :size][::-1] for row, size in ends])
        num_blocks[at] = 0

    def check(self, rows: Rows) -> None:
        """Audit the tables, of which ``rows`` are in use."""
        unused = np.setdiff1d(np.arange(self.num_blocks.size), rows)
        if self.num_blocks[unused].any():
            raise InvariantBroken(f"rows without a request have blocks: {unused.tolist()}")
        for row in rows.tolist():
            ids = self.row_blocks(row)
            real = ids[ids != 0]
            if np.unique(real).size != real.size:
                raise InvariantBroken(f"row {row} has a block twice: {ids.tolist()}")
            if np.count_nonzero(ids == 0) != self._num_pruned[row]:
                raise InvariantBroken(f"row {row} has null blocks within its window")

    def fingerprint(self, rows: Rows) -> bytes:
        """All that the tables of some rows say."""
        return b"".join(
            self.row_blocks(row).tobytes()
            + self.num_published[row].tobytes()
            + self._num_pruned[row].tobytes()
            for row in rows.tolist()
        )

    def num_behind_window(self, num_tokens: _Count) -> _Count:
        """How many blocks from the start no later token sees; below 0 when the window is larger."""
        assert self._sliding_window is not None
        return (num_tokens - self._sliding_window + 1) // self._block_size

    def _unbind(self, rows: list[int]) -> None:
        self.num_blocks[index_of(rows)] = 0

    def _prune(self, row: int, start: int, end: int) -> BlockTableDelta:
        ids = self.block_table[row, start:end].copy()
        published = self.num_published.item(row)
        self.block_table[row, start:end] = 0
        self._num_pruned[row] = end
        # What lost its key with a step that failed, and is given back, need not get another.
        self.num_published[row] = max(published, end)
        self._pool.release(ids[::-1])

        def undo() -> None:
            self.block_table[row, start:end] = ids
            self._num_pruned[row] = start
            self.num_published[row] = published

        self.record(undo)
        positions = np.arange(start, end)
        return BlockTableDelta(np.full(ids.size, row), positions, np.zeros_like(ids))
