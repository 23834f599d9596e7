"""`LoopbackConnector` over every bad wire: lost, late, doubled, cut off, and between dead peers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loopback_engines import (
    BLOCK_SIZE,
    LEASE_S,
    MAX_TOKENS,
    PROMPT,
    Engine,
    make_pair,
    solo,
)

from pdcore.connector import KVLoad
from pdcore.connector.loopback import LoopbackFabric, LoopbackFaults
from pdcore.errors import ConfigError
from pdcore.request import FinishReason, Request, RequestStatus, SamplingParams
from pdcore.testing import VirtualClock

# Bad wires.


def test_a_parked_request_does_not_stop_the_others():
    """While one request waits for its KV, another decodes."""
    prefill, decode, _ = make_pair(LoopbackFaults(delay_polls=6))
    decode.add(prefill.prefill())
    decode.driver.add(Request("other", [9, 8, 7], sampling=SamplingParams(max_tokens=5)))
    decode.step(5)
    assert decode.scheduler.status("r") is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert decode.driver.delivered["other"].finish_reason is FinishReason.LENGTH
    assert decode.driver.run()["r"].token_ids == solo(decode)


def test_a_delay_in_seconds_is_slept_through():
    """The loop is told when the load is due and needs no polls before it."""
    prefill, decode, fabric = make_pair(LoopbackFaults(delay_s=7.0))
    decode.add(prefill.prefill())
    decode.step()
    assert decode.scheduler.next_wakeup() == 7.0
    decode.driver.run()
    assert fabric.clock.now() == 7.0


def test_a_lost_completion_ends_with_the_load_timeout():
    """The request is computed here, and nothing stays behind on either side."""
    prefill, decode, fabric = make_pair(LoopbackFaults(lose=True), load_timeout_s=20.0)
    assert decode.decode(prefill.prefill()) == solo(decode)
    assert fabric.clock.now() == 20.0
    assert decode.scheduler.stats().num_failed_loads == 1
    prefill.step()
    assert (prefill.num_held, decode.num_held) == (0, 0)


def test_a_completion_that_comes_twice_counts_once():
    """The repetition is late news and changes nothing."""
    prefill, decode, _ = make_pair(LoopbackFaults(duplicate=True))
    assert decode.decode(prefill.prefill()) == solo(decode)
    assert decode.scheduler.stats().num_late_events == 1


def test_completions_in_another_order_go_to_the_right_requests():
    """Three loads that end newest first give three right answers."""
    prefill, decode, _ = make_pair(LoopbackFaults(delay_polls=2, reorder=True))
    prompts = {f"r{i}": [30 + i, *PROMPT] for i in range(3)}
    for name, prompt in prompts.items():
        decode.add(prefill.prefill(prompt, name), prompt, name)
    got = decode.driver.run()
    for name, prompt in prompts.items():
        request = Request(name, prompt, sampling=SamplingParams(max_tokens=MAX_TOKENS))
        assert got[name].token_ids == decode.runner.solo_tokens(request)
    assert decode.num_external_tokens == 3 * len(PROMPT)


@pytest.mark.parametrize("num_valid_tokens", [0, 5, 8, 17])
def test_a_partial_load_keeps_what_is_valid(num_valid_tokens: int):
    """Full blocks of the valid prefix are kept, and counted; the rest is computed."""
    prefill, decode, _ = make_pair(LoopbackFaults(num_valid_tokens=num_valid_tokens))
    assert decode.decode(prefill.prefill()) == solo(decode)
    stats, end = decode.scheduler.stats(), decode.driver.delivered["r"].end
    assert end is not None
    assert stats.num_failed_loads == 1
    num_kept = num_valid_tokens // BLOCK_SIZE * BLOCK_SIZE
    assert stats.num_external_tokens == end.num_external_tokens == num_kept
    assert stats.num_recomputed_tokens == len(PROMPT) - 1 - num_kept


def test_a_failed_load_may_end_the_request():
    """The application may choose an error, which names the cause."""
    prefill, decode, _ = make_pair(LoopbackFaults(fail="cable pulled"), on_load_failure="fail")
    decode.add(prefill.prefill())
    end = decode.driver.run()["r"].end
    assert end is not None
    assert end.finish_reason is FinishReason.ERROR
    assert "cable pulled" in (end.cause or "")


def test_a_failed_load_may_be_tried_again():
    """The faults of the second attempt are its own."""
    prefill, decode, _ = make_pair(
        lambda load: LoopbackFaults(fail="once" if load.transfer.attempt == 1 else None),
        max_load_retries=1,
    )
    assert decode.decode(prefill.prefill()) == solo(decode)
    assert decode.scheduler.stats().num_failed_loads == 1
    assert decode.num_external_tokens == len(PROMPT) - 1


# Cancelled loads.


def test_a_cancelled_load_gives_its_blocks_back_at_once():
    """Where a load can be called back, one more step ends the quarantine."""
    prefill, decode, _ = make_pair(LoopbackFaults(delay_polls=50))
    decode.add(prefill.prefill())
    decode.step()
    decode.driver.abort(["r"])
    decode.step()
    assert decode.pool.counts().quarantined > 0
    decode.step()
    assert decode.pool.counts().quarantined == 0
    assert not decode.scheduler.has_requests()


def test_late_data_lands_in_quarantined_blocks_only():
    """A load that cannot be called back writes after the abort, to blocks nobody has."""
    prefill, decode, _ = make_pair(LoopbackFaults(delay_polls=4, late_write=True))
    params = prefill.prefill()
    decode.add(params)
    decode.step()
    decode.driver.abort(["r"])
    decode.step()
    [hold] = decode.pool.holds()
    other = Request("other", [1, 2, 3, 4, 5, 6], sampling=SamplingParams(max_tokens=8))
    decode.driver.add(other)
    sent = prefill.runner.kv_caches.buffer[params["block_ids"][:4]].tolist()
    has_landed_while_held = False
    while decode.num_held:
        decode.step()
        landed = decode.runner.kv_caches.buffer[hold.block_ids[:4]].tolist()
        has_landed_while_held |= landed == sent and bool(decode.num_held)
    assert has_landed_while_held
    assert decode.driver.run()["other"].token_ids == decode.runner.solo_tokens(other)


def test_a_load_that_never_ends_is_cut_off():
    """A quarantine that is older than its limit ends by force."""
    prefill, decode, fabric = make_pair(
        LoopbackFaults(lose=True, late_write=True), quarantine_timeout_s=9.0
    )
    decode.add(prefill.prefill())
    decode.step()
    decode.driver.abort(["r"])
    assert decode.driver.run()["r"].finish_reason is FinishReason.ABORT
    assert fabric.clock.now() == 9.0
    assert decode.num_held == 0


def test_a_load_that_was_planned_and_taken_back_never_starts():
    """An abandoned step takes its load with it; the next one starts another attempt."""
    prefill, decode, _ = make_pair()
    decode.add(prefill.prefill())
    decode.scheduler.abandon(decode.scheduler.schedule())
    assert decode.driver.run()["r"].token_ids == solo(decode)
    assert decode.num_external_tokens == len(PROMPT) - 1
    assert decode.scheduler.stats().num_failed_loads == 0


@pytest.mark.parametrize("end", ["is reported", "is lost with its step"])
def test_a_cancelled_load_that_has_ended_keeps_nobody_awake(end: str):
    """An order about a load that the worker knows no more leaves nothing due behind."""
    prefill, decode, fabric = make_pair()
    decode.add(prefill.prefill())
    output = decode.scheduler.schedule()
    decode.runner.execute_model(output)
    result = decode.runner.sample_tokens(None)
    decode.driver.abort(["r"])
    if end == "is reported":
        decode.scheduler.update_from_output(output, result)
    else:
        decode.scheduler.abandon(output, dispatched=True)
    decode.step(5)
    fabric.clock.advance(100.0)
    assert not decode.scheduler.has_requests()
    assert decode.scheduler.next_wakeup() is None
    assert not decode.scheduler.has_work()


# Dead peers.


def test_a_dead_peer_costs_one_computation():
    """Loads in flight fail at once when the peer is gone."""
    prefill, decode, fabric = make_pair(LoopbackFaults(delay_polls=9))
    decode.add(prefill.prefill())
    decode.step()
    fabric.kill("p")
    assert decode.driver.run()["r"].token_ids == solo(decode)
    assert fabric.clock.now() == 0.0


def test_a_peer_that_restarts_keeps_no_promise():
    """Old tickets are refused, and the restarted engine lets its blocks go."""
    prefill, decode, fabric = make_pair(LoopbackFaults(delay_s=20.0))
    params = prefill.prefill()
    decode.add(params)
    decode.step()
    fabric.restart("p")
    prefill.step()
    assert prefill.num_held == 0
    decode.step()
    assert decode.driver.run()["r"].token_ids == solo(decode)
    assert decode.scheduler.stats().num_failed_loads == 1
    assert fabric.clock.now() == 0.0


def test_a_dead_peer_that_restarts_serves_again():
    """What it computes from then on can be loaded."""
    prefill, decode, fabric = make_pair()
    fabric.kill("p")
    fabric.restart("p")
    assert decode.decode(prefill.prefill()) == solo(decode)
    assert decode.num_external_tokens == len(PROMPT) - 1


def test_a_function_that_chooses_no_faults_is_told_so():
    """It names the request, and what to return."""
    prefill, decode, _ = make_pair(lambda load: None)  # type: ignore[arg-type,return-value]
    decode.add(prefill.prefill())
    with pytest.raises(ConfigError, match="returned None for request 'r'"):
        decode.step(3)


def test_a_new_engine_under_an_old_name_is_another_one():
    """Tickets of a former life are refused; those of the new one work."""
    prefill, decode, fabric = make_pair()
    old = prefill.prefill()
    new_life = Engine(fabric, "p")
    assert decode.decode(old) == solo(decode)
    assert decode.num_external_tokens == 0
    prompt = [1, *PROMPT]
    assert decode.decode(new_life.prefill(prompt), prompt) == solo(decode, prompt)
    assert decode.num_external_tokens == len(prompt) - 1


def test_another_model_is_refused():
    """Caches with different fingerprints exchange nothing; the cause names both."""
    fabric = LoopbackFabric(clock=VirtualClock())
    prefill = Engine(fabric, "p", model_name="other")
    decode = Engine(fabric, "d", on_load_failure="fail")
    decode.add(prefill.prefill())
    end = decode.driver.run()["r"].end
    assert end is not None
    assert "other-uint64" in (end.cause or "")
    assert "fake-uint64" in (end.cause or "")


# All of it together.

FAULTS = st.builds(
    LoopbackFaults,
    delay_polls=st.integers(0, 3),
    delay_s=st.sampled_from([0.0, 0.0, 5.0, 45.0]),
    lose=st.sampled_from([False, False, False, True]),
    duplicate=st.booleans(),
    reorder=st.booleans(),
    fail=st.sampled_from([None, None, "pulled"]),
    num_valid_tokens=st.sampled_from([None, None, 0, 6, 13]),
    late_write=st.booleans(),
)
EVENTS = st.lists(st.sampled_from(["prefill", "decode", "abort", "restart", "time"]), max_size=12)


@settings(max_examples=60)
@given(st.lists(FAULTS, min_size=1, max_size=6), EVENTS, st.integers(0, 1), st.data())
def test_no_fault_ever_gives_a_wrong_token(
    faults: list[LoopbackFaults], events: list[str], max_load_retries: int, data: st.DataObject
):
    """Whatever the wire does, each request ends once, with a beginning of its solo tokens, and
    in the end nobody holds a block."""
    chosen = {}

    def choose(load: KVLoad) -> LoopbackFaults:
        return chosen.setdefault(load.transfer, faults[len(chosen) % len(faults)])

    prefill, decode, fabric = make_pair(choose, max_load_retries=max_load_retries)
    for number in range(4):
        prompt = [*PROMPT[: data.draw(st.integers(1, len(PROMPT)))], number % 2]
        decode.add(prefill.prefill(prompt, f"r{number}"), prompt, f"r{number}")
    for event in events:
        match event:
            case "prefill":
                prefill.step()
            case "decode":
                decode.step()
            case "abort":
                decode.driver.abort([f"r{data.draw(st.integers(0, 3))}"])
            case "restart":
                fabric.restart("p")
            case "time":
                fabric.clock.advance(LEASE_S / 2)  # type: ignore[attr-defined]
    for one in decode.driver.run().values():
        expected = decode.runner.solo_tokens(one.request)
        assert one.token_ids == expected[: len(one.token_ids)]
        assert one.finish_reason is FinishReason.ABORT or one.token_ids == expected
    prefill.driver.run()
    assert (prefill.num_held, decode.num_held) == (0, 0)


def test_a_loop_sleeps_while_one_loads_and_another_finds_no_blocks() -> None:
    """With one request parked and one that finds no room, a step without effect leaves no work."""
    fabric = LoopbackFabric(clock=VirtualClock(), faults=LoopbackFaults(delay_s=5.0))
    prefill, decode = Engine(fabric, "p"), Engine(fabric, "d", num_blocks=8)
    other = tuple(token + 100 for token in PROMPT)
    decode.add(prefill.prefill(), name="a")
    decode.add(prefill.prefill(other, name="b"), other, name="b")
    decode.step(3)
    assert not decode.scheduler.has_work()
