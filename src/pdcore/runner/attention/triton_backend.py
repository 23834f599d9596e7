"""Paged attention in Triton: the default on CUDA. Reads the cache in place, whatever its strides.

Decodes and chunks are two launches of one kernel with tiles of different heights.
"""

from __future__ import annotations

import os
from typing import ClassVar

import attrs
import numpy as np
import torch
import triton
from torch import Tensor

from pdcore.errors import ConfigError
from pdcore.runner.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionShape,
    AttentionSupport,
)
from pdcore.runner.attention.triton_kernels import attend_kernel, write_kernel
from pdcore.runner.staging import send

__all__ = ["TritonAttentionBackend"]

# Tensor cores multiply tiles of at least 16 x 16.
_MIN_TILE = 16
_CHUNK_ROWS = 64
_SLOTS_PER_STEP = 32


@attrs.frozen(kw_only=True, eq=False)
class _Tiles:
    """One launch: how many tiles there are, how high they are, and what is in them.

    Args:
        sequences, starts: int32 (count,) on the device; None when each tile is a decode.
    """

    count: int
    num_rows: int
    sequences: Tensor | None = None
    starts: Tensor | None = None


class TritonAttentionBackend(AttentionBackend):
    """The CUDA backend. On a CPU it runs only under Triton's interpreter, for tests.

    Raises:
        ConfigError: also when the device is a CPU and ``TRITON_INTERPRET=1`` is not set.
    """

    name: ClassVar[str] = "triton"
    support: ClassVar[AttentionSupport] = AttentionSupport(
        devices=frozenset({"cuda", "cpu"}), graph_decodes=True
    )

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        if shape.device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ConfigError(
                "attention backend 'triton' runs on CUDA; on a CPU use 'torch' (or set "
                "TRITON_INTERPRET=1 to run it, very slowly, under Triton's interpreter)"
            )
        # The interpreter multiplies bfloat16 numbers as if their bits were integers.
        self._is_widened = shape.device == "cpu" and shape.dtype == "bfloat16"
        self._group = shape.num_heads // shape.num_kv_heads
        self._decode_rows = max(_MIN_TILE, triton.next_power_of_2(self._group))
        self._chunk_rows = max(_CHUNK_ROWS, self._decode_rows)

    def _bind(self, kv_cache: Tensor) -> None:
        if kv_cache.stride(-1) != 1:
            raise ConfigError(
                f"attention backend 'triton' needs heads whose elements are adjacent; this KV "
                f"cache has strides {kv_cache.stride()}"
            )
        layers = range(self.shape.num_layers)
        self._caches = [(kv_cache[:, layer, 0], kv_cache[:, layer, 1]) for layer in layers]

    def plan(self, batch: AttentionBatch) -> None:
        self._batch = batch
        self._launches = []
        if batch.num_decodes:
            self._launches.append(_Tiles(count=batch.num_decodes, num_rows=self._decode_rows))
        if batch.num_decodes < batch.query_lens.size:
            self._launches.append(self._chunk_tiles(batch))

    def forward(self, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        key_cache, value_cache = self._caches[layer]
        self._write(key_cache, value_cache, key_value[:, 0], key_value[:, 1])
        seen = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for tiles in self._launches:
            self._launch(tiles, layer, query, seen)
        return seen

    def _chunk_tiles(self, batch: AttentionBatch) -> _Tiles:
        height = self._chunk_rows // self._group
        counts = -(-batch.query_lens[batch.num_decodes :] // height)
        sequences = np.repeat(np.arange(batch.num_decodes, batch.query_lens.size), counts)
        firsts = np.repeat(np.cumsum(counts) - counts, counts)
        starts = (np.arange(sequences.size) - firsts) * height
        columns = send(np.stack((sequences, starts)).astype(np.int32), batch.cu_seqlens.device)
        return _Tiles(
            count=sequences.size,
            num_rows=self._chunk_rows,
            sequences=columns[0],
            starts=columns[1],
        )

    def _write(self, key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor) -> None:
        shape = self.shape
        write_kernel[(key.shape[0], shape.num_kv_heads)](
            key,
            value,
            key_cache,
            value_cache,
            self._batch.slot_blocks,
            self._batch.slot_offsets,
            key.stride(0),
            value.stride(0),
            *key_cache.stride()[:3],
            HEAD_DIM=shape.head_dim,
            BLOCK_D=triton.next_power_of_2(shape.head_dim),
        )

    def _launch(self, tiles: _Tiles, layer: int, query: Tensor, seen: Tensor) -> None:
        shape, batch = self.shape, self._batch
        key_cache, value_cache = self._caches[layer]
        attend_kernel[(tiles.count, shape.num_kv_heads)](
            query,
            key_cache,
            value_cache,
            seen,
            tiles.sequences,
            tiles.starts,
            batch.cu_seqlens,
            batch.device_seq_lens,
            batch.block_tables,
            shape.scale,
            query.stride(0),
            seen.stride(0),
            batch.block_tables.stride(0),
            *key_cache.stride()[:3],
            GROUP=self._group,
            HEAD_DIM=shape.head_dim,
            BLOCK_SIZE=shape.block_size,
            WINDOW=shape.windows[layer] or 0,
            BLOCK_M=tiles.num_rows,
            BLOCK_N=_SLOTS_PER_STEP,
            BLOCK_D=max(_MIN_TILE, triton.next_power_of_2(shape.head_dim)),
            WIDEN=self._is_widened,
        )
