"""Faults of blocks that are read, reused or given up at the wrong time."""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt
import pytest
from harness import Engine, some_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from pd_pair import Pair

from pdcore.connector.base import (
    ExternalMatch,
    FinishedBlocks,
    HandOver,
    KVConnector,
    SchedulerConnector,
    WorkerConnector,
)
from pdcore.connector.loopback import LoopbackConnector, LoopbackFaults
from pdcore.connector.null import NullSchedulerConnector, NullWorkerConnector
from pdcore.request import FinishReason, Request, RequestStatus

BlockIds = npt.NDArray[np.int32]


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


@pytest.mark.parametrize("num_local_tokens", [0, 16])
def test_b3_a_store_that_claims_the_whole_prompt_still_leaves_one_token(
    num_local_tokens: int,
) -> None:
    """Of an external hit on everything the last token is computed, and the chain stays whole."""
    pair = Pair(wrap=ClaimsAll)
    prompt = some_tokens(32)
    decode = pair.decode
    if num_local_tokens:
        decode.add("before", prompt[: num_local_tokens + 1], max_tokens=1)
        decode.run()
    decode.add("x", prompt, max_tokens=2, kv_transfer_params=pair.hand_over("handed over", prompt))
    decode.run()
    assert [plan["x"] for plan in decode.plans if "x" in plan] == [1, 1]
    assert decode.end("x").num_external_tokens == 31 - num_local_tokens
    decode.add("longer", some_tokens(48), max_tokens=1)
    decode.run()
    assert decode.end("longer").num_cached_tokens == 32
    decode.assert_as_if_alone()
    decode.assert_idle()


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
    pair = Pair(faults=LoopbackFaults(delay_s=10.0))
    prompt = some_tokens(33)
    params = pair.hand_over("handed over", prompt)
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
