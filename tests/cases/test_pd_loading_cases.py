"""Faults that users of inference engines met while KV was on its way to a decode engine."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any, Literal

import attrs
import numpy as np
import pytest
from harness import Engine, some_tokens
from hypothesis import given
from hypothesis import strategies as st
from pd_pair import BLOCK_SIZE, Pair, ScriptedConnector

from pdcore.connector.base import (
    ExternalMatch,
    KVConnector,
    KVLoad,
    SchedulerConnector,
    WorkerConnector,
)
from pdcore.connector.loopback import LoopbackConnector, LoopbackFaults
from pdcore.messages import TransferKey, TransferReport
from pdcore.request import FinishReason, Request, RequestStatus
from pdcore.scheduler import Priority, SkipCode

LOADING = RequestStatus.WAITING_FOR_REMOTE_KVS
HAND_OVER = {"do_remote_decode": True}
NEVER = LoopbackFaults(lose=True, late_write=True)


def prompt_of(num_blocks: int, *, more: int = 0, seed: int = 0) -> np.ndarray:
    """A prompt that fills so many blocks, and ``more`` tokens of the next."""
    return some_tokens(num_blocks * BLOCK_SIZE + more, seed=seed)


def only(name: str, faults: LoopbackFaults) -> Callable[[KVLoad], LoopbackFaults]:
    """Faults for the loads of one request."""
    return lambda load: faults if load.request.request_id == name else LoopbackFaults()


# C1


@pytest.mark.parametrize("can_be_called_back", [True, False])
@pytest.mark.parametrize("on_load_failure", ["recompute", "fail"])
def test_c1_a_load_that_is_never_reported_ends_at_its_deadline(
    on_load_failure: str, can_be_called_back: bool
) -> None:
    """It is cancelled and its request goes on or fails; its blocks wait for the connector."""
    pair = Pair(
        faults=only("a", attrs.evolve(NEVER, late_write=not can_be_called_back)),
        decode={
            "load_timeout_s": 100.0,
            "quarantine_timeout_s": 50.0,
            "on_load_failure": on_load_failure,
        },
    )
    decode = pair.decode
    params = pair.hand_over("b", prompt_of(2, seed=1))
    pair.send("a", prompt_of(3))
    decode.add("b", prompt_of(2, seed=1), max_tokens=200, kv_transfer_params=params)
    began = pair.clock.now()
    pair.turn(decode)
    while pair.clock.now() < began + 99:
        assert decode.step() == ({"b": 1} if decode.tokens["b"] else {})
    assert decode.scheduler.status("a") is LOADING
    pair.clock.advance(began + 100 - pair.clock.now())
    decode.dispatch()
    assert decode.scheduler.status("a") is not LOADING
    # Nothing can be written to a block that somebody else may have.
    assert decode.scheduler.stats().num_quarantined_blocks == 3
    decode.land()
    decode.step()
    assert bool(decode.scheduler.stats().num_quarantined_blocks) is not can_be_called_back
    pair.run()
    decode.assert_as_if_alone("b")
    if on_load_failure == "recompute":
        decode.assert_as_if_alone("a")
        assert decode.end("a").num_external_tokens == 0
    else:
        assert "no completion within 100 s" in str(decode.end("a").cause)
    pair.assert_idle()


def test_c1_an_idle_engine_wakes_for_the_deadline() -> None:
    """With nothing else to do the loop sleeps until the deadline, and the empty step keeps it."""
    pair = Pair(faults=NEVER, decode={"load_timeout_s": 100.0, "quarantine_timeout_s": 7.0})
    pair.send("a", prompt_of(3))
    began = pair.clock.now()
    num_turns = pair.run(pair.decode)
    # The deadline, and then the quarantine's; between them the lease is renewed now and then.
    assert pair.clock.now() == began + 107.0
    assert num_turns < 40
    pair.decode.assert_as_if_alone()
    pair.run()
    pair.assert_idle()


# C2


@pytest.mark.parametrize("num_polls", [1, 4])
def test_c2_blocks_of_an_aborted_load_are_nobodys_while_it_may_write(num_polls: int) -> None:
    """B waits until A's load is reported, and what lands late is not seen by B."""
    pair = Pair(
        faults=LoopbackFaults(delay_polls=num_polls, late_write=True),
        decode={"num_usable_blocks": 4, "max_quarantined_share": 1.0},
    )
    decode = pair.decode
    params = pair.hand_over("a", prompt_of(3))
    decode.add("a", prompt_of(3), kv_transfer_params=params)
    decode.dispatch()
    assert decode.scheduler.status("a") is LOADING
    decode.abort("a")
    (hold,) = decode.pool.holds()
    decode.add("b", prompt_of(2, more=8, seed=1), max_tokens=8)
    decode.land()
    buffer = decode.runner.kv_caches.buffer
    sent = pair.prefill.runner.kv_caches.buffer[params["block_ids"]]
    has_landed = False
    while decode.scheduler.stats().num_quarantined_blocks:
        assert decode.scheduler.status("b") is RequestStatus.WAITING
        has_landed = bool(np.isin(sent, buffer[hold.block_ids]).all())
        pair.turn(decode)
    # It did land, and before anybody else had the blocks.
    assert has_landed
    pair.run()
    assert decode.reason("a") is FinishReason.ABORT
    assert decode.tokens["a"] == []
    decode.assert_as_if_alone("b")
    pair.assert_idle()


@given(
    num_polls=st.integers(0, 6),
    num_turns=st.integers(0, 6),
    num_usable_blocks=st.integers(4, 9),
    late_write=st.booleans(),
    order=st.permutations(["abort", "add"]),
)
def test_c2_whenever_the_abort_comes_nobody_reads_what_lands_late(
    num_polls: int, num_turns: int, num_usable_blocks: int, late_write: bool, order: list[str]
) -> None:
    """Before the load, in it or behind it: the other request's tokens are its own."""
    faults = LoopbackFaults(delay_polls=num_polls, late_write=late_write)
    pair = Pair(faults=only("a", faults), decode={"num_usable_blocks": num_usable_blocks})
    pair.send("a", prompt_of(3))
    for _ in range(num_turns):
        pair.turn(pair.decode)
    for action in order:
        if action == "abort":
            pair.decode.abort("a")
        else:
            pair.decode.add("b", prompt_of(2, more=8, seed=1), max_tokens=20)
    pair.run()
    pair.decode.assert_as_if_alone("b")
    pair.assert_idle()


# C3


def test_c3_a_load_that_is_never_reported_is_cut_off_and_its_blocks_come_back() -> None:
    """After its limit the quarantine ends by force; a report after that is ignored."""
    pair = Pair(
        faults=only("a", attrs.evolve(NEVER, duplicate=True)),
        decode={
            "num_usable_blocks": 4,
            "quarantine_timeout_s": 20.0,
            "max_quarantined_share": 1.0,
        },
    )
    decode = pair.decode
    pair.send("a", prompt_of(3))
    began = pair.clock.now()
    pair.turn(decode)
    decode.abort("a")
    decode.add("b", prompt_of(2, more=8, seed=1), max_tokens=8)
    while not decode.tokens["b"]:
        assert pair.clock.now() <= began + 20.0
        if not pair.turn(decode):
            pair.sleep(decode)
    assert pair.clock.now() == began + 20.0
    pair.run()
    decode.assert_as_if_alone("b")
    assert decode.scheduler.stats().num_late_events == 1
    assert decode.scheduler.stats().num_cut_off_loads == 1
    pair.assert_idle()


def test_c3_a_connector_that_stays_silent_is_told_again_and_nothing_is_freed() -> None:
    """Without its word that nothing writes, the blocks are never given to anybody."""
    connector = ScriptedConnector()
    engine = Engine(
        num_usable_blocks=4,
        connector=connector,
        quarantine_timeout_s=20.0,
        max_quarantined_share=1.0,
    )
    engine.add("a", prompt_of(3), kv_transfer_params={})
    engine.step()
    transfer = connector.side.loads["a"].transfer
    engine.abort("a")
    engine.add("b", prompt_of(2, seed=1))
    for _ in range(50):
        engine.step()
    assert connector.side.cancelled == [transfer]
    assert connector.side.cut_off_loads == [transfer] * 2
    assert engine.scheduler.stats().num_cut_off_loads == 1
    assert engine.scheduler.explain("b").code is SkipCode.NO_BLOCKS
    assert engine.scheduler.stats().num_quarantined_blocks == 3
    connector.side.report(failed=[transfer])
    engine.step()
    assert engine.tokens["b"]


# C5

A_LOAD, B_LOAD, UNKNOWN = TransferKey(1, 1), TransferKey(2, 1), TransferKey(99, 1)


@pytest.mark.parametrize(
    "reports",
    [
        "sent received",
        "received, sent",
        "sent, received",
        "sent, failed, received, sent",
        "received failed sent",
    ],
)
def test_c5_reports_about_the_dead_and_the_unknown_change_nothing(reports: str) -> None:
    """A's blocks are freed once, when its load is quiet; names never heard of are counted."""
    connector = ScriptedConnector()
    engine = Engine(num_usable_blocks=16, connector=connector)
    for name, seed in (("a", 0), ("b", 1)):
        engine.add(name, prompt_of(3, seed=seed), kv_transfer_params={})
    engine.add("c", prompt_of(2, seed=2), max_tokens=30)
    engine.step()
    engine.abort("a")
    told: list[str] = []
    for words in (report.split() for report in reports.split(", ")):
        connector.side.report(
            sent=["send-a", "send-nobody"] if "sent" in words else [],
            received=[A_LOAD, UNKNOWN] if "received" in words else [],
            failed=[A_LOAD, UNKNOWN] if "failed" in words else [],
        )
        told += words
        engine.step()
        assert engine.scheduler.status("b") is LOADING
        is_quiet = {"received", "failed"} & set(told)
        assert engine.scheduler.stats().num_quarantined_blocks == (0 if is_quiet else 3)
    # Each names two; one of them all, the end of a cancelled load, meant something.
    assert engine.scheduler.stats().num_late_events == 2 * len(told) - 1
    # The worker brings nothing, so B must be computed.
    connector.side.report(failed=[B_LOAD])
    for _ in range(40):
        engine.step()
    engine.assert_as_if_alone("b", "c")
    connector.side.report(sent=["send-b", "send-c", "send-b"])
    engine.step()
    engine.assert_idle()


@pytest.mark.parametrize("num_reports", [1, 2, 3])
def test_c5_the_end_of_a_hand_over_counts_once(num_reports: int) -> None:
    """Repeated in one report or over several, it frees its blocks one time."""
    for repeats in itertools.product((1, 2), repeat=num_reports):
        connector = ScriptedConnector()
        engine = Engine(num_usable_blocks=4, connector=connector)
        engine.add("a", prompt_of(3), max_tokens=1)
        engine.step()
        assert engine.scheduler.stats().num_held_for_peers == 1
        assert engine.scheduler.has_requests()
        for num_times in repeats:
            connector.side.report(sent=["send-a"] * num_times)
            engine.step()
            assert engine.scheduler.stats().num_held_for_peers == 0
        assert engine.scheduler.stats().num_late_events == sum(repeats) - 1
        engine.assert_idle()


# C7


@pytest.mark.parametrize("delays", [(0, 0), (0, 3), (3, 0), (2, 2), (0, 9), (9, 0)], ids=str)
@pytest.mark.parametrize("depth", [1, 2])
def test_c7_two_loads_that_fill_the_pool_both_end(delays: tuple[int, int], depth: int) -> None:
    """Each wants one block more when it is there; whichever lands first, both are served."""
    by_name = dict(zip("ab", delays, strict=True))
    pair = Pair(
        faults=lambda load: LoopbackFaults(delay_polls=by_name[load.request.request_id]),
        decode={"num_usable_blocks": 7},
    )
    pair.send("a", prompt_of(4), max_tokens=10)
    pair.send("b", prompt_of(3, seed=1), max_tokens=10)
    pair.turn(pair.decode)
    # The 4 + 1 and 3 + 1 blocks that they come to would not fit, but what they load does.
    assert pair.decode.pool.num_free_blocks == 0
    pair.decode.run(num_in_flight=depth)
    pair.decode.assert_as_if_alone()
    pair.run()
    pair.assert_idle()


def test_c7_a_landed_load_is_not_hidden_behind_a_head_that_does_not_fit() -> None:
    """A needs 4 blocks and 3 are free: B, which holds the other 5, goes on and ends."""
    pair = Pair(faults=LoopbackFaults(delay_polls=3), decode={"num_usable_blocks": 8})
    decode = pair.decode
    params = pair.hand_over("b", prompt_of(5))
    decode.add("b", prompt_of(5), kv_transfer_params=params, arrival_time=2.0)
    pair.turn(decode)
    assert decode.scheduler.status("b") is LOADING
    # By its arrival it belongs ahead of B.
    decode.add("a", prompt_of(4, seed=1), arrival_time=1.0)
    pair.turn(decode)
    assert decode.scheduler.explain("a").code is SkipCode.NO_BLOCKS
    pair.run()
    assert decode.end("b").num_external_tokens == 5 * BLOCK_SIZE - 1
    decode.assert_as_if_alone()
    pair.assert_idle()


def test_c7_an_urgent_newcomer_does_not_lock_in_what_has_landed() -> None:
    """Of a better priority and too large for the pool's rest, it waits for the loaded request."""
    pair = Pair(
        faults=LoopbackFaults(delay_polls=3),
        decode={"num_usable_blocks": 8, "policy": Priority()},
    )
    decode = pair.decode
    pair.send("b", prompt_of(5), priority=5)
    pair.turn(decode)
    decode.add("urgent", prompt_of(4, seed=1), priority=0)
    order: list[str] = []
    while decode.scheduler.has_requests():
        order += [name for name in decode.dispatch() if name not in order]
        decode.land()
    assert order == ["b", "urgent"]
    decode.assert_as_if_alone()
    pair.run()
    pair.assert_idle()


def two_loads_that_lack_a_block(num_usable_blocks: int, **request: Any) -> Pair:
    """X runs; the loads of A and B bring three of the four blocks that each computes in."""
    pair = Pair(
        faults=LoopbackFaults(delay_polls=30), decode={"num_usable_blocks": num_usable_blocks}
    )
    params = [pair.hand_over(name, prompt_of(3, more=1, seed=ord(name))) for name in "ab"]
    pair.decode.add("x", 8, **request)
    pair.turn(pair.decode)
    for name, ticket in zip("ab", params, strict=True):
        prompt = prompt_of(3, more=1, seed=ord(name))
        pair.decode.add(name, prompt, kv_transfer_params=ticket)
    pair.turn(pair.decode)
    assert pair.decode.scheduler.status("a") is LOADING
    return pair


def test_c7_no_load_takes_the_block_that_another_will_need() -> None:
    """Four blocks are left and B needs them all, but one of them is for A's last token."""
    pair = two_loads_that_lack_a_block(8, max_tokens=6)
    skip = pair.decode.scheduler.explain("b")
    assert (skip.code, skip.needed, skip.available) == (SkipCode.NO_BLOCKS, 4, 3)
    pair.run()
    pair.decode.assert_as_if_alone()
    pair.assert_idle()


def test_c7_loads_locked_in_by_blocks_that_are_kept_for_a_peer_give_way() -> None:
    """X grew into their last blocks and is kept for its reader: B is rolled back, A goes on."""
    pair = two_loads_that_lack_a_block(9, max_tokens=28, kv_transfer_params=HAND_OVER)
    decode, began = pair.decode, pair.clock.now()
    assert decode.scheduler.status("b") is LOADING
    while not (decode.ends["a"] and decode.ends["b"]):
        pair.turn(decode)
        if not decode.tokens["a"]:
            assert decode.scheduler.stats().num_running <= 1
    # Nobody waited for the lease on X's blocks.
    assert pair.clock.now() == began
    assert decode.scheduler.stats().num_held_for_peers == 1
    assert pair.connectors["decode"].calls["update_state_after_alloc", "b"] == 1
    decode.assert_as_if_alone()
    pair.run()
    pair.assert_idle()


@given(data=st.data(), depth=st.integers(1, 2), num_usable_blocks=st.integers(4, 10))
def test_c7_whatever_is_loaded_and_however_long_it_takes_everybody_ends(
    data: st.DataObject, depth: int, num_usable_blocks: int
) -> None:
    """Loads of any sizes in a small pool: none waits for ever, and each token is right."""
    delays: dict[str, int] = {}
    pair = Pair(
        faults=lambda load: LoopbackFaults(delay_polls=delays[load.request.request_id]),
        decode={"num_usable_blocks": num_usable_blocks, "max_num_seqs": 3},
    )
    for index in range(data.draw(st.integers(2, 5))):
        name = f"r{index}"
        num_tokens = data.draw(st.integers(1, (num_usable_blocks - 1) * BLOCK_SIZE))
        delays[name] = data.draw(st.integers(0, 5))
        prompt = some_tokens(num_tokens, seed=data.draw(st.integers(0, 1)))
        max_tokens = data.draw(st.integers(1, BLOCK_SIZE + 1))
        if data.draw(st.booleans()):
            pair.send(name, prompt, max_tokens=max_tokens)
        else:
            pair.decode.add(name, prompt, max_tokens=max_tokens)
        if data.draw(st.booleans()):
            pair.turn(pair.decode)
    pair.decode.run(num_in_flight=depth)
    pair.decode.assert_as_if_alone()
    pair.run()
    pair.assert_idle()


# C8


def test_c8_landed_without_a_block_for_the_next_token_it_waits_with_its_kv() -> None:
    """X took the block that its last prompt token needs: it waits, and nobody is asked again."""
    pair = Pair(faults=LoopbackFaults(delay_polls=10), decode={"num_usable_blocks": 5})
    decode, calls = pair.decode, pair.connectors["decode"].calls
    params = pair.hand_over("a", prompt_of(3, more=1))
    decode.add("x", 8, max_tokens=24)
    pair.turn(decode)
    decode.add("a", prompt_of(3, more=1), kv_transfer_params=params)
    pair.turn(decode)
    # The load took three blocks; X grows into the fifth.
    assert decode.scheduler.status("a") is LOADING
    while decode.scheduler.status("a") is LOADING:
        pair.turn(decode)
    asked = calls["get_num_new_matched_tokens", "a"]
    for _ in range(8):
        pair.turn(decode)
        assert decode.scheduler.status("a") is RequestStatus.WAITING
        assert decode.scheduler.explain("a").code is SkipCode.NO_BLOCKS
        assert decode.pool.num_free_blocks == 0
    pair.run()
    assert calls["get_num_new_matched_tokens", "a"] == asked
    assert calls["update_state_after_alloc", "a"] == 1
    assert (decode.end("a").num_external_tokens, decode.end("a").num_preemptions) == (48, 0)
    decode.assert_as_if_alone()
    pair.assert_idle()


def test_c8_loaded_and_preempted_it_is_computed_like_any_other() -> None:
    """The fourth block is busy after its first token: it begins anew, without a second load."""
    pair = Pair(decode={"num_usable_blocks": 4})
    decode, calls = pair.decode, pair.connectors["decode"].calls
    decode.add("x", 5, max_tokens=10)
    pair.turn(decode)
    pair.send("a", prompt_of(3), max_tokens=6)
    while not decode.scheduler.stats().num_preemptions:
        pair.turn(decode)
    assert decode.scheduler.status("a") is RequestStatus.PREEMPTED
    pair.run()
    assert calls["update_state_after_alloc", "a"] == 1
    assert decode.end("a").num_preemptions >= 1
    decode.assert_as_if_alone()
    pair.assert_idle()


# C22


@pytest.mark.parametrize("on_load_failure", ["recompute", "fail"])
@pytest.mark.parametrize("has_other", [False, True])
def test_c22_requests_that_share_a_bad_block_both_go_on_from_what_is_good(
    on_load_failure: str, has_other: bool
) -> None:
    """One block of three arrived for A and B: both compute from 16, and nothing else wakes them."""
    pair = Pair(
        faults=LoopbackFaults(num_valid_tokens=BLOCK_SIZE),
        decode={"on_load_failure": on_load_failure},
    )
    decode, prompt = pair.decode, prompt_of(3)
    params = [pair.hand_over(name, prompt) for name in "ab"]
    for name, ticket in zip("ab", params, strict=True):
        decode.add(name, prompt, kv_transfer_params=ticket)
    if has_other:
        decode.add("c", 20, max_tokens=8)
    starts: dict[str, int] = {}
    while decode.scheduler.has_requests():
        assert decode.scheduler.has_work()
        output = decode.schedule()
        for new in output.scheduled_new_reqs:
            starts.setdefault(new.request_id, new.num_computed_tokens)
        decode.execute(output)
        decode.land()
    if on_load_failure == "recompute":
        assert [starts[name] for name in "ab"] == [BLOCK_SIZE] * 2
        assert decode.scheduler.stats().num_recomputed_tokens == 2 * (3 * BLOCK_SIZE - 1 - 16)
        decode.assert_as_if_alone()
    else:
        assert [decode.tokens[name] for name in "ab"] == [[], []]
        assert all("only 16 of 47" in str(decode.end(name).cause) for name in "ab")
        if has_other:
            decode.assert_as_if_alone("c")
    assert decode.scheduler.stats().num_failed_loads == 2
    pair.run()
    pair.assert_idle()


def test_c22_a_block_that_did_not_arrive_is_in_no_index() -> None:
    """Between the failure and the recompute a third request hits the good block alone."""
    pair = Pair(
        faults=LoopbackFaults(num_valid_tokens=BLOCK_SIZE),
        decode={"on_load_failure": "fail"},
    )
    decode, prompt = pair.decode, prompt_of(3)
    pair.send("a", prompt)
    pair.run()
    decode.add("later", prompt)
    pair.run()
    assert decode.end("later").num_cached_tokens == BLOCK_SIZE
    decode.assert_as_if_alone("later")
    pair.assert_idle()


@pytest.mark.parametrize("num_valid_tokens", [0, 15, 16, 31, 32, 47])
def test_c22_the_longest_valid_prefix_is_kept_beside_local_hits(num_valid_tokens: int) -> None:
    """One block is here, the load brings some of the rest: what is whole is not computed again."""
    pair = Pair(faults=LoopbackFaults(num_valid_tokens=num_valid_tokens))
    decode, prompt = pair.decode, prompt_of(4)
    decode.add("local", prompt[:17], max_tokens=1)
    decode.run()
    pair.send("a", prompt)
    starts: list[int] = []
    while decode.scheduler.has_requests():
        output = decode.schedule()
        starts += [new.num_computed_tokens for new in output.scheduled_new_reqs]
        decode.execute(output)
        decode.land()
    assert starts == [max(16, num_valid_tokens // 16 * 16)]
    decode.assert_as_if_alone()
    pair.run()
    pair.assert_idle()


class SynchronousWorker(WorkerConnector):
    """Has each load done when `start_load_kv` returns; some it cannot do."""

    def __init__(self, inner: WorkerConnector, num_broken: int) -> None:
        self._inner = inner
        self._num_broken = num_broken
        self._report = TransferReport()

    def register_kv_caches(self, caches: Any) -> None:
        self._inner.register_kv_caches(caches)

    def start_load_kv(self, meta: Any) -> None:
        if meta.loads and self._num_broken:
            self._num_broken -= 1
            raise OSError("the store is gone")
        self._inner.start_load_kv(meta)
        self._report = self._inner.get_finished()

    def get_finished(self) -> TransferReport:
        report, self._report = self._report, TransferReport()
        return report


class Synchronous(KVConnector):
    """A loopback connector for whose loads nobody waits."""

    def __init__(self, inner: LoopbackConnector, num_broken: int = 0) -> None:
        self._inner = inner
        self._num_broken = num_broken

    def scheduler_side(self) -> SchedulerConnector:
        side = self._inner.scheduler_side()
        find = side.get_num_new_matched_tokens

        def find_at_once(request: Any, num_local_tokens: int) -> ExternalMatch:
            return attrs.evolve(find(request, num_local_tokens), is_async=False)

        side.get_num_new_matched_tokens = find_at_once  # type: ignore[method-assign]
        return side

    def worker_side(self, rank: int = 0) -> SynchronousWorker:
        return SynchronousWorker(self._inner.worker_side(rank), self._num_broken)


def synchronous_pair(num_broken: int = 0, **options: Any) -> tuple[Pair, Engine]:
    """A pair, and a second decode engine that loads at once."""
    pair = Pair()
    loopback = LoopbackConnector(pair.fabric, engine_id="sync", block_size=BLOCK_SIZE)
    connector = Synchronous(loopback, num_broken)
    return pair, Engine(connector=connector, clock=pair.clock, block_size=BLOCK_SIZE, **options)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_usable_blocks", [7, 30])
def test_c22_loads_that_are_done_at_once_work_with_steps_in_flight(
    depth: int, num_usable_blocks: int
) -> None:
    """A load in the step that starts its request: right tokens with plans made ahead."""
    pair, engine = synchronous_pair(num_usable_blocks=num_usable_blocks)
    for index in range(4):
        prompt = prompt_of(2, more=index, seed=index % 3)
        params = pair.hand_over(f"r{index}", prompt)
        engine.add(f"r{index}", prompt, max_tokens=12, kv_transfer_params=params)
    engine.run(num_in_flight=depth)
    assert engine.scheduler.stats().num_external_tokens > 0
    engine.assert_as_if_alone()
    engine.assert_idle()


@pytest.mark.parametrize("num_broken", [1, 2, 1000])
def test_c22_a_load_at_once_that_breaks_its_step_is_not_tried_for_ever(num_broken: int) -> None:
    """The step is taken back, its ticket is spent, and the other one loses one step."""
    pair, engine = synchronous_pair(num_broken)
    engine.add("other", 20, max_tokens=9)
    engine.step()
    params = pair.hand_over("a", prompt_of(3))
    engine.add("a", prompt_of(3), kv_transfer_params=params)
    num_failed = run_through_failures(engine)
    assert num_failed == 1
    engine.assert_as_if_alone()
    engine.assert_idle()


def run_through_failures(engine: Engine) -> int:
    """Run as a loop does that takes back what failed; return how many steps did."""
    num_failed = 0
    while engine.scheduler.has_requests():
        output = engine.schedule()
        try:
            engine.execute(output)
        except OSError:
            engine.scheduler.abandon(output, dispatched=True)
            engine.scheduler.check()
            num_failed += 1
            assert num_failed < 50, "the same step fails for ever"
            continue
        engine.land()
        engine._sleep()
    return num_failed


# C23


@pytest.mark.parametrize("delay_polls", [0, 3])
def test_c23_a_load_is_asked_for_once_an_admission(delay_polls: int) -> None:
    """Neither while it is under way nor when it landed is the connector asked again."""
    pair = Pair(faults=LoopbackFaults(delay_polls=delay_polls), decode={"max_num_seqs": 1})
    decode, calls = pair.decode, pair.connectors["decode"].calls
    decode.add("busy", 20, max_tokens=12)
    decode.step()
    pair.send("a", prompt_of(3))
    pair.run()
    # With the only row taken it is not looked at; when the row is free, it is asked once.
    assert calls["get_num_new_matched_tokens", "a"] == 1
    assert calls["update_state_after_alloc", "a"] == 1
    assert calls["request_finished", "a"] == 1
    decode.assert_as_if_alone()
    pair.assert_idle()


@pytest.mark.parametrize("max_load_retries", [0, 1, 3])
def test_c23_a_failed_load_is_tried_again_as_often_as_agreed(max_load_retries: int) -> None:
    """Each attempt asks once; after the last the prompt is computed and nobody is asked."""
    pair = Pair(faults=LoopbackFaults(fail="cable"), decode={"max_load_retries": max_load_retries})
    calls = pair.connectors["decode"].calls
    pair.send("a", prompt_of(3))
    pair.run()
    assert calls["get_num_new_matched_tokens", "a"] == max_load_retries + 1
    assert calls["update_state_after_alloc", "a"] == max_load_retries + 1
    assert pair.decode.scheduler.stats().num_failed_loads == max_load_retries + 1
    pair.decode.assert_as_if_alone()
    pair.assert_idle()


def test_c23_a_preempted_request_is_an_admission_of_its_own() -> None:
    """A reset is the one reason to ask again; what was redeemed is not offered twice."""
    pair = Pair()
    decode, calls = pair.decode, pair.connectors["decode"].calls
    pair.send("a", prompt_of(3), max_tokens=8)
    while not decode.tokens["a"]:
        pair.turn(decode)
    assert decode.scheduler.reset_prefix_cache(preempt_running=True)
    pair.run()
    assert calls["get_num_new_matched_tokens", "a"] == 2
    assert calls["update_state_after_alloc", "a"] == 1
    assert decode.end("a").num_external_tokens == 3 * BLOCK_SIZE - 1
    decode.assert_as_if_alone()
    pair.assert_idle()


# C28


class Troubled(KVConnector):
    """A connector one of whose methods raises, on some of its calls.

    Args:
        inner: does the work.
        method: of either half.
        when: which calls raise, by their number; calls about local requests do not count.
    """

    def __init__(self, inner: KVConnector, method: str, when: Callable[[int], bool]) -> None:
        self.num_raised = 0
        self._inner = inner
        self._method = method
        self._when = when
        self._num_calls = 0

    def scheduler_side(self) -> SchedulerConnector:
        return self._with_trouble(self._inner.scheduler_side())

    def worker_side(self, rank: int = 0) -> WorkerConnector:
        return self._with_trouble(self._inner.worker_side(rank))

    def _concerns(self, args: tuple[Any, ...]) -> bool:
        request = args[0] if args else None
        return not isinstance(request, Request) or request.kv_transfer_params is not None

    def _with_trouble(self, half: Any) -> Any:
        original = getattr(half, self._method, None)
        if original is None:
            return half

        def troubled(*args: Any, **kwargs: Any) -> Any:
            if not self._concerns(args):
                return original(*args, **kwargs)
            self._num_calls += 1
            if self._when(self._num_calls - 1):
                self.num_raised += 1
                raise OSError("the transport is gone")
            return original(*args, **kwargs)

        setattr(half, self._method, troubled)
        return half


@pytest.fixture
def quiet_log() -> Any:
    """What is logged once a step need not be printed."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


WORKER_METHODS = ["get_finished", "start_load_kv"]
SCHEDULER_METHODS = [
    "take_events",
    "build_connector_meta",
    "update_connector_output",
    "update_state_after_alloc",
    "get_num_new_matched_tokens",
    "request_finished",
    "next_wakeup",
    "has_pending",
    "cancel",
]


@pytest.mark.usefixtures("quiet_log")
@pytest.mark.parametrize("calls", ["first", "second", "every third"])
@pytest.mark.parametrize("method", WORKER_METHODS + SCHEDULER_METHODS)
def test_c28_a_transport_that_raises_costs_its_own_requests_alone(method: str, calls: str) -> None:
    """Whichever call raises, local requests end as ever, loaded ones with a cause or as ever."""
    when: dict[str, Callable[[int], bool]] = {
        "first": lambda n: n == 0,
        "second": lambda n: n == 1,
        "every third": lambda n: n % 3 == 2,
    }
    pair = Pair(faults=LoopbackFaults(delay_polls=2))
    loopback = LoopbackConnector(pair.fabric, engine_id="d", block_size=BLOCK_SIZE)
    connector = Troubled(loopback, method, when[calls])
    engine = Engine(
        connector=connector,
        clock=pair.clock,
        block_size=BLOCK_SIZE,
        load_timeout_s=20.0,
        quarantine_timeout_s=10.0,
    )
    for index in range(3):
        prompt = prompt_of(2, more=index, seed=index)
        params = pair.hand_over(f"r{index}", prompt)
        engine.add(f"r{index}", prompt, kv_transfer_params=params)
        engine.add(f"local{index}", 20, max_tokens=6)
    engine.add("gone", prompt_of(2), kv_transfer_params=pair.hand_over("gone", prompt_of(2)))
    num_steps = 0
    while not all(engine.ends.values()) and num_steps < 400:
        engine.scheduler.has_requests()
        engine.scheduler.has_work()
        output = engine.schedule()
        if num_steps == 0:
            engine.abort("gone")
        num_steps += 1
        try:
            engine.execute(output)
        except OSError:
            engine.scheduler.abandon(output, dispatched=True)
        else:
            engine.land()
        if not output.rows.size:
            engine.clock.advance(1.0)
    for _ in range(40):
        engine.scheduler.has_requests()
        engine.step()
    assert connector.num_raised or (calls != "first" and method == "cancel")
    engine.assert_as_if_alone(*(f"local{index}" for index in range(3)))
    for index in range(3):
        end = engine.end(f"r{index}")
        if end.finish_reason is FinishReason.LENGTH:
            engine.assert_as_if_alone(f"r{index}")
        else:
            assert "transport is gone" in str(end.cause)
    engine.scheduler.check()


@pytest.mark.usefixtures("quiet_log")
@pytest.mark.parametrize("on_load_failure", ["recompute", "fail"])
@pytest.mark.parametrize("num_raised", [1, 2, 1000])
def test_c28_no_step_relies_on_a_load_that_nobody_was_told_of(
    num_raised: int, on_load_failure: Literal["recompute", "fail"]
) -> None:
    """Without orders for a load that its step needs, it is planned anew, at last without it."""
    pair = Pair()
    loopback = LoopbackConnector(pair.fabric, engine_id="sync", block_size=BLOCK_SIZE)
    connector = Troubled(Synchronous(loopback), "build_connector_meta", lambda n: n < num_raised)
    engine = Engine(
        connector=connector,
        clock=pair.clock,
        block_size=BLOCK_SIZE,
        on_load_failure=on_load_failure,
    )
    for index in range(3):
        prompt = prompt_of(2, more=index, seed=index)
        params = pair.hand_over(f"r{index}", prompt)
        engine.add(f"r{index}", prompt, max_tokens=5, kv_transfer_params=params)
        engine.add(f"local{index}", 20, max_tokens=5)
    engine.run()
    engine.assert_as_if_alone(*(f"local{index}" for index in range(3)))
    are_lost = num_raised > 1
    for index in range(3):
        end = engine.end(f"r{index}")
        if are_lost and on_load_failure == "fail":
            assert end.finish_reason is FinishReason.ERROR
            assert "2 steps that were to begin it failed" in str(end.cause)
        else:
            engine.assert_as_if_alone(f"r{index}")
            assert bool(end.num_external_tokens) is not are_lost
    assert engine.scheduler.stats().num_failed_loads == (3 if are_lost else 0)
    engine.assert_idle()


class BreaksOnOrders(Troubled):
    """Its worker raises whenever it is to begin a load."""

    def __init__(self, inner: KVConnector) -> None:
        super().__init__(inner, "start_load_kv", lambda n: True)

    def _concerns(self, args: tuple[Any, ...]) -> bool:
        return bool(args[0].loads)


@pytest.mark.parametrize("on_load_failure", ["recompute", "fail"])
def test_c28_a_load_that_breaks_each_step_that_begins_it_costs_two_steps(
    on_load_failure: str,
) -> None:
    """A step may fail by chance; a load that takes down a second one is given up."""
    pair = Pair()
    loopback = LoopbackConnector(pair.fabric, engine_id="d", block_size=BLOCK_SIZE)
    engine = Engine(
        connector=BreaksOnOrders(loopback), clock=pair.clock, on_load_failure=on_load_failure
    )
    engine.add("local", 20, max_tokens=9)
    engine.step()
    params = pair.hand_over("a", prompt_of(3))
    engine.add("a", prompt_of(3), kv_transfer_params=params)
    assert run_through_failures(engine) == 2
    assert engine.scheduler.stats().num_failed_loads == 1
    engine.assert_as_if_alone("local")
    if on_load_failure == "recompute":
        engine.assert_as_if_alone("a")
    else:
        assert "2 steps that were to begin it failed" in str(engine.end("a").cause)
    engine.assert_idle()
    pair.run()
    pair.assert_idle()


@pytest.mark.usefixtures("quiet_log")
def test_c28_a_worker_that_never_reports_again_fails_its_loads_by_their_deadline() -> None:
    """With the poll broken for good the loaded requests are computed, and the rest runs on."""
    pair = Pair()
    loopback = LoopbackConnector(pair.fabric, engine_id="d", block_size=BLOCK_SIZE)
    connector = Troubled(loopback, "get_finished", lambda n: True)
    engine = Engine(connector=connector, clock=pair.clock, load_timeout_s=20.0)
    params = pair.hand_over("a", prompt_of(3))
    began = pair.clock.now()
    engine.add("a", prompt_of(3), kv_transfer_params=params)
    engine.add("local", 20, max_tokens=60)
    while not all(engine.ends.values()):
        engine.step()
    engine.assert_as_if_alone()
    assert engine.scheduler.stats().num_failed_loads == 1
    assert pair.clock.now() - began >= 20.0
    # Nobody said that nothing writes to its blocks, so they stay where they are.
    assert engine.scheduler.stats().num_quarantined_blocks == 3
