"""Faults of loads that are lost, late, or called off."""

from __future__ import annotations

import itertools

import attrs
import numpy as np
import pytest
from harness import Engine
from hypothesis import given
from hypothesis import strategies as st
from pd_pair import Pair, ScriptedConnector, only, prompt_of

from pdcore.connector.loopback import LoopbackFaults
from pdcore.messages import TransferKey
from pdcore.request import FinishReason, RequestStatus
from pdcore.scheduler import SkipCode

LOADING = RequestStatus.WAITING_FOR_REMOTE_KVS
NEVER = LoopbackFaults(lose=True, late_write=True)


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
