"""Faults that users of inference engines met in block pools."""

from __future__ import annotations

from typing import NoReturn

import numpy as np
import numpy.typing as npt
import pytest
from harness import Engine, some_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcore.errors import BlockMisuse, ConfigError, OutOfBlocks
from pdcore.kvcache import (
    HoldReason,
    KVCacheManager,
    LRUBlockPool,
    LRUOrder,
)
from pdcore.kvcache.manager import PrefixHit
from pdcore.scheduler import SkipCode

BlockIds = npt.NDArray[np.int32]


def ids(*blocks: int) -> BlockIds:
    """Block ids, or rows, as the pool and the manager take them."""
    return np.array(blocks, np.int32)


def cache_blocks(pool: LRUBlockPool, num_blocks: int, *, name: bytes = b"key") -> list[bytes]:
    """Fill the pool's next blocks with a prefix that nobody uses; return its keys."""
    keys = [name + str(index).encode() for index in range(num_blocks)]
    blocks = pool.allocate(num_blocks)
    pool.publish(blocks, keys, 0)
    pool.commit(0)
    pool.release(blocks[::-1])
    return keys


# B1


@given(num_hit=st.integers(0, 6), num_other=st.integers(0, 6), num_new=st.integers(0, 12))
def test_b1_blocks_of_a_hit_do_not_count_as_free_for_the_rest(
    num_hit: int, num_other: int, num_new: int
) -> None:
    """A request fits only if its new blocks fit beside its hit; otherwise nothing changes."""
    if num_hit + num_other == 0:
        return
    pool = LRUBlockPool(1 + num_hit + num_other, 4)
    manager = KVCacheManager(pool)
    keys = cache_blocks(pool, num_hit)
    hit = PrefixHit(pool.lookup(keys), num_hit * 4)
    num_tokens = (num_hit + num_new) * 4
    before = pool.fingerprint()
    if num_new <= num_other:
        blocks = manager.allocate_slots(hit, num_tokens, must_fit_tokens=num_tokens, chunk=999)
        assert blocks[:num_hit].tolist() == hit.block_ids.tolist()
        assert np.unique(blocks).size == num_hit + num_new
    else:
        with pytest.raises(OutOfBlocks):
            manager.allocate_slots(hit, num_tokens, must_fit_tokens=num_tokens, chunk=999)
        assert pool.fingerprint() == before
    pool.check()


def test_b1_two_of_five_free_blocks_are_the_hit_and_four_more_do_not_fit() -> None:
    """A request whose own hit is among the free blocks waits until the rest is free as well."""
    engine = Engine(num_usable_blocks=8)
    prompt = some_tokens(6 * 16)
    engine.add("cached", prompt[:33], max_tokens=1)
    engine.run()
    engine.add("busy", 3 * 16, max_tokens=3)
    engine.step()
    # Four blocks are left beside busy's four; two of them are this one's hit, and it needs six.
    engine.add("x", prompt, max_tokens=1)
    before = engine.pool.fingerprint()
    engine.scheduler.abandon(engine.schedule())
    assert engine.pool.num_free_blocks <= 5
    assert engine.scheduler.explain("x").code is SkipCode.NO_BLOCKS
    assert engine.pool.fingerprint() == before
    engine.run()
    assert engine.end("x").num_cached_tokens == 32
    engine.assert_as_if_alone()
    engine.assert_idle()


# B2


class FailingOrder(LRUOrder):
    """An eviction order that breaks when it is asked for a block."""

    def pop(self, n: int) -> NoReturn:
        raise RuntimeError("boom")


def test_b2_an_allocation_that_cannot_be_met_takes_nothing() -> None:
    """Six blocks of five are refused and not one is taken, wherever the five lie."""
    for num_cached in range(6):
        pool = LRUBlockPool(9, 4)
        cache_blocks(pool, num_cached)
        pool.allocate(3)
        before = pool.fingerprint()
        with pytest.raises(OutOfBlocks) as raised:
            pool.allocate(6)
        assert (raised.value.needed, raised.value.available) == (6, 5)
        assert pool.fingerprint() == before
        pool.check()


def test_b2_an_allocation_that_fails_half_way_gives_back_what_it_took() -> None:
    """When the eviction order breaks at the fourth of six blocks, the pool is as it was."""
    pool = LRUBlockPool(9, 4, eviction=FailingOrder(9))
    cache_blocks(pool, 5)
    before = pool.fingerprint()
    with pytest.raises(RuntimeError, match="boom"):
        pool.allocate(6)
    pool.check()
    assert pool.fingerprint() == before


def test_b2_slots_that_cannot_be_had_leave_the_hit_alone() -> None:
    """When the new blocks of a request fail half-way, its hit is not retained either."""
    pool = LRUBlockPool(9, 4, eviction=FailingOrder(9))
    manager = KVCacheManager(pool)
    keys = cache_blocks(pool, 5)
    hit = PrefixHit(pool.lookup(keys[:2]), 8)
    before = pool.fingerprint()
    with pytest.raises(RuntimeError, match="boom"):
        manager.allocate_slots(hit, 24, must_fit_tokens=24, chunk=999)
    pool.check()
    assert pool.fingerprint() == before


def test_b2_rows_that_do_not_all_fit_grow_by_nothing() -> None:
    """Growing several rows at once gives all of them their blocks, or none of them any."""
    pool = LRUBlockPool(9, 4)
    manager = KVCacheManager(pool)
    manager.reserve_rows(3, 64)
    pool.allocate(3)
    before = manager.fingerprint(ids(0, 1, 2))
    with pytest.raises(OutOfBlocks):
        manager.tables.grow(ids(0, 1, 2), ids(1, 3, 2))
    assert manager.fingerprint(ids(0, 1, 2)) == before
    pool.check()


# B4


def test_b4_a_block_that_is_mentioned_twice_loses_two_references_and_is_freed_once() -> None:
    """Releasing [b, b] with two references frees one block; a third release raises."""
    pool = LRUBlockPool(9, 4)
    block = pool.allocate(1)
    pool.retain(block)
    before = pool.num_free_blocks
    pool.release(np.repeat(block, 2))
    assert pool.num_free_blocks == before + 1
    pool.check()
    state = pool.fingerprint()
    with pytest.raises(BlockMisuse):
        pool.release(block)
    assert pool.fingerprint() == state
    # Nobody gets it twice.
    assert np.unique(pool.allocate(8)).size == 8


@given(data=st.data(), num_refs=st.lists(st.integers(1, 3), min_size=1, max_size=5))
def test_b4_release_counts_mentions_and_refuses_one_too_many(
    data: st.DataObject, num_refs: list[int]
) -> None:
    """Any list of mentions is taken exactly, or refused as a whole without a trace."""
    pool = LRUBlockPool(len(num_refs) + 1, 4)
    blocks = pool.allocate(len(num_refs))
    for block, count in zip(blocks, num_refs, strict=True):
        pool.retain(np.repeat(block, count - 1))
    mentions = data.draw(st.lists(st.sampled_from(blocks.tolist()), max_size=8))
    left = [count - mentions.count(b) for b, count in zip(blocks.tolist(), num_refs, strict=True)]
    before = pool.fingerprint()
    if min(left) < 0:
        with pytest.raises(BlockMisuse):
            pool.release(np.array(mentions, np.int32))
        assert pool.fingerprint() == before
    else:
        pool.release(np.array(mentions, np.int32))
        assert pool.num_free_blocks == left.count(0)
    pool.check()


# B5


def test_b5_the_key_of_a_block_that_is_reused_leads_nowhere() -> None:
    """With one block: after Y took it over, X is a miss and Y a hit."""
    pool = LRUBlockPool(2, 4)
    (x,) = cache_blocks(pool, 1, name=b"x")
    assert pool.lookup([x]).size == 1
    (y,) = cache_blocks(pool, 1, name=b"y")
    assert pool.lookup([x]).size == 0
    assert pool.lookup([y]).size == 1
    pool.check()


@pytest.mark.parametrize("num_between", [0, 1, 2, 3])
def test_b5_a_prompt_whose_blocks_were_reused_is_computed_anew(num_between: int) -> None:
    """A cached prefix is a hit until others need its blocks, and a miss from then on."""
    engine = Engine(num_usable_blocks=4, block_size=4)
    prompt = some_tokens(5)
    engine.add("x", prompt, max_tokens=1)
    engine.run()
    for index in range(num_between):
        # Each leaves one cached block and takes one more while it runs.
        engine.add(f"y{index}", 5, max_tokens=1)
        engine.run()
    engine.add("again", prompt, max_tokens=1)
    engine.run()
    assert engine.end("again").num_cached_tokens == (4 if num_between < 3 else 0)
    engine.assert_as_if_alone()


# B14


def test_b14_the_null_block_is_never_counted_given_out_or_changed() -> None:
    """Of two blocks one is usable; releasing, retaining or pruning the null block does nothing."""
    pool = LRUBlockPool(2, 4)
    assert (pool.num_usable_blocks, pool.num_free_blocks, pool.counts().total) == (1, 1, 1)
    before = pool.fingerprint()
    pool.release(ids(0, 0))
    pool.retain(ids(0))
    pool.release(ids(0, 0, 0))
    assert pool.fingerprint() == before
    assert pool.allocate(1).tolist() == [1]
    with pytest.raises(OutOfBlocks):
        pool.allocate(1)
    for misuse in (
        lambda: pool.publish(ids(0), [b"key"], 0),
        lambda: pool.hold(ids(0), owner="x", reason=HoldReason.SEND),
    ):
        with pytest.raises(BlockMisuse):
            misuse()
    assert pool.keys(ids(0)) == [None]
    assert pool.generation(ids(0)).tolist() == [0]
    pool.check()


@pytest.mark.parametrize("num_blocks", [0, 1])
def test_b14_a_pool_without_a_usable_block_is_refused(num_blocks: int) -> None:
    """One block is the null block and nothing else, so it makes no pool."""
    with pytest.raises(ConfigError, match="null block"):
        LRUBlockPool(num_blocks, 4)


def test_b14_a_whole_engine_runs_on_one_usable_block() -> None:
    """Two blocks serve one request of one block at a time, with a cache that keeps nothing else."""
    engine = Engine(num_usable_blocks=1, block_size=4)
    for index in range(3):
        engine.add(f"r{index}", 2, max_tokens=3)
    engine.run()
    engine.assert_as_if_alone()
    engine.assert_idle()


# B18


@settings(max_examples=15)
@given(data=st.data(), num_in_flight=st.integers(1, 3), num_usable_blocks=st.integers(5, 12))
def test_b18_an_idle_pool_adds_up_after_any_mix_of_events(
    data: st.DataObject, num_in_flight: int, num_usable_blocks: int
) -> None:
    """After adds, aborts, preemptions and ends in any order, all blocks are free or evictable."""
    engine = Engine(
        num_usable_blocks=num_usable_blocks, block_size=4, max_num_seqs=3, max_num_batched_tokens=8
    )
    num_pending = 0
    for index in range(data.draw(st.integers(1, 30), label="num_events")):
        event = data.draw(st.sampled_from(["add", "add", "plan", "plan", "abort", "reset"]))
        if event == "add":
            prompt = some_tokens(data.draw(st.integers(1, 18)), seed=data.draw(st.integers(0, 2)))
            engine.add(f"r{index}", prompt, max_tokens=data.draw(st.integers(1, 9)))
        elif event == "plan":
            engine.dispatch()
            num_pending += 1
            if num_pending == num_in_flight:
                engine.land()
                num_pending -= 1
        elif event == "abort" and engine.requests:
            engine.abort(data.draw(st.sampled_from(sorted(engine.requests))))
        elif event == "reset":
            engine.scheduler.reset_prefix_cache(preempt_running=data.draw(st.booleans()))
            engine.scheduler.check()
    engine.run(num_in_flight=num_in_flight)
    engine.assert_idle()
    engine.assert_so_far_as_if_alone()
    assert all(len(ends) == 1 for ends in engine.ends.values())
    assert engine.scheduler.reset_prefix_cache()
    assert engine.pool.counts().free == num_usable_blocks


def test_b18_an_idle_engine_never_scans_its_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps, questions and statistics of an idle engine cost the same for any number of blocks."""
    engine = Engine()
    engine.add("x", 33)
    engine.run()
    # The workers hear once more, that the last row was given up.
    engine.step()

    def scan(*_: object) -> NoReturn:
        raise AssertionError("the whole pool was looked at")

    for name in ("check", "counts", "fingerprint"):
        monkeypatch.setattr(LRUBlockPool, name, scan)
    output = engine.scheduler.schedule()
    assert output.is_empty
    engine.execute(output)
    engine.scheduler.update_from_output(*engine._in_flight.pop())
    assert not engine.scheduler.has_requests()
    assert not engine.scheduler.has_work()
    assert engine.scheduler.stats().num_free_blocks == engine.pool.num_usable_blocks
