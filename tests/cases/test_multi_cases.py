"""Faults that users of inference engines met where one request has several connectors."""

from __future__ import annotations

import itertools

import pytest
from harness import Engine, some_tokens
from pd_pair import BLOCK_SIZE, LEASE_S, ScriptedConnector

from pdcore.clock import VirtualClock
from pdcore.connector import MultiConnector
from pdcore.connector.loopback import LoopbackConnector, LoopbackFabric, LoopbackFaults
from pdcore.messages import TransferKey
from pdcore.request import RequestStatus

LOADING = RequestStatus.WAITING_FOR_REMOTE_KVS
HAND_OVER = {"do_remote_decode": True}
WIRES = ("near", "far")

# C6


@pytest.mark.parametrize("order", [("near", "far"), ("far", "near")])
@pytest.mark.parametrize("num_reports", [1, 2])
def test_c6_a_hand_over_by_two_ends_once_and_when_both_are_done(
    num_reports: int, order: tuple[str, str]
) -> None:
    """However often each says that it is done, in one step or another: one send, after both."""
    for is_one_step in (True, False):
        children = {name: ScriptedConnector() for name in WIRES}
        engine = Engine(num_usable_blocks=4, connector=MultiConnector(children))
        engine.add("a", some_tokens(3 * BLOCK_SIZE), max_tokens=1)
        engine.step()
        for index, name in enumerate(order):
            assert engine.scheduler.stats().num_held_for_peers == 1
            children[name].side.report(sent=["send-a"] * num_reports)
            if not (is_one_step and index == 0):
                engine.step()
        assert engine.scheduler.stats().num_held_for_peers == 0
        assert engine.scheduler.stats().num_late_events == 0
        assert engine.scheduler.stats().connector.num_dropped_events == 2 * (num_reports - 1)
        engine.assert_idle()


@pytest.mark.parametrize("reporters", list(itertools.product(WIRES, repeat=3)))
def test_c6_a_load_is_ended_once_and_only_by_the_one_that_brings_it(
    reporters: tuple[str, ...],
) -> None:
    """What the other one says of it, and what is said again, is dropped and counted."""
    children = {name: ScriptedConnector() for name in WIRES}
    engine = Engine(connector=MultiConnector(children))
    engine.add("a", some_tokens(3 * BLOCK_SIZE), kv_transfer_params={})
    engine.step()
    load = children["near"].side.loads["a"].transfer
    assert not children["far"].side.loads
    has_ended = False
    for name in reporters:
        assert (engine.scheduler.status("a") is LOADING) is not has_ended
        children[name].side.report(failed=[load, TransferKey(99, 1)])
        engine.step()
        has_ended |= name == "near"
    stats = engine.scheduler.stats()
    assert stats.num_late_events == 0
    assert stats.connector.num_dropped_events == 2 * len(reporters) - has_ended
    assert stats.num_failed_loads == has_ended


@pytest.mark.parametrize("prefers", WIRES)
def test_c6_two_wires_bring_a_prompt_once(prefers: str) -> None:
    """Both hand over, one loads, both report twice: one load, one send, the right tokens."""
    clock = VirtualClock()
    faults = LoopbackFaults(duplicate=True, delay_polls=1)
    fabrics = {name: LoopbackFabric(clock=clock, faults=faults) for name in WIRES}

    def engine(name: str, order: tuple[str, ...]) -> Engine:
        wires = {
            wire: LoopbackConnector(
                fabrics[wire], engine_id=name, block_size=BLOCK_SIZE, lease_s=LEASE_S
            )
            for wire in order
        }
        return Engine(connector=MultiConnector(wires), clock=clock, block_size=BLOCK_SIZE)

    prefill = engine("p", WIRES)
    decode = engine("d", tuple(sorted(WIRES, key=lambda wire: wire != prefers)))
    prompt = some_tokens(3 * BLOCK_SIZE + 5)
    prefill.add("a", prompt, max_tokens=1, kv_transfer_params=HAND_OVER)
    prefill.step()
    assert prefill.scheduler.stats().num_held_for_peers == 1
    params = prefill.end("a").kv_transfer_params
    decode.add("a", prompt, max_tokens=6, kv_transfer_params=params)
    for _ in range(12):
        decode.step()
        prefill.step()
    decode.assert_as_if_alone()
    assert decode.end("a").num_external_tokens == prompt.size - 1
    stats = decode.scheduler.stats()
    assert stats.num_late_events == 0
    assert stats.connector.loads.num_started == stats.connector.loads.num_finished == 1
    assert stats.connector.by_connector[prefers].loads.num_finished == 1
    assert stats.connector.num_dropped_events == 1
    tickets = prefill.scheduler.stats().connector.tickets
    assert (tickets.num_granted, tickets.num_accepted, tickets.num_released) == (2, 1, 1)
    assert prefill.scheduler.stats().num_late_events == 0
    prefill.assert_idle()
    decode.assert_idle()
