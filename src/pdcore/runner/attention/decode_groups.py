"""Which decodes of a step are attended to together, and what they have in common."""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt

from pdcore.runner.attention.base import AttentionBatch

__all__ = ["DecodeGroup", "group_decodes"]

_MAX_WASTED_SLOTS = 512
"""How many slots may be read in vain before another group, with its calls, is the cheaper way."""

_MIN_SHARED_SLOTS = 64
"""Fewer slots in common than this are not worth products of their own."""

BoolArray = npt.NDArray[np.bool_]
Int64Array = npt.NDArray[np.int64]


@attrs.frozen(kw_only=True, eq=False)
class DecodeGroup:
    """Decodes that are padded to one number of blocks.

    Args:
        rows: int64 (n,), their places in the batch.
        num_shared_blocks: with how many of the same blocks all of them begin, full ones.
        own_columns: int64 (n, width), which further columns of its block table each sees. Padding
            repeats a row's last, so that a row reads nothing but its own.
        is_unseen: bool (n, width * block_size), the slots of those columns that a row must not see.
    """

    rows: Int64Array
    num_shared_blocks: int
    own_columns: Int64Array
    is_unseen: BoolArray


def group_decodes(
    batch: AttentionBatch, window: int | None, *, block_size: int, max_slots: int
) -> list[DecodeGroup]:
    """Split a step's decodes by length. The order within a group is the batch's.

    Args:
        batch: the step.
        window: how many tokens back a token sees, itself included, or None for all.
        block_size: tokens in a block.
        max_slots: how many slots a group of several rows may span, padding included.
    """
    seq_lens = batch.seq_lens[: batch.num_decodes].astype(np.int64)
    if not seq_lens.size:
        return []
    first_seen = np.zeros_like(seq_lens) if window is None else np.maximum(seq_lens - window, 0)
    num_shared = 0 if first_seen.any() else _count_shared_blocks(batch, seq_lens, block_size)
    lengths = seq_lens - np.maximum(first_seen, num_shared * block_size)
    return [
        _make_group(rows, first_seen[rows], seq_lens[rows], num_shared, block_size)
        for rows in _split_by_length(lengths, max_slots)
    ]


def _split_by_length(lengths: Int64Array, max_slots: int) -> list[Int64Array]:
    """Walk from the longest down, and begin a group where padding gets dear or it gets full."""
    longest = int(lengths.max())
    num_slots = longest * lengths.size
    if num_slots <= max_slots and num_slots - int(lengths.sum()) <= _MAX_WASTED_SLOTS:
        return [np.arange(lengths.size)]
    order = np.argsort(-lengths, kind="stable")
    groups = []
    first = num_wasted = 0
    for place, length in enumerate(lengths[order].tolist()):
        longest = int(lengths[order[first]])
        num_wasted += longest - length
        is_full = longest * (place + 1 - first) > max_slots
        if place > first and (is_full or num_wasted > _MAX_WASTED_SLOTS):
            groups.append(np.sort(order[first:place]))
            first, num_wasted = place, 0
    groups.append(np.sort(order[first:]))
    return groups


def _make_group(
    rows: Int64Array,
    first_seen: Int64Array,
    seq_lens: Int64Array,
    num_shared_blocks: int,
    block_size: int,
) -> DecodeGroup:
    first_columns = np.maximum(first_seen // block_size, num_shared_blocks)[:, None]
    last_columns = ((seq_lens - 1) // block_size)[:, None]
    columns = first_columns + np.arange(int((last_columns - first_columns).max()) + 1)
    positions = first_columns * block_size + np.arange(columns.shape[1] * block_size)
    return DecodeGroup(
        rows=rows,
        num_shared_blocks=num_shared_blocks,
        own_columns=np.minimum(columns, last_columns),
        is_unseen=(positions >= seq_lens[:, None]) | (positions < first_seen[:, None]),
    )


def _count_shared_blocks(batch: AttentionBatch, seq_lens: Int64Array, block_size: int) -> int:
    """Count the blocks that all rows begin with, leaving each at least its newest token."""
    if seq_lens.size < 2 or batch.block_tables.device.type != "cpu":
        return 0  # elsewhere the host would have to wait for the tables
    num_full = int(seq_lens.min() - 1) // block_size
    if num_full * block_size < _MIN_SHARED_SLOTS:
        return 0
    tables = batch.block_tables.numpy()[: seq_lens.size, :num_full]
    if tables[0, 0] != tables[1, 0]:
        return 0
    is_same = (tables == tables[0]).all(axis=0)
    num_shared = num_full if is_same.all() else int(is_same.argmin())
    return num_shared if num_shared * block_size >= _MIN_SHARED_SLOTS else 0
