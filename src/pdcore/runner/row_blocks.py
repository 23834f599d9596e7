"""What a worker was told of each row's blocks, as far as it takes to tell a plan that cannot be."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pdcore.masks import all_set, any_set
from pdcore.messages import NewRequestData

__all__ = ["RowBlocks"]

Int32Array = npt.NDArray[np.int32]
_ONE = np.int32(1)


class RowBlocks:
    """How many blocks each row has, on the host, where the ids themselves are not kept.

    Args:
        max_num_seqs: number of rows.
        max_model_len: tokens of one row, at most.
        block_size: tokens in a block.
        sliding_window: how many tokens back every layer sees, itself included; None means all.

    Attributes:
        width: how many blocks a row has at most.
        num_slots: int32 (max_num_seqs,), how many tokens each row has blocks for; no more than
            ``max_model_len``.
    """

    def __init__(
        self, *, max_num_seqs: int, max_model_len: int, block_size: int, sliding_window: int | None
    ) -> None:
        self.width = -(-max_model_len // block_size)
        self.num_slots = np.zeros(max_num_seqs, np.int32)
        self._max_model_len = np.int32(max_model_len)
        self._block_size = np.int32(block_size)
        self._window = sliding_window

    def start(self, request: NewRequestData, num_blocks: int) -> str | None:
        """Note a new row's blocks; return what is wrong with them, or None.

        Args:
            request: the row.
            num_blocks: how many blocks the KV cache has.
        """
        ids, size = request.block_ids, request.block_ids.size
        if size > self.width:
            return (
                f"{size} blocks were given, but {self._max_model_len} tokens take at most "
                f"{self.width}"
            )
        self.num_slots[request.row] = min(size * self._block_size, self._max_model_len)
        if any_set(ids.view(np.uint32) >= num_blocks):
            return _outside(int(ids.min()), int(ids.max()), num_blocks)
        num_behind = 0
        if self._window is not None:
            num_behind = max(request.num_computed_tokens - self._window + 1, 0)
            num_behind //= int(self._block_size)
        if not all_set(ids[num_behind:] != 0):
            place = num_behind + int(np.argmin(ids[num_behind:]))
            return f"block 0, the null block, was given for position {place} of the block table"
        return None

    def change(
        self, rows: Int32Array, positions: Int32Array, ids: Int32Array, num_blocks: int
    ) -> dict[int, str]:
        """Note changes to the tables, which name rows and positions that there are.

        Returns:
            By row what is wrong with them.
        """
        before, firsts = self.num_slots[rows], positions * self._block_size
        # All wrong ids, and 0, are large numbers without a sign.
        is_plain = (ids - _ONE).view(np.uint32) < num_blocks - 1
        is_plain &= firsts == before
        if all_set(is_plain):  # a block more for each of some rows, as decodes need them
            self.num_slots[rows] = np.minimum(before + self._block_size, self._max_model_len)
            return {}
        is_more = firsts >= before
        is_wrong = ids.view(np.uint32) >= num_blocks
        is_wrong |= (ids == 0) & (is_more | (self._window is None))
        num_more = np.bincount(rows[is_more], minlength=self.num_slots.size) * self._block_size
        np.maximum.at(self.num_slots, rows, firsts + self._block_size)
        is_gap = self.num_slots[rows] - before > num_more[rows]
        np.minimum(self.num_slots, self._max_model_len, out=self.num_slots)
        return {
            row: f"blocks up to position {position} were given, but not all before it"
            for row, position in _pairs(rows, positions, is_gap)
        } | {row: _outside(block, block, num_blocks) for row, block in _pairs(rows, ids, is_wrong)}


def _pairs(
    rows: Int32Array, values: Int32Array, chosen: npt.NDArray[np.bool_]
) -> list[tuple[int, int]]:
    return list(zip(rows[chosen].tolist(), values[chosen].tolist(), strict=True))


def _outside(lowest: int, highest: int, num_blocks: int) -> str:
    return (
        f"block ids span {lowest}..{highest}, but this worker's KV cache has the blocks "
        f"1..{num_blocks - 1}"
    )
