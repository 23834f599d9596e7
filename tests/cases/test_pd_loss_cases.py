"""Faults of peers that go, and of loads that fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness import Engine
from pd_pair import BLOCK_SIZE, HAND_OVER, LEASE_S, Pair, prompt_of

from pdcore.connector.loopback import LoopbackConnector, LoopbackFabric, LoopbackFaults
from pdcore.connector.null import NullConnector
from pdcore.request import FinishReason
from pdcore.scheduler import SkipCode

# C20, C21


def test_c21_a_peer_that_restarts_fails_what_is_in_flight_and_serves_what_comes_anew() -> None:
    """One load in flight, one queued, one still to come: each ends right, nothing is left."""
    pair = Pair(faults=LoopbackFaults(delay_polls=5), decode={"max_num_parked": 1})
    decode = pair.decode
    params = [pair.hand_over(f"r{index}", prompt_of(3, seed=index)) for index in range(2)]
    for index, ticket in enumerate(params):
        prompt = prompt_of(3, seed=index)
        decode.add(f"r{index}", prompt, kv_transfer_params=ticket)
    pair.turn(decode)
    assert decode.scheduler.explain("r1").code is SkipCode.TOO_MANY_PARKED
    pair.fabric.restart("prefill")
    pair.run()
    assert [decode.end(f"r{index}").num_external_tokens for index in range(2)] == [0, 0]
    pair.send("new", prompt_of(3, seed=5))
    pair.run()
    assert decode.end("new").num_external_tokens == 3 * BLOCK_SIZE - 1
    decode.assert_as_if_alone()
    pair.assert_idle()


def test_c20_a_dead_or_silent_peer_holds_up_no_other() -> None:
    """One of two prefill engines is gone: the other's load is served, and the pair goes on."""
    pair = Pair(
        faults=lambda load: LoopbackFaults(lose=load.request.request_id == "silent"),
        decode={"load_timeout_s": 50.0},
    )
    second = pair.join("second")
    for name in ("dead", "silent"):
        pair.send(name, prompt_of(3, seed=len(pair.decode.requests)))
    prompt = prompt_of(3, seed=7)
    second.add("good", prompt, max_tokens=1, kv_transfer_params=HAND_OVER)
    second.step()
    params = second.end("good").kv_transfer_params
    pair.decode.add("good", prompt, kv_transfer_params=params)
    began = pair.clock.now()
    pair.fabric.kill("prefill")
    while not pair.decode.ends["good"]:
        pair.turn(pair.decode)
    assert pair.clock.now() == began
    assert pair.decode.end("good").num_external_tokens == 3 * BLOCK_SIZE - 1
    pair.run(pair.decode)
    pair.decode.assert_as_if_alone()
    pair.decode.assert_idle()


# C27


LOAD_FAILURES: dict[str, tuple[Callable[[Pair], None], LoopbackFaults, str]] = {
    "silence": (lambda pair: None, LoopbackFaults(lose=True), "no completion within 20 s"),
    "transport": (lambda pair: None, LoopbackFaults(fail="cable pulled"), "cable pulled"),
    "partial": (
        lambda pair: None,
        LoopbackFaults(num_valid_tokens=16),
        "only 16 of 47 tokens arrived",
    ),
    "dead": (
        lambda pair: pair.fabric.kill("prefill"),
        LoopbackFaults(delay_polls=3),
        "engine 'prefill' is gone",
    ),
    "restarted": (
        lambda pair: pair.fabric.restart("prefill"),
        LoopbackFaults(delay_polls=3),
        "engine 'prefill' restarted",
    ),
    "lapsed": (
        lambda pair: pair.clock.advance(LEASE_S) and None,
        LoopbackFaults(delay_polls=3),
        "its lease of 30 s ended",
    ),
}


@pytest.mark.parametrize("kind", LOAD_FAILURES)
def test_c27_a_load_that_fails_ends_its_request_with_the_cause(kind: str) -> None:
    """Neither "stop" nor "length", no token, and words that fit this failure and no other."""
    happen, faults, words = LOAD_FAILURES[kind]
    pair = Pair(
        faults=faults,
        decode={"on_load_failure": "fail", "load_timeout_s": 100.0 if kind == "lapsed" else 20.0},
    )
    pair.send("a", prompt_of(3))
    pair.turn(pair.decode)
    happen(pair)
    pair.run(pair.decode)
    end = pair.decode.end("a")
    assert (end.finish_reason, pair.decode.tokens["a"]) == (FinishReason.ERROR, [])
    assert str(end.cause).startswith("remote KV could not be loaded: ")
    others = [other for name, (_, _, other) in LOAD_FAILURES.items() if name != kind]
    assert words in str(end.cause)
    assert not any(other in str(end.cause) for other in others)
    pair.decode.assert_idle()


@pytest.mark.parametrize("max_load_retries", [1, 2])
def test_c27_with_tries_left_a_failed_load_is_not_the_end(max_load_retries: int) -> None:
    """Under the policy "fail" too, the request fails only when its last try has failed."""
    pair = Pair(
        faults=lambda load: LoopbackFaults(
            fail="cable" if load.transfer.attempt <= max_load_retries else None
        ),
        decode={"on_load_failure": "fail", "max_load_retries": max_load_retries},
    )
    pair.send("a", prompt_of(3))
    pair.run()
    assert pair.decode.end("a").num_external_tokens == 3 * BLOCK_SIZE - 1
    pair.decode.assert_as_if_alone()
    pair.assert_idle()


@pytest.mark.parametrize("kind", ["raises", "keeps nothing"])
def test_c27_a_hand_over_that_fails_is_no_success(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A prefill for another engine that leaves nothing to it ends with an error that says so."""
    if kind == "raises":
        fabric = LoopbackFabric()
        connector = LoopbackConnector(fabric, engine_id="p", block_size=BLOCK_SIZE)
        engine = Engine(connector=connector)
        engine.scheduler._core.connector._grant = None  # type: ignore[union-attr]
    else:
        engine = Engine(connector=NullConnector())
    engine.add("a", prompt_of(3), max_tokens=1, kv_transfer_params=HAND_OVER)
    engine.add("plain", 20, max_tokens=3)
    output = engine.schedule()
    engine.execute(output)
    result = engine.land()
    place = result.request_ids.index("a")
    assert result.finish_reasons[place] == FinishReason.ERROR
    assert engine.reason("a") is FinishReason.ERROR
    assert engine.end("a").kv_transfer_params is None
    words = "request_finished() raised TypeError" if kind == "raises" else "kept nothing of its 48"
    assert f"its KV could not be handed over: {words}" in str(engine.end("a").cause).replace(
        "the connector ", ""
    )
    engine.run()
    engine.assert_as_if_alone("plain")
    engine.assert_idle()
