"""Host memory where a peer's blocks land before they are rearranged."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pdcore.connector.base import KVCaches
from pdcore.connector.layout import KVLayout
from pdcore.connector.nixl.memory import MemoryRegion

__all__ = ["StagingArea", "as_heads"]


def as_heads(buffer: Any, layout: KVLayout) -> npt.NDArray[Any]:
    """View host memory as ``(num_blocks, num_layers, num_components, block_size, num_kv_heads,
    words)``, in words as wide as a head allows. A numpy array or a torch tensor, contiguous."""
    if isinstance(buffer, np.ndarray):
        flat = buffer.reshape(-1).view(np.uint8)
    else:
        torch_uint8 = _uint8_of(buffer)
        flat = buffer.detach().reshape(-1).view(torch_uint8).numpy()
    word = next(size for size in (8, 4, 2, 1) if layout.bytes_per_head % size == 0)
    return flat.view(f"u{word}").reshape(
        -1,
        layout.num_layers,
        layout.num_components,
        layout.block_size,
        layout.num_kv_heads,
        layout.bytes_per_head // word,
    )


def _uint8_of(tensor: Any) -> Any:
    import torch

    assert isinstance(tensor, torch.Tensor)
    return torch.uint8


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
