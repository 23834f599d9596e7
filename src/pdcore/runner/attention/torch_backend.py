"""Paged attention in plain torch: runs on any device.

A step's decodes are a few calls for all of them. On a CPU those are sparse products over the pages
as they lie, and blocks that every decode begins with are gathered once and multiplied by all
queries together; elsewhere the blocks are gathered into dense keys and values. Chunks run one
sequence at a time.
"""

from __future__ import annotations

from typing import ClassVar

import attrs
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from pdcore.runner.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionShape,
    AttentionSupport,
)
from pdcore.runner.attention.decode_groups import DecodeGroup, group_decodes
from pdcore.runner.attention.sparse_decode import SparseDecodes, silence_sparse_notice
from pdcore.runner.staging import send

__all__ = ["TorchAttentionBackend"]

_FLOAT32 = torch.float32
_MAX_WORKSPACE_BYTES = 12 << 20
"""What a group of decodes may gather in one layer on a CPU: about as much as stays in its cache
until it is multiplied."""
_MAX_SPARSE_ENTRIES = 1 << 22
"""How many (query head, slot) pairs a group may have: 12 bytes each, twice while a layer runs."""
_NO_LIMIT = 1 << 62


@attrs.frozen(kw_only=True, eq=False)
class _Decodes:
    """One group of decodes, for layers with the same window.

    A page is the keys or the values of one layer of one block; those of layer 0 are named.

    Args:
        rows: their places in the batch; None when they are all of it.
        shared_pages: int64, keys of the blocks that all of them see, then values; or None.
        own_pages: int64, the same for the blocks that each sees alone, flat over (2, n, width).
        how: sparse products, or a dense mask.
    """

    rows: Tensor | slice | None
    shared_pages: Tensor | None
    own_pages: Tensor
    how: SparseDecodes | _Mask


@attrs.frozen(kw_only=True, eq=False)
class _Mask:
    """Which of the gathered slots decodes see.

    Args:
        bias: (n, 1, 1, width * block_size), -inf where a slot is not seen and 0 elsewhere.
        unseen: int64, the places of those slots, flat over (n, width * block_size).
    """

    bias: Tensor
    unseen: Tensor


@attrs.frozen(kw_only=True, eq=False)
class _Chunk:
    """One chunk, for layers with the same window.

    Args:
        tokens: where its tokens lie in the batch.
        pages: int64, keys of the blocks it sees, then values; None when it sees only itself.
        slots: which slots of those blocks any of its tokens sees.
        mask: (query_len, number of slots), -inf where a slot is not seen, or None for the plain
            causal mask.
    """

    tokens: slice
    pages: Tensor | None
    slots: slice
    mask: Tensor | None


class TorchAttentionBackend(AttentionBackend):
    """The reference backend, and the CPU's.

    Decodes are computed in float32 on a CPU, in the cache's dtype elsewhere. Their cost: one copy
    of the KV they read, which a CPU with a float32 cache is spared.
    """

    name: ClassVar[str] = "torch"
    support: ClassVar[AttentionSupport] = AttentionSupport(contiguous_only=True)

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        self._workspaces: dict[tuple[torch.dtype, bool], Tensor] = {}
        self._pages_per_block = 2 * shape.num_layers
        self._max_slots = self._choose_max_slots()
        if self._is_sparse:
            silence_sparse_notice()

    @property
    def _is_sparse(self) -> bool:
        # Torch computes sampled products with MKL alone, which builds for other processors lack.
        has_mkl: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
        return self.shape.device == "cpu" and has_mkl

    @property
    def _is_in_place(self) -> bool:
        return self._is_sparse and self.shape.dtype == "float32"

    def _bind(self, kv_cache: Tensor) -> None:
        shape = self.shape
        self._device = kv_cache.device
        self._dtype = kv_cache.dtype
        # Flat views that begin at each layer, so that one set of indices serves all: by page, to
        # read whole blocks, and by slot, to write.
        pages = kv_cache.view(-1, shape.block_size, *kv_cache.shape[-2:])
        self._pages = [pages[2 * layer :] for layer in range(shape.num_layers)]
        self._slots = [pages.flatten(0, 1) for pages in self._pages]
        # By KV head of a slot, keys and values apart, all views alike in length.
        heads = kv_cache.view(-1, shape.head_dim)
        page = shape.block_size * shape.num_kv_heads
        self._num_columns = heads.shape[0] - (self._pages_per_block - 1) * page
        self._heads = [
            heads.narrow(0, place * page, self._num_columns)
            for place in range(self._pages_per_block)
        ]

    def plan(self, batch: AttentionBatch) -> None:
        block_size = self.shape.block_size
        keys = batch.slot_blocks * (self._pages_per_block * block_size) + batch.slot_offsets
        self._written = torch.stack((keys, keys + block_size), dim=1)
        self._decodes: dict[int | None, list[_Decodes]] = {}
        self._chunks: dict[int | None, list[_Chunk]] = {}
        for window in dict.fromkeys(self.shape.windows):
            self._decodes[window] = self._plan_decodes(batch, window)
            self._chunks[window] = self._plan_chunks(batch, window)

    def forward(self, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        self._slots[layer].index_put_((self._written,), key_value.to(self._dtype))
        window = self.shape.windows[layer]
        decodes, chunks = self._decodes[window], self._chunks[window]
        if len(decodes) == 1 and decodes[0].rows is None:
            return self._decode(layer, query, decodes[0])
        seen = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for plan in decodes:
            seen[plan.rows] = self._decode(layer, query[plan.rows], plan)
        for chunk in chunks:
            seen[chunk.tokens] = self._prefill(layer, query, key_value, chunk)
        return seen

    def _plan_decodes(self, batch: AttentionBatch, window: int | None) -> list[_Decodes]:
        block_size = self.shape.block_size
        groups = group_decodes(batch, window, block_size=block_size, max_slots=self._max_slots)
        return [self._plan_group(batch, group) for group in groups]

    def _plan_group(self, batch: AttentionBatch, group: DecodeGroup) -> _Decodes:
        rows = self._places(group, batch.query_lens.size)
        tables = batch.block_tables[: batch.num_decodes] if rows is None else batch.block_tables
        if rows is not None:
            tables = tables[rows]
        shared = tables[0, : group.num_shared_blocks] if group.num_shared_blocks else None
        blocks = tables.gather(1, self._to_device(group.own_columns)).to(torch.int64)
        return _Decodes(
            rows=rows,
            shared_pages=None if shared is None else self._pages_of(shared),
            own_pages=self._pages_of(blocks),
            how=self._plan_sparse(blocks, group) if self._is_sparse else self._plan_mask(group),
        )

    def _plan_sparse(self, blocks: Tensor, group: DecodeGroup) -> SparseDecodes:
        size, block_size = group.is_unseen.shape, self.shape.block_size
        if self._is_in_place:
            first = blocks * (self._pages_per_block * block_size)
            slots = (first.unsqueeze(-1) + torch.arange(block_size)).view(size)
            num_columns = self._num_columns
        else:
            slots = torch.arange(group.is_unseen.size).view(size)
            num_columns = group.is_unseen.size * self.shape.num_kv_heads
        return SparseDecodes.plan(
            slots,
            group.is_unseen,
            num_heads=self.shape.num_heads,
            num_kv_heads=self.shape.num_kv_heads,
            num_columns=num_columns,
        )

    def _plan_mask(self, group: DecodeGroup) -> _Mask:
        unseen = send(group.is_unseen, self._device)
        bias = torch.zeros(unseen.shape, dtype=self._dtype, device=self._device)
        return _Mask(
            bias=bias.masked_fill_(unseen, -torch.inf)[:, None, None],
            unseen=self._to_device(np.flatnonzero(group.is_unseen)),
        )

    def _places(self, group: DecodeGroup, batch_size: int) -> Tensor | slice | None:
        first, last = int(group.rows[0]), int(group.rows[-1])
        if last - first + 1 != group.rows.size:
            return self._to_device(group.rows)
        return None if group.rows.size == batch_size else slice(first, last + 1)

    def _decode(self, layer: int, query: Tensor, plan: _Decodes) -> Tensor:
        if isinstance(plan.how, _Mask):
            return self._decode_gathered(layer, query, plan.own_pages, plan.how)
        if self._is_in_place:
            keys, values = self._heads[2 * layer : 2 * layer + 2]
        else:
            keys, values = self._gather(layer, plan.own_pages, dtype=_FLOAT32).flatten(1, 2)
        shared = plan.shared_pages
        seen = plan.how.attend(
            query.to(_FLOAT32).contiguous(),
            keys,
            values,
            scale=self.shape.scale,
            shared=None
            if shared is None
            else self._gather(layer, shared, dtype=_FLOAT32, is_second=True),
        )
        return seen.to(query.dtype)

    def _decode_gathered(self, layer: int, query: Tensor, pages: Tensor, mask: _Mask) -> Tensor:
        shape, count = self.shape, query.shape[0]
        gathered = self._gather(layer, pages, dtype=self._dtype, unseen=mask.unseen)
        by_row = gathered.view(2, count, -1, shape.num_kv_heads, shape.head_dim)
        keys, values = by_row.transpose(2, 3)
        # The query heads that share a KV head are like so many queries of one head.
        seen = F.scaled_dot_product_attention(
            query.view(count, shape.num_kv_heads, -1, shape.head_dim).to(self._dtype),
            keys,
            values,
            attn_mask=mask.bias,
            scale=shape.scale,
        )
        return seen.to(query.dtype).reshape(query.shape)

    def _gather(
        self,
        layer: int,
        pages: Tensor,
        *,
        dtype: torch.dtype,
        unseen: Tensor | None = None,
        is_second: bool = False,
    ) -> Tensor:
        """Copy blocks into a workspace: (2, num_slots, num_kv_heads, head_dim), keys first.

        Args:
            dtype: what to return.
            unseen: slots to overwrite, since they may hold NaN: a bias of -inf does not hide it,
                and a weight of 0 times NaN is NaN.
            is_second: whether the first workspace must stay as it is.
        """
        gathered = self._workspace(pages.shape[0], self._dtype, is_second)
        torch.index_select(self._pages[layer], 0, pages, out=gathered)
        keys_values = gathered.view(2, -1, *gathered.shape[-2:])
        if unseen is not None and unseen.shape[0]:
            keys_values.index_fill_(1, unseen, 0)
        if dtype == self._dtype:
            return keys_values
        converted = self._workspace(pages.shape[0], dtype, is_second)
        return converted.view(keys_values.shape).copy_(keys_values)

    def _choose_max_slots(self) -> int:
        shape = self.shape
        if not self._is_sparse:
            return _NO_LIMIT
        if self._is_in_place:
            return _MAX_SPARSE_ENTRIES // shape.num_heads
        return _MAX_WORKSPACE_BYTES // (2 * shape.num_kv_heads * shape.head_dim * _FLOAT32.itemsize)

    def _plan_chunks(self, batch: AttentionBatch, window: int | None) -> list[_Chunk]:
        plans = []
        start = batch.num_decodes
        for index in range(batch.num_decodes, batch.seq_lens.size):
            query_len, seq_len = int(batch.query_lens[index]), int(batch.seq_lens[index])
            tokens = slice(start, start + query_len)
            start += query_len
            if query_len == seq_len and (window is None or window >= seq_len):
                plans.append(_Chunk(tokens=tokens, pages=None, slots=slice(0), mask=None))
            else:
                table = batch.block_tables[index]
                plans.append(self._plan_chunk(table, tokens, query_len, seq_len, window))
        return plans

    def _plan_chunk(
        self, table: Tensor, tokens: slice, query_len: int, seq_len: int, window: int | None
    ) -> _Chunk:
        block_size = self.shape.block_size
        first_query = seq_len - query_len
        first_seen = 0 if window is None else max(first_query - window + 1, 0)
        first_block = first_seen // block_size
        slots = torch.arange(first_seen, seq_len, device=self._device)
        queries = torch.arange(first_query, seq_len, device=self._device)[:, None]
        is_unseen = slots > queries
        if window is not None:
            is_unseen |= slots <= queries - window
        mask = torch.zeros(is_unseen.shape, dtype=_FLOAT32, device=self._device)
        origin = first_block * block_size
        return _Chunk(
            tokens=tokens,
            pages=self._pages_of(table[first_block : -(-seq_len // block_size)]),
            slots=slice(first_seen - origin, seq_len - origin),
            mask=mask.masked_fill_(is_unseen, -torch.inf),
        )

    def _prefill(self, layer: int, query: Tensor, key_value: Tensor, chunk: _Chunk) -> Tensor:
        query, mask = query[chunk.tokens], chunk.mask
        if chunk.pages is None:
            key, value = key_value[chunk.tokens].permute(1, 2, 0, 3)
        else:
            seen = self._gather(layer, chunk.pages, dtype=query.dtype)
            key, value = seen[:, chunk.slots].permute(0, 2, 1, 3)
        attended = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key[None],
            value[None],
            attn_mask=None if mask is None else mask.to(query.dtype),
            is_causal=mask is None,
            scale=self.shape.scale,
            enable_gqa=True,
        )
        return attended[0].transpose(0, 1)

    def _pages_of(self, blocks: Tensor) -> Tensor:
        """The pages of some blocks in layer 0: all keys, then all values, flat."""
        keys = blocks.flatten().to(torch.int64) * self._pages_per_block
        return torch.cat((keys, keys + 1))

    def _workspace(self, num_pages: int, dtype: torch.dtype, is_second: bool) -> Tensor:
        """A buffer that grows; what it holds lives until the next call that asks for it."""
        key = (dtype, is_second)
        buffer = self._workspaces.get(key)
        if buffer is None or buffer.shape[0] < num_pages:
            size = (num_pages * 5 // 4, *self._pages[0].shape[1:])
            buffer = self._workspaces[key] = torch.empty(size, dtype=dtype, device=self._device)
        return buffer[:num_pages]

    def _to_device(self, array: npt.NDArray[np.int64]) -> Tensor:
        return send(array, self._device)
