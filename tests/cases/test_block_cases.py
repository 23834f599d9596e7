"""Faults that users of inference engines met in block pools and prefix caches."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import attrs
import numpy as np
import numpy.typing as npt
import pytest
from harness import Engine, some_tokens
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdcore.clock import VirtualClock
from pdcore.connector.base import (
    ExternalMatch,
    FinishedBlocks,
    HandOver,
    KVConnector,
    SchedulerConnector,
    WorkerConnector,
)
from pdcore.connector.loopback import LoopbackConnector, LoopbackFabric, LoopbackFaults
from pdcore.connector.null import NullSchedulerConnector, NullWorkerConnector
from pdcore.errors import BlockMisuse, ConfigError, OutOfBlocks
from pdcore.kvcache import (
    BlockRemoved,
    BlockStored,
    CacheCleared,
    HoldReason,
    KVCacheManager,
    LRUBlockPool,
    LRUOrder,
    PrefixHasher,
)
from pdcore.kvcache.manager import PrefixHit
from pdcore.request import FinishReason, Request, RequestStatus
from pdcore.scheduler import Priority, SkipCode
from pdcore.testing import StaleKV
from pdcore.testing.chain import POISON

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


# B3


@pytest.mark.parametrize(
    ("num_tokens", "hit"), [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (48, 32)]
)
def test_b3_a_prompt_that_is_cached_whole_still_computes_its_last_block(
    num_tokens: int, hit: int
) -> None:
    """A hit covers the full blocks of all tokens but the last, so one is left to draw from."""
    engine = Engine()
    prompt = some_tokens(num_tokens)
    engine.add("first", prompt, max_tokens=1)
    engine.run()
    engine.add("again", prompt, max_tokens=3)
    assert engine.step() == {"again": num_tokens - hit}
    engine.run()
    assert engine.end("again").num_cached_tokens == hit
    engine.assert_as_if_alone()


class ClaimsAll(KVConnector):
    """A loopback connector that offers every token of a prompt, the last one included."""

    def __init__(self, connector: LoopbackConnector) -> None:
        self._connector = connector

    def scheduler_side(self) -> SchedulerConnector:
        side = self._connector.scheduler_side()
        find = side.get_num_new_matched_tokens

        def find_all(request: Request, num_local_tokens: int) -> ExternalMatch:
            match = find(request, num_local_tokens)
            if not match.num_tokens:
                return match
            return ExternalMatch(
                num_tokens=request.num_prompt_tokens - num_local_tokens, is_async=match.is_async
            )

        side.get_num_new_matched_tokens = find_all  # type: ignore[method-assign]
        return side

    def worker_side(self, rank: int = 0) -> WorkerConnector:
        return self._connector.worker_side(rank)


@attrs.define(eq=False)
class Pair:
    """A prefill and a decode engine on one fabric."""

    clock: VirtualClock
    fabric: LoopbackFabric
    prefill: Engine
    decode: Engine
    num_prompts: int = 0

    @classmethod
    def start(cls, *, faults: Any = None, claims_all: bool = False, **options: Any) -> Pair:
        clock = VirtualClock()
        fabric = LoopbackFabric(clock=clock, faults=faults)
        ends = []
        for name in "PD":
            made = LoopbackConnector(fabric, engine_id=name, block_size=16, lease_s=1e6)
            connector = ClaimsAll(made) if claims_all else made
            ends.append(Engine(connector=connector, clock=clock, **options))
        return cls(clock, fabric, *ends)

    def hand_over(self, prompt: BlockIds) -> Any:
        """Prefill a prompt; return what the decode engine needs to load it."""
        self.num_prompts += 1
        name = f"prefill {self.num_prompts}"
        self.prefill.add(name, prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
        while not self.prefill.ends[name]:
            self.prefill.step()
        return self.prefill.end(name).kv_transfer_params


@pytest.mark.parametrize("num_local_tokens", [0, 16])
def test_b3_a_store_that_claims_the_whole_prompt_still_leaves_one_token(
    num_local_tokens: int,
) -> None:
    """Of an external hit on everything the last token is computed, and the chain stays whole."""
    pair = Pair.start(claims_all=True)
    prompt = some_tokens(32)
    decode = pair.decode
    if num_local_tokens:
        decode.add("before", prompt[: num_local_tokens + 1], max_tokens=1)
        decode.run()
    decode.add("x", prompt, max_tokens=2, kv_transfer_params=pair.hand_over(prompt))
    decode.run()
    assert [plan["x"] for plan in decode.plans if "x" in plan] == [1, 1]
    assert decode.end("x").num_external_tokens == 31 - num_local_tokens
    decode.add("longer", some_tokens(48), max_tokens=1)
    decode.run()
    assert decode.end("longer").num_cached_tokens == 32
    decode.assert_as_if_alone()
    decode.assert_idle()


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


# B6


def test_b6_a_prompt_shares_blocks_that_its_own_step_writes() -> None:
    """Of two equal prompts in one step the second computes only what the first does not write."""
    engine = Engine()
    prompt = some_tokens(32)
    engine.add("first", prompt)
    engine.add("second", prompt)
    assert engine.step() == {"first": 32, "second": 16}
    engine.run()
    engine.assert_as_if_alone()


@pytest.mark.parametrize(("chunk", "hit"), [(15, 0), (16, 16), (20, 16), (32, 32), (47, 32)])
def test_b6_a_chunk_shares_its_full_blocks_alone(chunk: int, hit: int) -> None:
    """When the first prompt is cut, the second starts behind the blocks that are filled so far."""
    engine = Engine(long_prefill_token_threshold=chunk)
    prompt = some_tokens(48)
    engine.add("first", prompt)
    engine.add("second", prompt)
    assert engine.step() == {"first": chunk, "second": min(chunk, 48 - hit)}
    engine.run()
    assert engine.end("second").num_cached_tokens == hit
    engine.assert_as_if_alone()


@pytest.mark.parametrize("when", ["planned", "in flight"])
@pytest.mark.parametrize("victims", [("first",), ("second",), ("first", "second")])
def test_b6_an_abort_of_the_writer_harms_no_reader(when: str, victims: tuple[str, ...]) -> None:
    """An aborted writer's step still runs, so whoever shares its blocks reads what it wrote."""
    engine = Engine()
    prompt = some_tokens(32)
    engine.add("first", prompt)
    engine.add("second", prompt)
    output = engine.schedule()
    if when == "planned":
        engine.abort(*victims)
        engine.execute(output)
    else:
        engine.execute(output)
        engine.abort(*victims)
    engine.land()
    engine.add("third", prompt)
    engine.run()
    for name in victims:
        assert engine.reason(name) is FinishReason.ABORT
    engine.assert_as_if_alone(*{"first", "second", "third"} - set(victims))
    engine.assert_idle()


def test_b6_a_plan_that_is_taken_back_takes_reader_and_keys_with_it() -> None:
    """Undispatched, writer, reader and keys are as if the plan had never been."""
    engine = Engine()
    prompt = some_tokens(32)
    engine.add("first", prompt)
    engine.add("second", prompt)
    before = engine.scheduler.fingerprint()
    engine.scheduler.abandon(engine.schedule())
    engine.scheduler.check()
    assert engine.scheduler.fingerprint() == before
    assert engine.pool.counts().evictable == 0
    assert engine.step() == {"first": 32, "second": 16}
    engine.run()
    engine.assert_as_if_alone()


def test_b6_a_step_that_failed_on_the_worker_leaves_no_key_of_what_it_should_have_written() -> None:
    """After a dispatched plan is given up, its blocks are no hits and its readers start again."""
    failures = [RuntimeError("the device fell off the bus")]
    engine = Engine(runner={"step_fault": lambda output: failures.pop() if failures else None})
    prompt = some_tokens(33)
    engine.add("first", prompt)
    engine.add("second", prompt)
    output = engine.schedule()
    with pytest.raises(RuntimeError):
        engine.execute(output)
    engine.scheduler.abandon(output, dispatched=True)
    engine.scheduler.check()
    assert engine.pool.counts().evictable == 0
    engine.run()
    engine.assert_as_if_alone()
    engine.assert_idle()


@pytest.mark.parametrize("displaced", [False, True])
def test_b6_a_writer_that_gives_way_in_its_own_step_withdraws_its_keys(displaced: bool) -> None:
    """A block is shared in the step that fills it, but not if its writer loses its row in it."""
    slots = 1 if displaced else 2
    engine = Engine(policy=Priority(displace=True), max_num_seqs=slots)
    prompt = some_tokens(15)
    engine.add("writer", prompt, max_tokens=4, priority=9)
    engine.step()
    # The writer's next step fills its first block with this prefix.
    prefix = [*prompt.tolist(), *engine.tokens["writer"]]
    engine.add("reader", [*prefix, 7, 8, 9], max_tokens=3, priority=1)
    planned = engine.step()
    assert planned == ({"reader": 19} if displaced else {"writer": 1, "reader": 3})
    engine.run()
    engine.assert_as_if_alone()
    engine.assert_idle()


# B7 and B8


domains = st.tuples(
    st.none() | st.text(alphabet="sl\x00a:", max_size=6),
    st.none() | st.text(alphabet="sl\x00a:", max_size=6),
)


@settings(max_examples=100)
@given(first=domains, second=domains)
@example(first=("x", "y"), second=("xloray", None))
def test_b7_keys_are_equal_exactly_when_salt_and_adapter_are(
    first: tuple[str | None, str | None], second: tuple[str | None, str | None]
) -> None:
    """No salt can imitate an adapter, nor can a part of one spill over into the other."""
    hasher = PrefixHasher(4)
    keys = [
        hasher.chain(hasher.root(salt, lora), some_tokens(8), start=0)
        for salt, lora in (first, second)
    ]
    assert (keys[0] == keys[1]) == (first == second)
    assert set(keys[0]).isdisjoint(keys[1]) or first == second


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"lora": "s"}, {"cache_salt": "s"}),
        ({"lora": "s"}, {}),
        ({"cache_salt": "s"}, {}),
        ({"cache_salt": ""}, {}),
        ({"cache_salt": "a", "lora": "b"}, {"cache_salt": "b", "lora": "a"}),
    ],
)
def test_b7_an_adapter_and_a_salt_of_the_same_name_share_nothing(
    first: dict[str, str], second: dict[str, str]
) -> None:
    """Equal prompts of different domains never hit each other, and each hits its own."""
    engine = Engine()
    prompt = some_tokens(33)
    for index, (domain, hit) in enumerate(((first, 0), (second, 0), (first, 32), (second, 32))):
        engine.add(f"r{index}", prompt, **domain)
        engine.run()
        assert engine.end(f"r{index}").num_cached_tokens == hit
    engine.assert_as_if_alone()


def test_b8_a_salt_isolates_its_prompts_here_and_in_outside_indexes() -> None:
    """Salts a, b, a of one prompt hit 0, 0 and all; the keys that events tell differ by salt."""
    engine = Engine(enable_events=True)
    prompt = some_tokens(33)
    stored: list[set[bytes]] = []
    hits = []
    for index, salt in enumerate("aba"):
        engine.add(f"r{index}", prompt, cache_salt=salt, max_tokens=1)
        engine.run()
        hits.append(engine.end(f"r{index}").num_cached_tokens)
        events = engine.pool.events()
        stored.append({event.key for event in events if isinstance(event, BlockStored)})
    assert hits == [0, 0, 32]
    assert [len(keys) for keys in stored] == [2, 2, 0]
    assert stored[0].isdisjoint(stored[1])
    engine.assert_as_if_alone()


# B9


def test_b9_keys_are_strong_and_nobody_without_the_secret_can_predict_them() -> None:
    """Keys are 256 bits of a sum that a secret weighs; processes differ unless told."""

    def keys(hasher: PrefixHasher, tokens: BlockIds) -> list[bytes]:
        return hasher.chain(hasher.root(None, None), tokens, start=0)

    prompt = some_tokens(32)
    first, second = PrefixHasher(16), PrefixHasher(16)
    assert set(keys(first, prompt)).isdisjoint(keys(second, prompt))
    assert {len(key) for key in keys(first, prompt)} == {32}
    shared = [PrefixHasher(16, secret=b"between peers") for _ in range(2)]
    assert keys(shared[0], prompt) == keys(shared[1], prompt)
    assert keys(shared[0], prompt) != keys(PrefixHasher(16, secret=b"other"), prompt)
    # The second block of a prompt is another one behind another first block.
    other = np.concatenate((some_tokens(16, seed=1), prompt[16:]))
    assert set(keys(first, prompt)).isdisjoint(keys(first, other))


def test_b9_tokens_are_not_compared_so_a_hash_that_collides_serves_foreign_kv() -> None:
    """The key is all that tells prefixes apart: with a stub that collides, foreign KV is read."""

    class Stub(PrefixHasher):
        def chain(self, parent: bytes, tokens: BlockIds, *, start: int) -> list[bytes]:
            return [b"all the same"] * (tokens.size // 16)

    engine = Engine(hasher=Stub(16))
    engine.add("first", some_tokens(17, seed=1), max_tokens=1)
    engine.run()
    engine.add("second", some_tokens(17, seed=2), max_tokens=1)
    output = engine.schedule()
    assert engine.named(output) == {"second": 1}
    with pytest.raises(StaleKV):
        engine.execute(output)


# B13


def _most_blocks(engine: Engine, *, num_in_flight: int = 1) -> int:
    """Run to the end; return the most blocks that requests ever had."""
    most = 0
    while engine.scheduler.has_requests():
        for _ in range(num_in_flight):
            engine.dispatch()
            most = max(most, engine.pool.counts().referenced)
        for _ in range(num_in_flight):
            engine.land()
    return most


def test_b13_a_long_prompt_behind_a_window_needs_no_more_than_window_and_chunk() -> None:
    """A prompt of 20 blocks runs in a pool of 6, holds at most 5, and gives back the others."""
    engine = Engine(
        num_usable_blocks=6, sliding_window=32, max_num_batched_tokens=32, max_num_seqs=4
    )
    engine.add("x", 320, max_tokens=40)
    nulled: set[int] = set()
    most = 0
    while engine.scheduler.has_requests():
        output = engine.schedule()
        most = max(most, engine.pool.counts().referenced)
        nulled |= set(output.block_positions[output.block_ids == 0].tolist())
        start = int(output.num_computed_tokens[0])
        # All that this step sees is there, all that no later step can see is not.
        assert nulled == set(range(max(0, start - 32 + 1) // 16))
        engine.execute(output)
        engine.land()
    assert most <= math.ceil((32 + 32) / 16) + 1
    engine.assert_as_if_alone()
    engine.assert_idle()


@settings(max_examples=15)
@given(
    block_size=st.sampled_from([1, 4, 16]),
    window=st.integers(1, 40),
    budget=st.integers(1, 32),
    num_prompt_tokens=st.integers(1, 150),
    enable_prefix_caching=st.booleans(),
)
def test_b13_the_bound_holds_for_every_window_chunk_and_prompt(
    block_size: int, window: int, budget: int, num_prompt_tokens: int, enable_prefix_caching: bool
) -> None:
    """A pool of exactly window, chunk and one block more serves prompts of any length."""
    bound = math.ceil((window + budget) / block_size) + 1
    engine = Engine(
        num_usable_blocks=bound,
        block_size=block_size,
        sliding_window=window,
        max_num_batched_tokens=budget,
        max_num_seqs=1,
        max_model_len=256,
        enable_prefix_caching=enable_prefix_caching,
    )
    engine.add("x", num_prompt_tokens, max_tokens=12)
    assert _most_blocks(engine) <= bound
    engine.assert_as_if_alone()
    assert engine.scheduler.stats().num_preemptions == 0
    engine.assert_idle()


@pytest.mark.parametrize("num_cached_tokens", [32, 64, 96])
def test_b13_a_cached_prefix_longer_than_the_window_is_no_reason_to_wait(
    num_cached_tokens: int,
) -> None:
    """A hit behind a window keeps no more blocks than a request without one would."""
    engine = Engine(
        num_usable_blocks=6, sliding_window=32, max_num_batched_tokens=32, max_num_seqs=4
    )
    prompt = some_tokens(160)
    engine.add("before", prompt[:num_cached_tokens], max_tokens=1)
    engine.run()
    engine.add("x", prompt, max_tokens=4)
    engine.run()
    engine.assert_as_if_alone()
    engine.assert_idle()


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


# B15


def test_b15_a_block_is_pruned_when_no_step_in_flight_can_read_it() -> None:
    """What lies behind the window of planned tokens stays until the step that reads it is in."""
    engine = Engine(sliding_window=16, max_num_batched_tokens=16, max_num_seqs=1)
    engine.add("x", 96, max_tokens=2)
    for num_planned in (1, 2, 3):
        assert engine.dispatch() == {"x": 16}
        # With nothing processed, nothing is behind the window of any result.
        assert engine.pool.counts().referenced == num_planned
    engine.land()
    engine.land()
    # 32 tokens are processed: the next step reads from token 17 on, so one block may go.
    output = engine.schedule()
    pruned = output.block_ids == 0
    assert output.block_positions[pruned].tolist() == [0]
    engine.execute(output)
    engine.run(num_in_flight=2)
    engine.assert_as_if_alone()


@pytest.mark.parametrize("num_in_flight", [2, 3, 4])
@pytest.mark.parametrize("num_usable_blocks", [5, 6, 8, 12])
def test_b15_a_lone_request_behind_a_window_never_gives_way_to_its_own_plans(
    num_usable_blocks: int, num_in_flight: int
) -> None:
    """Plans in flight keep more blocks, but never so many that a request must preempt itself."""
    engine = Engine(
        num_usable_blocks=num_usable_blocks,
        sliding_window=32,
        max_num_batched_tokens=32,
        max_num_seqs=2,
        enable_prefix_caching=False,
    )
    engine.add("x", 320, max_tokens=8)
    engine.run(num_in_flight=num_in_flight, max_steps=100)
    engine.assert_as_if_alone()
    engine.assert_idle()


# B16


@settings(max_examples=15)
@given(
    prompts=st.lists(st.integers(1, 20), min_size=2, max_size=8),
    max_tokens=st.integers(1, 12),
    window=st.none() | st.integers(1, 12),
    num_usable_blocks=st.integers(9, 12),
)
def test_b16_no_step_reads_a_slot_that_its_request_did_not_write(
    prompts: list[int], max_tokens: int, window: int | None, num_usable_blocks: int
) -> None:
    """With poison in every block that nobody has, recycled blocks still give the right tokens."""
    engine = Engine(
        num_usable_blocks=num_usable_blocks,
        block_size=4,
        sliding_window=window,
        max_num_batched_tokens=8,
        max_num_seqs=4,
        enable_prefix_caching=False,
    )
    for index, num_tokens in enumerate(prompts):
        engine.add(f"r{index}", num_tokens, max_tokens=max_tokens)
    while engine.scheduler.has_requests():
        engine.step()
        engine.poison_unowned_slots()
    engine.assert_as_if_alone()
    engine.assert_idle()


# B17


def test_b17_a_reset_is_refused_while_requests_run_and_changes_nothing() -> None:
    """False means that every cached prefix and every running request is as it was."""
    engine = Engine()
    prompt = some_tokens(33)
    engine.add("cached", prompt, max_tokens=1)
    engine.run()
    engine.add("runs", 8, max_tokens=8)
    engine.step()
    before = engine.scheduler.fingerprint()
    assert not engine.scheduler.reset_prefix_cache()
    engine.scheduler.check()
    assert engine.scheduler.fingerprint() == before
    engine.add("again", prompt, max_tokens=1)
    engine.run()
    assert engine.end("again").num_cached_tokens == 32
    engine.assert_as_if_alone()
    assert engine.scheduler.reset_prefix_cache()


@pytest.mark.parametrize("num_in_flight", [0, 1, 2])
def test_b17_a_reset_that_preempts_leaves_no_old_kv_to_read(num_in_flight: int) -> None:
    """True means that all is gone: no later hit, no block kept, no token lost or drawn twice."""
    engine = Engine()
    prompt = some_tokens(33)
    engine.add("cached", prompt, max_tokens=1)
    engine.run()
    engine.add("runs", 20, max_tokens=8)
    engine.step()
    for _ in range(num_in_flight):
        engine.dispatch()
    num_tokens = len(engine.tokens["runs"])
    assert engine.scheduler.reset_prefix_cache(preempt_running=True)
    engine.scheduler.check()
    assert engine.scheduler.status("runs") is RequestStatus.PREEMPTED
    assert engine.pool.counts().free == engine.pool.num_usable_blocks
    for _ in range(num_in_flight):
        engine.land()
    # Exactly the tokens that were in flight arrive late, and none is dropped.
    assert len(engine.tokens["runs"]) == num_tokens + num_in_flight
    engine.poison_unowned_slots()
    engine.add("again", prompt, max_tokens=1)
    engine.run()
    assert engine.end("again").num_cached_tokens == 0
    engine.assert_as_if_alone()
    engine.assert_idle()


@pytest.mark.parametrize("keeper", ["hand-over", "load"])
def test_b17_a_reset_is_refused_while_blocks_are_kept_for_a_peer(keeper: str) -> None:
    """Blocks that a peer reads or fills cannot be dropped, not even by preempting."""
    pair = Pair.start(faults=LoopbackFaults(delay_s=10.0))
    prompt = some_tokens(33)
    params = pair.hand_over(prompt)
    engine = pair.prefill
    if keeper == "load":
        engine = pair.decode
        engine.add("x", prompt, kv_transfer_params=params)
        engine.step()
        assert engine.scheduler.stats().num_parked == 1
    engine.add("runs", 8, max_tokens=8)
    engine.step()
    before = engine.scheduler.fingerprint()
    assert not engine.scheduler.reset_prefix_cache(preempt_running=True)
    assert engine.scheduler.fingerprint() == before


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


# B20


@settings(max_examples=15)
@given(
    prompts=st.lists(
        st.tuples(st.integers(1, 24), st.integers(0, 2), st.integers(1, 14)),
        min_size=1,
        max_size=10,
    ),
    num_usable_blocks=st.integers(6, 10),
    budget=st.integers(4, 24),
    num_in_flight=st.integers(1, 3),
)
def test_b20_under_eviction_every_request_gets_the_tokens_of_its_solo_run(
    prompts: list[tuple[int, int, int]], num_usable_blocks: int, budget: int, num_in_flight: int
) -> None:
    """In a tiny pool with shared prefixes and plans in flight, no block is read after its reuse."""
    engine = Engine(
        num_usable_blocks=num_usable_blocks,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=budget,
    )
    for index, (num_tokens, seed, max_tokens) in enumerate(prompts):
        max_tokens = min(max_tokens, 4 * num_usable_blocks + 1 - num_tokens)
        engine.add(f"r{index}", some_tokens(num_tokens, seed=seed), max_tokens=max_tokens)
    engine.run(num_in_flight=num_in_flight)
    engine.assert_as_if_alone()
    engine.assert_idle()


# B21


@attrs.define(eq=False)
class Farewells(KVConnector):
    """Brings nothing, and notes whose end it was told, with how many blocks."""

    ended: list[tuple[str, int]] = attrs.field(factory=list)

    def scheduler_side(self) -> _Farewell:
        return _Farewell(self.ended)

    def worker_side(self, rank: int = 0) -> NullWorkerConnector:
        return NullWorkerConnector()


class _Farewell(NullSchedulerConnector):
    def __init__(self, ended: list[tuple[str, int]]) -> None:
        super().__init__()
        self._ended = ended

    def request_finished(
        self, request: Request, uid: int, blocks: FinishedBlocks
    ) -> HandOver | None:
        self._ended.append((request.request_id, blocks.block_ids.size))
        return None


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_b21_an_abort_before_any_block_exists_tells_the_connector_once(num_steps: int) -> None:
    """A request behind a full pool ends cleanly, and its connector hears of it exactly once."""
    connector = Farewells()
    engine = Engine(num_usable_blocks=4, connector=connector)
    engine.add("full", 60, max_tokens=5)
    engine.step()
    engine.add("behind", 33)
    for _ in range(num_steps):
        engine.step()
    engine.abort("behind")
    engine.abort("behind")
    engine.run()
    assert engine.reason("behind") is FinishReason.ABORT
    assert sorted(connector.ended) == [("behind", 0), ("full", 4)]
    engine.assert_as_if_alone("full")
    engine.assert_idle()


# B24


class Mirror:
    """A copy of a prefix index, kept by its events alone."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.keys: dict[int, bytes] = {}

    def replay(self) -> list[BlockStored]:
        """Take in the events so far; return what they stored."""
        stored = []
        for event in self.engine.pool.events():
            match event:
                case BlockStored(key=key, parent_key=parent, block_id=block):
                    assert parent is None or parent in self.keys.values(), "an orphan"
                    assert block not in self.keys, "a reuse that nobody was told of"
                    self.keys[block] = key
                    stored.append(event)
                case BlockRemoved(key=key, block_id=block):
                    assert self.keys.pop(block) == key
                case CacheCleared():
                    self.keys.clear()
        return stored

    def assert_equal(self) -> None:
        blocks = np.arange(self.engine.pool.num_blocks, dtype=np.int32)
        index = dict(zip(blocks.tolist(), self.engine.pool.keys(blocks), strict=True))
        assert self.keys == {block: key for block, key in index.items() if key is not None}

    def step(self) -> None:
        """Plan, look, run, take in, and compare."""
        output = self.engine.schedule()
        before = dict(self.keys)
        # Only what a load brought is announced before the step's result.
        for event in self.replay():
            assert event.block_id not in before
            slots = self.engine.runner.kv_caches.buffer[event.block_id]
            assert self.is_written(slots), "announced before its data was there"
        self.engine.execute(output)
        self.engine.land()
        for event in self.replay():
            assert self.is_written(self.engine.runner.kv_caches.buffer[event.block_id])
        self.assert_equal()

    @staticmethod
    def is_written(slots: npt.NDArray[np.uint64]) -> bool:
        return bool((slots != POISON).all())


def test_b24_events_keep_a_mirror_equal_to_the_index() -> None:
    """Over 200 requests with loads, aborts and resets, what events tell is what the pool has."""
    rng = np.random.default_rng(24)
    pair = Pair.start(
        num_usable_blocks=24, enable_events=True, max_num_seqs=4, max_num_batched_tokens=64
    )
    mirrors = [Mirror(pair.prefill), Mirror(pair.decode)]
    for index in range(200):
        prompt = some_tokens(int(rng.integers(1, 70)), seed=int(rng.integers(6)))
        if rng.random() < 0.5:
            pair.prefill.add(
                f"p{index}",
                prompt,
                max_tokens=1,
                kv_transfer_params={"do_remote_decode": True},
            )
            while not pair.prefill.ends[f"p{index}"]:
                # Blocks that were handed over are free again once the decode engine has them.
                for mirror in mirrors:
                    mirror.step()
            handed = pair.prefill.end(f"p{index}").kv_transfer_params
            pair.decode.add(f"r{index}", prompt, max_tokens=8, kv_transfer_params=handed)
        else:
            pair.decode.add(f"r{index}", prompt, max_tokens=8)
        if rng.random() < 0.1:
            pair.decode.abort(f"r{rng.integers(index + 1)}")
        if rng.random() < 0.02:
            pair.decode.scheduler.reset_prefix_cache(preempt_running=True)
        mirrors[1].step()
    while any(mirror.engine.scheduler.has_requests() for mirror in mirrors):
        for mirror in mirrors:
            mirror.step()
    stats = pair.decode.scheduler.stats()
    assert stats.num_external_tokens > 0
    assert stats.num_preemptions > 0
    pair.decode.assert_idle()
    pair.prefill.assert_idle()


def test_b24_a_block_is_announced_when_the_step_that_writes_it_is_in() -> None:
    """With two plans in flight, each result announces the blocks of its own step."""
    engine = Engine(enable_events=True, max_num_batched_tokens=16, max_num_seqs=1)
    engine.add("x", 48, max_tokens=1)
    engine.dispatch()
    engine.dispatch()
    assert engine.pool.events() == []
    for num_stored in (1, 2):
        engine.land()
        (event,) = engine.pool.events()
        assert isinstance(event, BlockStored)
        assert (event.parent_key is None) == (num_stored == 1)
