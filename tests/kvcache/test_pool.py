"""The reference pool passes the suite that comes with the library, events included."""

from __future__ import annotations

import tracemalloc
from functools import partial
from typing import Any

import numpy as np
import pytest

from pdcore import LRUBlockPool
from pdcore.errors import BlockMisuse, InvariantBroken
from pdcore.kvcache import BlockStored, HoldReason, LRUOrder
from pdcore.testing import block_pool_machine

TestLRUBlockPool = block_pool_machine(
    partial(LRUBlockPool, enable_events=True), with_events=True
).TestCase


@pytest.mark.parametrize("n", [-1, 2.5, np.float64(2), "2", None])
def test_a_number_of_blocks_that_is_none_is_refused(n: Any) -> None:
    """The pool is unchanged."""
    pool = LRUBlockPool(np.int64(9), np.int64(4))
    with pytest.raises(BlockMisuse, match="how many blocks"):
        pool.allocate(n)
    pool.check()
    assert pool.num_free_blocks == 8


def ids(*blocks: int) -> np.ndarray:
    return np.array(blocks, np.int32)


def test_an_eviction_order_that_gives_too_few_blocks_is_found_out() -> None:
    """Allocation is all or nothing, whatever a strategy of somebody else's does."""

    class Short(LRUOrder):
        def pop(self, n: int) -> Any:
            return super().pop(n - 1)

    pool = LRUBlockPool(9, 4, eviction=Short(9))
    taken = pool.allocate(8)
    pool.publish(taken, [bytes([place]) for place in range(8)], 1)
    pool.commit(1)
    pool.release(taken)
    with pytest.raises(InvariantBroken, match="gave 3 blocks"):
        pool.allocate(4)
    pool.check()
    assert pool.num_free_blocks == 8


def test_a_rollback_keeps_the_order_in_which_blocks_were_published() -> None:
    """Events tell of a parent before its child, also when the child was evicted and came back."""
    pool = LRUBlockPool(4, 4, enable_events=True)
    taken = pool.allocate(3)
    pool.publish(taken, [b"a", b"b", b"c"], 1)
    pool.release(taken)
    before = pool.fingerprint()
    pool.begin(2)
    pool.allocate(2)
    pool.rollback(2)
    assert pool.fingerprint() == before
    pool.commit(1)
    keys = [event.key for event in pool.events() if isinstance(event, BlockStored)]
    assert keys == [b"a", b"b", b"c"]


def test_a_small_integer_of_numpy_is_a_number_of_blocks() -> None:
    """It counts as any other; the pool's own counts do not take its size."""
    pool = LRUBlockPool(300, 4)
    taken = pool.allocate(100)
    pool.allocate(np.uint8(1))
    pool.release(taken)
    pool.check()
    assert pool.num_free_blocks == 298


@pytest.mark.parametrize(
    "publication",
    [
        ([b"a", [1]], 1, None),
        ([b"a", None], 1, None),
        ([b"a", b"b"], "s", None),
        ([b"a", b"b"], 1, [None]),
        ([b"a"], 1, None),
    ],
)
def test_a_publication_that_is_refused_changes_nothing(publication: Any) -> None:
    """Keys that are none, a step that is none, too few keys or parents."""
    keys, step, parents = publication
    pool = LRUBlockPool(9, 4, enable_events=True)
    taken = pool.allocate(2)
    before = pool.fingerprint()
    with pytest.raises(BlockMisuse):
        pool.publish(taken, keys, step, parents=parents)
    assert pool.fingerprint() == before
    pool.check()


@pytest.mark.parametrize("blocks", [[2**32 + 1], [1.5], [0], [-1], [9], [], [1, 1]])
def test_a_hold_on_what_is_no_block_is_refused(blocks: list[Any]) -> None:
    """Numbers are not wrapped, cut or rounded until they fit."""
    pool = LRUBlockPool(9, 4)
    pool.allocate(8)
    with pytest.raises(BlockMisuse):
        pool.hold(np.array(blocks), owner="o", reason=HoldReason.SEND)
    assert not pool.holds()


def test_a_block_takes_about_25_bytes() -> None:
    """Of which nothing is for holds or for an order of eviction that nobody has used yet."""
    num_blocks = 100_000
    tracemalloc.start()
    pool = LRUBlockPool(num_blocks, 16)
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_bytes / num_blocks < 26
    assert pool.num_free_blocks == num_blocks - 1


def test_a_block_that_is_released_twice_at_once_is_free_once() -> None:
    """Its place in the order of reuse is that of its last mention."""
    pool = LRUBlockPool(4, 4)
    first, second, third = pool.allocate(3).tolist()
    pool.retain(ids(first))
    pool.release(ids(first, second, first, third))
    pool.check()
    assert pool.allocate(3).tolist() == [second, first, third]
