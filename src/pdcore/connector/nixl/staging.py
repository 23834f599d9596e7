"""Host memory where a peer's blocks land before they are rearranged."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pdcore.connector.base import KVCaches
from pdcore.connector.layout import KVLayout
from pdcore.connector.nixl.memory import MemoryRegion

__all__ = ["StagingArea", "as_blocks", "as_heads"]


def as_heads(buffer: Any, layout: KVLayout) -> npt.NDArray[Any]:
    """View host memory as ``(num_blocks, num_layers, num_components, block_size, num_kv_heads,
    words)``, in words as wide as a head allows. A numpy array or a torch tensor, contiguous."""
    word = next(size for size in (8, 4, 2, 1) if layout.bytes_per_head % size == 0)
    return (
        _as_bytes(buffer)
        .view(f"u{word}")
        .reshape(
            -1,
            layout.num_layers,
            layout.num_components,
            layout.block_size,
            layout.num_kv_heads,
            layout.bytes_per_head // word,
        )
    )


def as_blocks(buffer: Any, bytes_per_block: int) -> npt.NDArray[np.uint8]:
    """View host memory as ``(num_blocks, bytes_per_block)`` bytes, as `as_heads` does."""
    return _as_bytes(buffer).reshape(-1, bytes_per_block)


def _as_bytes(buffer: Any) -> npt.NDArray[np.uint8]:
    if isinstance(buffer, np.ndarray):
        return buffer.reshape(-1).view(np.uint8)
    import torch

    assert isinstance(buffer, torch.Tensor)
    flat: npt.NDArray[np.uint8] = buffer.detach().reshape(-1).view(torch.uint8).numpy()
    return flat


class StagingArea:
    """Room for some blocks of one rank of a peer, laid out as that rank does.

    Args:
        layout: the rank's.
        num_slots: for how many blocks.
    """

    def __init__(self, layout: KVLayout, *, num_slots: int) -> None:
        self._buffer = np.zeros((num_slots, layout.bytes_per_block), dtype=np.uint8)
        self.heads = as_heads(self._buffer, layout)
        self.region = MemoryRegion.of(
            KVCaches(buffer=self._buffer, bytes_per_block=layout.bytes_per_block, fingerprint="")
        )
