"""How many references each block has."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pdcore.errors import BlockMisuse
from pdcore.masks import all_set, any_set

__all__ = ["References"]

Blocks = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]

_NULL_COUNT = 1 << 30
# Arrays, since numpy adds and compares those faster than Python's integers.
_ZERO, _ONE = np.array(0, np.int32), np.array(1, np.int32)


class References:
    """A count for each block; a block may be mentioned several times in one call.

    The null block has so many that it never counts as given back, however often it is released.
    Every call is a fixed number of array operations.

    Args:
        num_blocks: how many blocks there are.
    """

    def __init__(self, num_blocks: int) -> None:
        self.counts = np.zeros(num_blocks, np.int32)
        self.counts[0] = _NULL_COUNT
        self._places = np.arange(64, dtype=np.int32)

    def give(self, at: Blocks) -> None:
        """Blocks without a reference, each mentioned once, get their first."""
        self.counts[at] = 1

    def take(self, at: Blocks) -> None:
        """Undo `give`."""
        self.counts[at] = 0

    def are_referenced(self, at: Blocks | slice) -> Mask:
        """Which of the blocks have a reference."""
        referenced: Mask = self.counts[at] > _ZERO
        return referenced

    def add(self, at: Blocks) -> None:
        """Add a reference for each mention."""
        before = self.counts[at]
        if all_set(self._mark_last(at)):
            self.counts[at] = before + _ONE
        else:
            self.counts[at] = before
            np.add.at(self.counts, at, _ONE)
        self.counts[0] = _NULL_COUNT

    def remove(self, at: Blocks) -> None:
        """Undo `add`."""
        np.subtract.at(self.counts, at, _ONE)
        self.counts[0] = _NULL_COUNT

    def drop(self, at: Blocks) -> Mask:
        """Drop a reference for each mention.

        Returns:
            Which mentions are the last one of a block that has no reference left.

        Raises:
            BlockMisuse: a block has fewer references than mentions; nothing has changed.
        """
        counts = self.counts
        before = counts[at]
        is_last = self._mark_last(at)
        are_distinct = all_set(is_last)
        if are_distinct:
            left = before - _ONE
            counts[at] = left
        else:
            counts[at] = before
            np.subtract.at(counts, at, _ONE)
            left = counts[at]
        loose: Mask = left == _ZERO
        if not all_set(loose) and any_set(left < _ZERO):
            counts[at] = before
            counts[0] = _NULL_COUNT
            raise BlockMisuse(
                f"release({at.tolist()}): blocks {at[left < 0].tolist()} have fewer references "
                "than that. Each retain or allocate allows one release."
            )
        counts[0] = _NULL_COUNT
        return loose if are_distinct else loose & is_last

    def are_missing(self, at: Blocks) -> Mask:
        """Which mentions are the last one of a block without a reference."""
        before = self.counts[at]
        missing: Mask = (before == _ZERO) & self._mark_last(at)
        self.counts[at] = before
        return missing

    def is_consistent(self) -> bool:
        """Whether no count is negative, and the null block's is what it was."""
        return bool(self.counts.min() >= 0 and self.counts[0] == _NULL_COUNT)

    def _mark_last(self, at: Blocks) -> Mask:
        """Which mentions of a block are its last. Overwrites the blocks' counts."""
        if at.size > self._places.size:
            self._places = np.arange(2 * at.size, dtype=np.int32)
        places = self._places[: at.size]
        self.counts[at] = places
        last: Mask = self.counts[at] == places
        return last
