"""`NaiveBlockPool`, spelled out: what the machine takes as the truth."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from pdcore.errors import BlockMisuse, OutOfBlocks
from pdcore.kvcache.base import BlockCounts
from pdcore.kvcache.events import BlockRemoved, BlockStored, CacheCleared
from pdcore.kvcache.holds import Hold, HoldReason
from pdcore.testing import NaiveBlockPool

KEYS = (b"k0", b"k1", b"k2")


def ids(*blocks: int) -> npt.NDArray[np.int32]:
    """An array of blocks."""
    return np.array(blocks, dtype=np.int32)


def cached_pool(keys: Sequence[bytes] = KEYS, *, num_blocks: int = 6) -> NaiveBlockPool:
    """A pool in which blocks 1, 2, ... are evictable, the last of them first."""
    pool = NaiveBlockPool(num_blocks, 4)
    blocks = pool.allocate(len(keys))
    pool.publish(blocks, keys, 0)
    pool.commit(0)
    pool.release(blocks[::-1])
    return pool


def hold(pool: NaiveBlockPool, *blocks: int, reason: HoldReason = HoldReason.SEND) -> Hold:
    """A hold of somebody's."""
    return pool.hold(ids(*blocks), owner="owner", reason=reason)


def test_free_blocks_go_before_evictable_ones():
    """The last released free block goes first; then prefixes, the first released first."""
    pool = cached_pool()
    pool.release(pool.allocate(2))
    assert pool.allocate(2).tolist() == [4, 5]
    assert pool.allocate(3).tolist() == [3, 2, 1]


def test_released_blocks_are_reused_in_the_order_given():
    """The first block of a release is the first to go, before blocks released earlier."""
    pool = NaiveBlockPool(6, 4)
    pool.allocate(5)
    pool.release(ids(1, 2))
    pool.release(ids(5, 4))
    assert pool.allocate(4).tolist() == [5, 4, 1, 2]


def test_an_allocation_is_all_or_nothing():
    """A request for too many blocks takes none, and says how many there are."""
    pool = cached_pool()
    before = pool.fingerprint()
    with pytest.raises(OutOfBlocks) as error:
        pool.allocate(6)
    assert (error.value.needed, error.value.available) == (6, 5)
    assert pool.fingerprint() == before


def test_a_reused_block_loses_its_key():
    """An evicted prefix is not found any more, and what stood before it is."""
    pool = cached_pool(num_blocks=4)
    assert pool.allocate(1).tolist() == [3]
    assert pool.lookup(KEYS).tolist() == [1, 2]


def test_a_key_of_two_blocks_survives_the_loss_of_one():
    """The first published block is found; when it goes, the other is."""
    pool = NaiveBlockPool(4, 4)
    blocks = pool.allocate(2)
    pool.publish(blocks[:1], [b"k"], 0)
    pool.publish(blocks[1:], [b"k"], 0)
    assert pool.lookup([b"k"]).tolist() == [1]
    pool.release(ids(1))
    pool.allocate(2)
    assert pool.lookup([b"k"]).tolist() == [2]


def test_every_handing_out_is_a_new_generation():
    """A rollback takes back the block and keeps the generation."""
    pool = NaiveBlockPool(3, 4)
    pool.begin(1)
    pool.allocate(2)
    pool.rollback(1)
    assert pool.num_free_blocks == 2
    assert pool.generation(ids(1, 2)).tolist() == [1, 1]


@pytest.mark.parametrize("blocks", [(1, 1), (2,), (9,), (-1,)])
def test_a_release_without_a_reference_is_refused(blocks: tuple[int, ...]):
    """Too many mentions, free blocks and unknown blocks are misuse and change nothing."""
    pool = NaiveBlockPool(4, 4)
    pool.allocate(1)
    with pytest.raises(BlockMisuse):
        pool.release(ids(*blocks))
    assert pool.counts().referenced == 1


def test_the_null_block_takes_part_in_nothing():
    """Retaining and releasing it does nothing; holding and publishing it is refused."""
    pool = NaiveBlockPool(4, 4)
    pool.retain(ids(0, 0))
    pool.release(ids(0))
    with pytest.raises(BlockMisuse):
        hold(pool, 0)
    with pytest.raises(BlockMisuse):
        pool.publish(ids(0), [b"k"], 0)


def test_counts_put_every_block_into_one_class():
    """A reference outweighs a hold, and a quarantine outweighs a send."""
    pool = cached_pool(num_blocks=8)
    pool.allocate(2)
    hold(pool, 1)
    hold(pool, 2)
    hold(pool, 2, reason=HoldReason.QUARANTINE)
    hold(pool, 4, reason=HoldReason.QUARANTINE)
    assert pool.counts() == BlockCounts(free=2, evictable=1, referenced=2, held=1, quarantined=1)


def test_a_held_block_is_not_reused_until_its_last_hold_ends():
    """Blocks come back from a hold with the last of them to be reused first."""
    pool = NaiveBlockPool(4, 4)
    pool.allocate(3)
    first, second = hold(pool, 1, 2), hold(pool, 2)
    pool.release(ids(1, 2, 3))
    assert pool.num_free_blocks == 1
    pool.release_hold(second)
    assert pool.num_free_blocks == 1
    pool.release_hold(first)
    assert pool.allocate(3).tolist() == [2, 1, 3]
    with pytest.raises(BlockMisuse, match="ended before"):
        pool.release_hold(first)


def test_a_rollback_brings_back_keys_holds_and_order():
    """All that happened since the step began is undone."""
    pool = cached_pool()
    owner = hold(pool, 1)
    before = pool.fingerprint()
    pool.begin(7)
    pool.release_hold(owner)
    pool.allocate(5)
    pool.rollback(7)
    assert pool.fingerprint() == before
    assert pool.lookup(KEYS).tolist() == [1, 2, 3]
    pool.release_hold(owner)


def test_only_the_newest_step_can_be_rolled_back():
    """Another step was begun since: refused."""
    pool = cached_pool()
    pool.begin(1)
    pool.begin(2)
    with pytest.raises(BlockMisuse):
        pool.rollback(1)


def test_withdrawn_keys_make_blocks_free():
    """Only uncommitted keys of that step go, and blocks nobody owns become free."""
    pool = cached_pool()
    blocks = pool.allocate(2)
    pool.publish(blocks, [b"p", b"q"], 1)
    pool.release(blocks)
    pool.withdraw(1, ids(1, 5))
    assert pool.keys(ids(1, 4, 5)) == [b"k0", b"p", None]
    pool.withdraw(1)
    assert pool.counts().free == 2


def test_events_tell_of_committed_keys_with_their_parents():
    """A mirror hears of a key when it is final, of its end, and of a reset."""
    pool = NaiveBlockPool(3, 4)
    blocks = pool.allocate(2)
    pool.publish(blocks, [b"b", b"c"], 1, parents=[b"a", b"b"])
    assert pool.events() == []
    pool.commit(1)
    assert pool.events() == [BlockStored(b"b", b"a", 1), BlockStored(b"c", b"b", 2)]
    pool.release(blocks)
    pool.allocate(1)
    assert pool.events() == [BlockRemoved(b"b", 1)]
    assert not pool.reset()
    pool.release(ids(1))
    assert pool.reset()
    assert pool.events() == [CacheCleared()]


def test_an_eviction_that_was_taken_back_is_told_again():
    """A mirror that heard of the removal hears that the block is stored after all."""
    pool = cached_pool(KEYS[:2], num_blocks=3)
    pool.events()
    pool.begin(1)
    pool.allocate(1)
    assert pool.events() == [BlockRemoved(b"k1", 2)]
    pool.rollback(1)
    assert pool.events() == [BlockStored(b"k1", b"k0", 2)]


def test_num_evictable_counts_cached_blocks_without_an_owner():
    """Free and owned blocks do not count."""
    pool = cached_pool()
    pool.retain(ids(1))
    assert pool.num_evictable(ids(1, 2, 3, 4)) == 2
