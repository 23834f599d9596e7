"""Faults of prefix caches: what is shared too early, with the wrong one, or announced."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from harness import Engine, some_tokens
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pd_pair import Pair

from pdcore.kvcache import (
    BlockRemoved,
    BlockStored,
    CacheCleared,
    PrefixHasher,
)
from pdcore.request import FinishReason
from pdcore.scheduler import Priority
from pdcore.testing import StaleKV
from pdcore.testing.chain import POISON

BlockIds = npt.NDArray[np.int32]


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
    shared = [PrefixHasher(16, secret=b"kept between peers") for _ in range(2)]
    assert keys(shared[0], prompt) == keys(shared[1], prompt)
    assert keys(shared[0], prompt) != keys(PrefixHasher(16, secret=b"kept between others"), prompt)
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
    pair = Pair(
        lease_s=1e6,
        num_usable_blocks=24,
        enable_events=True,
        max_num_seqs=4,
        max_num_batched_tokens=64,
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
