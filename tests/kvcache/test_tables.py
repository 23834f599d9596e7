"""The block tables of rows: what is taken back is as it was."""

from __future__ import annotations

import numpy as np

from pdcore import LRUBlockPool
from pdcore.kvcache import BlockTables

ROWS = np.array([0], np.intp)


def with_a_hole() -> tuple[LRUBlockPool, BlockTables]:
    """Row 0 has three blocks with keys, of which the second lost its own."""
    pool = LRUBlockPool(9, 4)
    tables = BlockTables(pool, sliding_window=None)
    tables.reserve(2, 8)
    blocks = pool.allocate(3)
    pool.publish(blocks[[0, 2]], [b"first", b"third"], 1)
    pool.publish(blocks[[1]], [b"second"], 2)
    tables.bind([0], [blocks], num_published=[3])
    pool.withdraw(2)
    tables.recount_published(ROWS)
    return pool, tables


def test_a_row_knows_of_a_key_behind_a_block_that_lost_its_own() -> None:
    """Keys count up to the hole."""
    _, tables = with_a_hole()
    assert tables.num_published.tolist() == [1, 0]
    assert tables.has_hole(0)
    assert not tables.has_hole(1)


def test_a_row_that_was_freed_in_a_step_that_is_taken_back_is_as_before() -> None:
    """Its blocks, its keys, and the hole between them."""
    pool, tables = with_a_hole()
    before = pool.fingerprint(), tables.fingerprint(ROWS)
    pool.begin(3)
    tables.begin()
    tables.free(0)
    assert tables.num_blocks.tolist() == [0, 0]
    tables.rollback()
    pool.rollback(3)
    assert (pool.fingerprint(), tables.fingerprint(ROWS)) == before
    assert tables.has_hole(0)
    tables.check(ROWS)


def test_a_row_that_was_bound_in_a_step_that_is_taken_back_is_empty() -> None:
    """Another request's blocks are not found in it."""
    pool, tables = with_a_hole()
    pool.begin(3)
    tables.begin()
    tables.bind([1], [pool.allocate(2)], num_published=[0])
    tables.rollback()
    pool.rollback(3)
    assert tables.num_blocks.tolist() == [3, 0]
    tables.check(ROWS)
    pool.check()
