"""KV memory as NIXL sees it: an address, and blocks at equal distances from it."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from pdcore.connector.base import KVCaches
from pdcore.errors import ConfigError

__all__ = ["MemoryRegion"]


@attrs.frozen(kw_only=True)
class MemoryRegion:
    """One contiguous piece of memory, cut into blocks of equal size.

    Args:
        address: where block 0 begins, in the owner's address space.
        num_blocks, bytes_per_block: how it is cut.
        mem_type: NIXL's name for the kind of memory: ``DRAM`` or ``VRAM``.
        device_id: which device, for ``VRAM``; otherwise 0.
    """

    address: int
    num_blocks: int
    bytes_per_block: int
    mem_type: str = "DRAM"
    device_id: int = 0

    @classmethod
    def of(cls, caches: KVCaches) -> MemoryRegion:
        """Describe a worker's KV memory.

        The buffer may be a numpy array or a torch tensor. A tensor on a CUDA device counts as
        ``VRAM``; that path is written to NIXL's documentation and has never run on a GPU yet.

        Raises:
            ConfigError: the buffer is not contiguous, or its size is not that of its blocks.
        """
        address, num_bytes, mem_type, device_id = _locate(caches.buffer)
        expected = caches.num_blocks * caches.bytes_per_block
        if num_bytes != expected:
            raise ConfigError(
                f"the KV buffer has {num_bytes} bytes, but {caches.num_blocks} blocks of "
                f"{caches.bytes_per_block} bytes need {expected}: pass the whole cache, "
                "with blocks along the first axis"
            )
        return cls(
            address=address,
            num_blocks=caches.num_blocks,
            bytes_per_block=caches.bytes_per_block,
            mem_type=mem_type,
            device_id=device_id,
        )

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block

    def registration(self) -> list[tuple[int, int, int, str]]:
        """The region as `register_memory` takes it."""
        return [(self.address, self.num_bytes, self.device_id, "")]

    def descriptors(self) -> npt.NDArray[np.uint64]:
        """One descriptor a block, as the strided row that `prep_xfer_dlist` takes.

        The index of a block in the prepared list is its block id. A row costs 50 µs to prepare
        however many blocks it stands for; a list of tuples costs 3 µs for each.
        """
        row = (
            self.address,
            self.bytes_per_block,
            self.device_id,
            self.bytes_per_block,
            self.num_blocks,
        )
        return np.array([row], dtype=np.uint64)


def _locate(buffer: Any) -> tuple[int, int, str, int]:
    """Address, size in bytes, NIXL's memory type and device of an array or tensor."""
    if isinstance(buffer, np.ndarray):
        _must_be_contiguous(buffer.flags.c_contiguous)
        return buffer.ctypes.data, buffer.nbytes, "DRAM", 0
    _must_be_contiguous(buffer.is_contiguous())
    num_bytes = buffer.numel() * buffer.element_size()
    if buffer.device.type == "cuda":
        return buffer.data_ptr(), num_bytes, "VRAM", buffer.device.index or 0
    return buffer.data_ptr(), num_bytes, "DRAM", 0


def _must_be_contiguous(is_contiguous: bool) -> None:
    if not is_contiguous:
        raise ConfigError(
            "the KV buffer is not contiguous, so its blocks cannot be addressed: allocate it as "
            "one tensor (num_blocks, ...) and register that"
        )
