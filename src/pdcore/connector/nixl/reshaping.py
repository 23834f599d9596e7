"""Which blocks of which ranks to read from an engine of another shape, and how to copy them.

Both block sizes are multiples of the smaller one, and a load begins at a multiple of the local one.
So every load is a row of *chunks* of the smaller size that lie whole in one block on both sides;
only the last may be cut short. All chunks move in one indexed copy, whatever the sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from pdcore.connector.layout import KVLayout

__all__ = ["ChunkMap", "HeadSlice", "chunks_of", "copy_chunks", "head_slices"]

Indices = npt.NDArray[np.int64]


@attrs.frozen(kw_only=True)
class HeadSlice:
    """The heads that one rank of the peer has for one rank here.

    Args:
        rank: which of the peer's ranks.
        remote_start, local_start: the first of them there and here, counted within the rank.
        num_heads: how many.
    """

    rank: int
    remote_start: int
    local_start: int
    num_heads: int


def head_slices(remote: KVLayout, local: KVLayout) -> tuple[HeadSlice, ...]:
    """Where the heads of the local rank are, in order.

    Args:
        remote: the layout of any of the peer's ranks.
        local: the layout here; as many heads in all, spread over ranks of which one number
            divides the other.
    """
    first = local.tp_rank * local.num_kv_heads
    end = first + local.num_kv_heads
    ranks = range(first // remote.num_kv_heads, -(-end // remote.num_kv_heads))
    slices = []
    for rank in ranks:
        base = rank * remote.num_kv_heads
        start, stop = max(first, base), min(end, base + remote.num_kv_heads)
        slices.append(
            HeadSlice(
                rank=rank,
                remote_start=start - base,
                local_start=start - first,
                num_heads=stop - start,
            )
        )
    return tuple(slices)


@attrs.frozen(kw_only=True, eq=False)
class ChunkMap:
    """Where the chunks of a load lie on both sides, in order of position.

    Args:
        size: tokens in a chunk.
        num_tail_tokens: how many tokens of the last chunk belong to the load, 1..size.
        remote_block_ids: int32 (b,), the peer's blocks to read, without repeats.
        sources: int64 (n,), for each chunk an index into ``remote_block_ids``.
        source_chunks: int64 (n,), which chunk of that block it is.
        targets: int64 (n,), the local block that takes it.
        target_chunks: int64 (n,), which chunk of that block it becomes.
    """

    size: int
    num_tail_tokens: int
    remote_block_ids: npt.NDArray[np.int32]
    sources: Indices
    source_chunks: Indices
    targets: Indices
    target_chunks: Indices

    def pieces(self, max_num_blocks: int) -> Iterator[ChunkMap]:
        """Cut the load into pieces that read at most so many blocks each."""
        for first in range(0, self.remote_block_ids.size, max_num_blocks):
            stop = min(first + max_num_blocks, self.remote_block_ids.size)
            begin, end = np.searchsorted(self.sources, (first, stop))
            is_last = end == self.sources.size
            yield ChunkMap(
                size=self.size,
                num_tail_tokens=self.num_tail_tokens if is_last else self.size,
                remote_block_ids=self.remote_block_ids[first:stop],
                sources=self.sources[begin:end] - first,
                source_chunks=self.source_chunks[begin:end],
                targets=self.targets[begin:end],
                target_chunks=self.target_chunks[begin:end],
            )


def chunks_of(
    *,
    start: int,
    end: int,
    remote_block_size: int,
    local_block_size: int,
    remote_block_ids: npt.NDArray[np.int32],
    local_block_ids: npt.NDArray[np.int32],
) -> ChunkMap:
    """Map the tokens ``[start, end)`` of a prompt.

    Args:
        start: a multiple of the local block size.
        end: one past the last token; after ``start``.
        remote_block_size, local_block_size: one is a multiple of the other.
        remote_block_ids: the peer's blocks from the one that has token ``start`` on.
        local_block_ids: the local blocks from the one that takes token ``start`` on. Chunks to or
            from block 0, which stands for "no longer needed", are left out.
    """
    size = min(remote_block_size, local_block_size)
    chunks = np.arange(start // size, -(-end // size), dtype=np.int64)
    per_remote, per_local = remote_block_size // size, local_block_size // size
    sources = chunks // per_remote - start // remote_block_size
    targets = local_block_ids[chunks // per_local - start // local_block_size].astype(np.int64)
    exists = (targets != 0) & (remote_block_ids[sources] != 0)
    used, sources = np.unique(sources[exists], return_inverse=True)
    has_tail = bool(exists.size) and bool(exists[-1])
    return ChunkMap(
        size=size,
        num_tail_tokens=(end - 1) % size + 1 if has_tail else size,
        remote_block_ids=remote_block_ids[used].astype(np.int32),
        sources=sources.astype(np.int64),
        source_chunks=(chunks % per_remote)[exists],
        targets=targets[exists],
        target_chunks=(chunks % per_local)[exists],
    )


def copy_chunks(
    chunks: ChunkMap,
    heads: HeadSlice,
    *,
    staged: Any,
    slots: Indices,
    cache: Any,
) -> None:
    """Copy one rank's part of a load from where it was staged into the local blocks.

    Tokens, heads and blocks outside the load are not touched. Cost: one gather and one scatter of
    the load's bytes.

    Args:
        chunks: the load.
        heads: what of the rank is wanted.
        staged: the staged blocks, an array (num_slots, num_layers, num_components, block_size,
            num_kv_heads, head), as the peer's rank lays them out.
        slots: for each of the load's remote blocks, which slot has it.
        cache: the local blocks, laid out as this rank does, of the same element type.
    """
    theirs, ours = _in_chunks(staged, chunks.size), _in_chunks(cache, chunks.size)
    there = slice(heads.remote_start, heads.remote_start + heads.num_heads)
    here = slice(heads.local_start, heads.local_start + heads.num_heads)
    num_whole = chunks.sources.size - (chunks.num_tail_tokens < chunks.size)
    for part, num_tokens in (
        (slice(0, num_whole), chunks.size),
        (slice(num_whole, None), chunks.num_tail_tokens),
    ):
        target, source = chunks.targets[part], slots[chunks.sources[part]]
        ours[target, :, :, chunks.target_chunks[part], :num_tokens, here] = theirs[
            source, :, :, chunks.source_chunks[part], :num_tokens, there
        ]


def _in_chunks(blocks: Any, size: int) -> Any:
    num_blocks, num_layers, num_components, block_size, num_heads, head = blocks.shape
    shape = (num_blocks, num_layers, num_components, block_size // size, size, num_heads, head)
    return blocks.reshape(shape)
