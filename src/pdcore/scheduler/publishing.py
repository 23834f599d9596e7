"""Publishing the blocks of running rows, so that others can share them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pdcore.masks import all_set, any_set
from pdcore.rows import ONE
from pdcore.scheduler.core import Core

__all__ = ["publish_filled", "publish_full"]

Rows = npt.NDArray[np.intp]


def publish_filled(core: Core, rows: Rows, known: Rows, *, step: int) -> None:
    """Publish the blocks that became full.

    Args:
        core: the scheduler's state.
        rows: running rows.
        known: for each, how many of its tokens are known and computed when ``step`` is done.
        step: the step that fills the blocks.
    """
    if not core.manager.enable_prefix_caching:
        return
    filling = core.manager.tables.filling(rows, known)
    if any_set(filling):
        publish_full(core, rows[filling], known[filling], step=step)


def publish_full(core: Core, rows: Rows, known: Rows, *, step: int) -> None:
    """`publish_filled` for rows that are known to have a full block without a key.

    Prefix caching must be on.
    """
    table, manager = core.table, core.manager
    # A row that decodes fills the one block that its tail still holds.
    positions = manager.tables.num_published[rows]
    one_block = (positions + ONE) * manager.block_size
    if all_set(known == one_block) and all_set(known == table.num_tokens[rows]):
        sequences = table.sequences(rows)
        has_hole = manager.tables.have_hole(rows)
        if not has_hole and [len(it.keys) for it in sequences] == positions.tolist():
            manager.publish_tails(rows, positions, sequences, table.tail[rows], step=step)
            return
    for row, num_tokens in zip(rows.tolist(), known.tolist(), strict=True):
        table.flush(row)
        manager.publish(row, table.state(row).sequence, num_tokens, step=step)
