"""Paged attention in plain torch: runs on any device.

Decodes are one call: the blocks of every sequence are gathered into a padded workspace, and the
query heads that share a KV head take the place of a query axis, so nothing is repeated. Chunks
run one sequence at a time.
"""

from __future__ import annotations

from typing import ClassVar

import attrs
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pdcore.runner.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionShape,
    AttentionSupport,
)

__all__ = ["TorchAttentionBackend"]


@attrs.frozen(kw_only=True, eq=False)
class _DecodePlan:
    """What layers with the same window share for the decodes of a step.

    Args:
        pages: int64 (num_decodes * width,), index of each block's first page in a pool of pages,
            where a page is the keys or the values of one layer of one block.
        bias: (num_decodes, 1, 1, width * block_size), 0 where a slot is seen and -inf elsewhere.
        unseen: int64, places in the workspace that no query may see, flat over sequences and slots.
    """

    pages: Tensor
    bias: Tensor
    unseen: Tensor


@attrs.frozen(kw_only=True, eq=False)
class _ChunkPlan:
    """One chunk, for layers with the same window.

    Args:
        tokens: where its tokens lie in the batch.
        pages: int64, first pages of the blocks to gather; None when the chunk sees only itself.
        slots: which of the gathered slots any of its queries sees.
        mask: bool (query_len, number of slots), or None for the plain causal mask.
    """

    tokens: slice
    pages: Tensor | None
    slots: slice
    mask: Tensor | None


class TorchAttentionBackend(AttentionBackend):
    """The reference backend. Cost of a decode: one copy of the KV it reads."""

    name: ClassVar[str] = "torch"
    support: ClassVar[AttentionSupport] = AttentionSupport(contiguous_only=True)

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        self._pages_per_block = 2 * shape.num_layers
        self._workspace: Tensor | None = None

    def _bind(self, kv_cache: Tensor) -> None:
        self._device = kv_cache.device
        self._dtype = kv_cache.dtype
        # Two flat views of the cache: by page, to gather whole blocks, and by slot, to write.
        self._pages = kv_cache.view(-1, self.shape.block_size, *kv_cache.shape[-2:])
        self._slots = kv_cache.view(-1, *kv_cache.shape[-2:])

    def plan(self, batch: AttentionBatch) -> None:
        self._num_decodes = batch.num_decodes
        first_pages = batch.slot_blocks * self._pages_per_block
        self._key_slots = first_pages * self.shape.block_size + batch.slot_offsets
        self._decodes: dict[int | None, _DecodePlan] = {}
        self._chunks: dict[int | None, list[_ChunkPlan]] = {}
        for window in dict.fromkeys(self.shape.windows):
            if batch.num_decodes:
                self._decodes[window] = self._plan_decodes(batch, window)
            self._chunks[window] = self._plan_chunks(batch, window)

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._write(layer, key, value)
        window = self.shape.windows[layer]
        seen = torch.empty_like(query)
        if self._num_decodes:
            decodes = slice(0, self._num_decodes)
            seen[decodes] = self._decode(layer, query[decodes], self._decodes[window])
        for chunk in self._chunks[window]:
            seen[chunk.tokens] = self._prefill(layer, query, key, value, chunk)
        return seen

    def _write(self, layer: int, key: Tensor, value: Tensor) -> None:
        keys = self._key_slots + 2 * layer * self.shape.block_size
        self._slots.index_copy_(0, keys, key)
        self._slots.index_copy_(0, keys + self.shape.block_size, value)

    def _plan_decodes(self, batch: AttentionBatch, window: int | None) -> _DecodePlan:
        block_size, count = self.shape.block_size, batch.num_decodes
        seq_lens = batch.seq_lens[:count]
        first_seen = np.zeros_like(seq_lens) if window is None else seq_lens - window
        first_blocks = np.maximum(first_seen, 0) // block_size
        width = int((-(-seq_lens // block_size) - first_blocks).max())
        positions = first_blocks[:, None] * block_size + np.arange(width * block_size)
        is_seen = (positions < seq_lens[:, None]) & (positions >= first_seen[:, None])
        columns = np.minimum(
            first_blocks[:, None] + np.arange(width), batch.block_tables.shape[1] - 1
        )
        blocks = batch.block_tables[:count].gather(1, self._to_device(columns.astype(np.int64)))
        bias = torch.zeros(is_seen.shape, dtype=self._dtype)
        bias.masked_fill_(torch.from_numpy(~is_seen), -torch.inf)
        return _DecodePlan(
            pages=blocks.flatten().to(torch.int64) * self._pages_per_block,
            bias=bias.to(self._device)[:, None, None, :],
            unseen=self._to_device(np.flatnonzero(~is_seen)),
        )

    def _decode(self, layer: int, query: Tensor, plan: _DecodePlan) -> Tensor:
        shape, count = self.shape, query.shape[0]
        key, value = self._gather(layer, plan.pages)
        for gathered in (key, value):
            # A bias of -inf does not hide NaN, and a weight of 0 times NaN is NaN: overwrite them.
            gathered.flatten(0, 1).index_fill_(0, plan.unseen, 0)
        seen = F.scaled_dot_product_attention(
            query.view(count, shape.num_kv_heads, -1, shape.head_dim),
            key.view(count, -1, shape.num_kv_heads, shape.head_dim).transpose(1, 2),
            value.view(count, -1, shape.num_kv_heads, shape.head_dim).transpose(1, 2),
            attn_mask=plan.bias,
            scale=shape.scale,
        )
        return seen.reshape(query.shape)

    def _gather(self, layer: int, first_pages: Tensor) -> tuple[Tensor, Tensor]:
        """Copy whole blocks into the workspace: two of (num_pages, block_size, heads, head_dim)."""
        num_pages = first_pages.shape[0]
        if self._workspace is None or self._workspace.shape[1] < num_pages:
            size = (2, num_pages * 5 // 4, *self._pages.shape[1:])
            self._workspace = torch.empty(size, dtype=self._dtype, device=self._device)
        key, value = self._workspace[0, :num_pages], self._workspace[1, :num_pages]
        pages = first_pages + 2 * layer
        torch.index_select(self._pages, 0, pages, out=key)
        torch.index_select(self._pages, 0, pages + 1, out=value)
        return key, value

    def _plan_chunks(self, batch: AttentionBatch, window: int | None) -> list[_ChunkPlan]:
        plans = []
        start = batch.num_decodes
        for index in range(batch.num_decodes, batch.seq_lens.size):
            query_len, seq_len = int(batch.query_lens[index]), int(batch.seq_lens[index])
            tokens = slice(start, start + query_len)
            start += query_len
            if query_len == seq_len and (window is None or window >= seq_len):
                plans.append(_ChunkPlan(tokens=tokens, pages=None, slots=slice(0), mask=None))
            else:
                table = batch.block_tables[index]
                plans.append(self._plan_chunk(table, tokens, query_len, seq_len, window))
        return plans

    def _plan_chunk(
        self, table: Tensor, tokens: slice, query_len: int, seq_len: int, window: int | None
    ) -> _ChunkPlan:
        block_size = self.shape.block_size
        first_query = seq_len - query_len
        first_seen = 0 if window is None else max(first_query - window + 1, 0)
        first_block = first_seen // block_size
        blocks = table[first_block : -(-seq_len // block_size)].to(torch.int64)
        slots = torch.arange(first_seen, seq_len, device=self._device)
        queries = torch.arange(first_query, seq_len, device=self._device)[:, None]
        mask = slots <= queries
        if window is not None:
            mask &= slots > queries - window
        origin = first_block * block_size
        return _ChunkPlan(
            tokens=tokens,
            pages=blocks * self._pages_per_block,
            slots=slice(first_seen - origin, seq_len - origin),
            mask=mask,
        )

    def _prefill(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, chunk: _ChunkPlan
    ) -> Tensor:
        query, key, value = query[chunk.tokens], key[chunk.tokens], value[chunk.tokens]
        if chunk.pages is not None:
            pages = self._gather(layer, chunk.pages)
            key, value = (gathered.flatten(0, 1)[chunk.slots] for gathered in pages)
        seen = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            scale=self.shape.scale,
            enable_gqa=True,
        )
        return seen[0].transpose(0, 1)

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)
