"""In which order to read scattered blocks, so that neighbours travel as one piece."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["merge_order", "num_runs"]

BlockIds = npt.NDArray[np.int32]


def merge_order(local_ids: BlockIds, remote_ids: BlockIds) -> tuple[BlockIds, BlockIds]:
    """Sort pairs of blocks by remote id, keeping the pairs.

    NIXL merges list neighbours that are adjacent in memory on both sides, in ascending order only.
    A pool hands out released blocks last in first out, so tables often run downwards on both sides;
    sorted, such tables merge as well. Cost: O(n log n).
    """
    order = np.argsort(remote_ids, kind="stable")
    return (
        np.ascontiguousarray(local_ids[order], dtype=np.int32),
        np.ascontiguousarray(remote_ids[order], dtype=np.int32),
    )


def num_runs(local_ids: BlockIds, remote_ids: BlockIds) -> int:
    """How many pieces are left once adjacent neighbours are merged. Cost: O(n)."""
    if not local_ids.size:
        return 0
    joined = (np.diff(local_ids) == 1) & (np.diff(remote_ids) == 1)
    return int(local_ids.size - np.count_nonzero(joined))
