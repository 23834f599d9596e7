"""Access to single blocks of a worker's KV memory as bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt

from pdcore.connector.base import KVCaches
from pdcore.errors import ConfigError

__all__ = ["BlockAccess", "block_access"]

Bytes = npt.NDArray[np.uint8]


class BlockAccess(ABC):
    """Copies blocks out of KV memory and into it. Safe from several threads, block by block."""

    @abstractmethod
    def read(self, block_ids: list[int], targets: list[Bytes]) -> None:
        """Copy each block into its target, uint8 (bytes_per_block,), and wait until it is there."""

    @abstractmethod
    def write(self, block_ids: list[int], sources: list[Bytes]) -> None:
        """Copy each source, uint8 (bytes_per_block,), into its block, and wait likewise."""


class _HostBlocks(BlockAccess):
    """Memory that numpy can see: arrays, and torch tensors on the CPU."""

    def __init__(self, blocks: Bytes) -> None:
        self._blocks = blocks

    def read(self, block_ids: list[int], targets: list[Bytes]) -> None:
        for block, target in zip(block_ids, targets, strict=True):
            np.copyto(target, self._blocks[block])

    def write(self, block_ids: list[int], sources: list[Bytes]) -> None:
        for block, source in zip(block_ids, sources, strict=True):
            np.copyto(self._blocks[block], source)


class _DeviceBlocks(BlockAccess):
    """A torch tensor on a device. Written to torch's documentation; never run on a GPU yet."""

    def __init__(self, blocks: Any) -> None:
        import torch

        self._torch = torch
        self._blocks = blocks

    def read(self, block_ids: list[int], targets: list[Bytes]) -> None:
        gathered = self._blocks[block_ids].cpu().numpy()
        for row, target in zip(gathered, targets, strict=True):
            np.copyto(target, row)

    def write(self, block_ids: list[int], sources: list[Bytes]) -> None:
        stacked = self._torch.from_numpy(np.stack(sources)).to(self._blocks.device)
        self._blocks[block_ids] = stacked
        self._torch.cuda.current_stream(self._blocks.device).synchronize()


def block_access(caches: KVCaches) -> BlockAccess:
    """Choose how to reach a worker's KV memory.

    Raises:
        ConfigError: the buffer is not contiguous, or its size is not that of its blocks.
    """
    buffer = caches.buffer
    is_array = isinstance(buffer, np.ndarray)
    if not (buffer.flags.c_contiguous if is_array else buffer.is_contiguous()):
        raise ConfigError(
            "the KV buffer is not contiguous, so a block is not one piece of memory: allocate it "
            "as one tensor (num_blocks, ...) and register that"
        )
    blocks = _as_bytes(buffer, is_array=is_array)
    if blocks.shape[1] != caches.bytes_per_block:
        raise ConfigError(
            f"a block of the KV buffer has {blocks.shape[1]} bytes, not "
            f"bytes_per_block={caches.bytes_per_block}"
        )
    if is_array:
        return _HostBlocks(blocks)
    if blocks.device.type == "cpu":
        return _HostBlocks(blocks.numpy())
    return _DeviceBlocks(blocks)


def _as_bytes(buffer: Any, *, is_array: bool) -> Any:
    """uint8 (num_blocks, bytes_per_block), sharing the memory."""
    if is_array:
        return buffer.reshape(buffer.shape[0], -1).view(np.uint8)
    import torch

    return buffer.detach().view(buffer.shape[0], -1).view(torch.uint8)
