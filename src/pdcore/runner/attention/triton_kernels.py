"""Triton kernels over the block-major KV cache, any strides. See `triton_backend`."""

# Triton has no types, and its kernels are not called as Python functions.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["attend_kernel", "write_kernel"]


@triton.jit
def write_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slot_blocks,
    slot_offsets,
    key_stride,
    value_stride,
    block_stride,
    slot_stride,
    head_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Copy one token's keys and values of one KV head into its slot. Grid: (tokens, heads)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < HEAD_DIM
    block = tl.load(slot_blocks + token)
    offset = tl.load(slot_offsets + token)
    slot = block * block_stride + offset * slot_stride + head * head_stride + dims
    source = head * HEAD_DIM + dims
    tl.store(key_cache + slot, tl.load(key + token * key_stride + source, mask=is_dim), mask=is_dim)
    tl.store(
        value_cache + slot, tl.load(value + token * value_stride + source, mask=is_dim), mask=is_dim
    )


@triton.jit
def attend_kernel(
    query,
    key_cache,
    value_cache,
    seen,
    tile_sequences,
    tile_starts,
    cu_seqlens,
    seq_lens,
    block_tables,
    scale,
    query_stride,
    seen_stride,
    table_stride,
    block_stride,
    slot_stride,
    head_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Attention of one tile of queries to one KV head, with a running softmax.

    Grid: (tiles, KV heads), or (decodes, KV heads) without ``tile_sequences`` and ``tile_starts``:
    each decode is a tile, and its place in the batch is that of its sequence.

    A tile holds ``BLOCK_M // GROUP`` queries of one sequence; its rows are those queries times the
    query heads that share the KV head. Only slots that a query of the tile may see are loaded, so
    what other slots hold does not matter. ``WIDEN`` multiplies in fp32.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    if tile_sequences is None:
        sequence = tile
        first_query = 0
        batch_start = tile
        query_len = 1
    else:
        sequence = tl.load(tile_sequences + tile)
        first_query = tl.load(tile_starts + tile)
        batch_start = tl.load(cu_seqlens + sequence)
        query_len = tl.load(cu_seqlens + sequence + 1) - batch_start
    seq_len = tl.load(seq_lens + sequence)
    num_before = seq_len - query_len

    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    rows = tl.arange(0, BLOCK_M)
    queries = first_query + rows // GROUP
    heads = head * GROUP + rows % GROUP
    is_row = (rows < BLOCK_Q * GROUP) & (queries < query_len)
    positions = num_before + queries
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < HEAD_DIM
    row_places = (batch_start + queries).to(tl.int64)
    columns = (heads * HEAD_DIM)[:, None] + dims[None, :]
    q = tl.load(
        query + row_places[:, None] * query_stride + columns,
        mask=is_row[:, None] & is_dim[None, :],
        other=0.0,
    )

    if WIDEN:
        q = q.to(tl.float32)

    end = num_before + tl.minimum(first_query + BLOCK_Q, query_len)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(num_before + first_query - WINDOW + 1, 0)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    summed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(begin // BLOCK_N * BLOCK_N, end, BLOCK_N):
        slots = start + tl.arange(0, BLOCK_N)
        is_slot = (slots >= begin) & (slots < end)
        blocks = tl.load(
            block_tables + sequence * table_stride + slots // BLOCK_SIZE, mask=is_slot, other=0
        ).to(tl.int64)
        places = blocks * block_stride + (slots % BLOCK_SIZE) * slot_stride + head * head_stride
        is_loaded = is_slot[:, None] & is_dim[None, :]
        k = tl.load(key_cache + places[:, None] + dims[None, :], mask=is_loaded, other=0.0)
        v = tl.load(value_cache + places[:, None] + dims[None, :], mask=is_loaded, other=0.0)
        if WIDEN:
            k = k.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        is_seen = is_row[:, None] & is_slot[None, :] & (slots[None, :] <= positions[:, None])
        if WINDOW > 0:
            is_seen = is_seen & (slots[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(is_seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        # A row that has seen nothing yet keeps a peak of -inf; shift by 0, or -inf - -inf is NaN.
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp(scores - shift[:, None])
        decay = tl.exp(peak - shift)
        total = total * decay + tl.sum(weights, axis=1)
        weights = weights.to(v.dtype)
        if WIDEN:
            weights = weights.to(tl.float32)
            v = v.to(tl.float32)
        summed = summed * decay[:, None] + tl.dot(weights, v, input_precision="ieee")
        peak = new_peak
    result = summed / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        seen + row_places[:, None] * seen_stride + columns,
        result.to(seen.dtype.element_ty),
        mask=is_row[:, None] & is_dim[None, :],
    )
