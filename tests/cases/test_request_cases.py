"""Faults in a request's life: its limits, its id, its end."""

from __future__ import annotations

from typing import Any

import pytest
from harness import Engine

from pdcore.errors import DuplicateRequest, InvalidRequest
from pdcore.request import FinishReason, SamplingParams

PIPELINE_DEPTHS = [1, 2, 3]


# A18


@pytest.mark.parametrize("num_in_flight", PIPELINE_DEPTHS)
@pytest.mark.parametrize("max_tokens", [1, 2, 3])
@pytest.mark.parametrize("num_prompt_tokens", [1, 15, 16, 17])
def test_a18_a_request_is_never_scheduled_past_its_last_token(
    num_prompt_tokens: int, max_tokens: int, num_in_flight: int
) -> None:
    """However many plans are in flight, a request gets exactly max_tokens and one finish event."""
    engine = Engine()
    engine.add("x", num_prompt_tokens, max_tokens=max_tokens)
    engine.run(num_in_flight=num_in_flight)
    engine.assert_as_if_alone()
    engine.assert_idle()
    planned = [plan["x"] for plan in engine.plans if plan]
    assert planned == [num_prompt_tokens] + [1] * (max_tokens - 1)


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_a18_fewer_than_one_token_is_refused(max_tokens: int) -> None:
    """A request for no token is invalid, and the message says what a prefill uses instead."""
    with pytest.raises(InvalidRequest, match="prefill for hand-over uses 1"):
        SamplingParams(max_tokens=max_tokens)


# A25


@pytest.mark.parametrize("num_in_flight", PIPELINE_DEPTHS)
@pytest.mark.parametrize("as_eos", [True, False], ids=["eos", "stop id"])
@pytest.mark.parametrize("first_stop", [1, 2, 3, 4])
def test_a25_nothing_stops_a_request_before_min_tokens(
    first_stop: int, as_eos: bool, num_in_flight: int
) -> None:
    """A stop token before the third goes into the output and ends nothing; from then on it ends."""
    num_prompt_tokens = 8

    def script(request_id: str, position: int) -> int | None:
        return 2 if position >= num_prompt_tokens + first_stop - 1 else None

    engine = Engine(runner={"script": script})
    stops: dict[str, Any] = {"eos_token_id": 2} if as_eos else {"stop_token_ids": (2,)}
    engine.add("x", num_prompt_tokens, max_tokens=8, min_tokens=3, **stops)
    engine.run(num_in_flight=num_in_flight)
    engine.assert_as_if_alone()
    assert len(engine.tokens["x"]) == max(first_stop, 3)
    assert engine.reason("x") is FinishReason.STOP


@pytest.mark.parametrize("as_eos", [True, False], ids=["eos", "stop id"])
@pytest.mark.parametrize("min_tokens", [0, 1, 2, 3])
def test_a25_min_tokens_holds_for_a_token_that_lands_after_a_preemption(
    min_tokens: int, as_eos: bool
) -> None:
    """A token that was in flight when its request lost its row stops it by the same rule."""
    engine = Engine(runner={"script": lambda request_id, position: 2})
    stops: dict[str, Any] = {"eos_token_id": 2} if as_eos else {"stop_token_ids": (2,)}
    engine.add("x", 8, max_tokens=8, min_tokens=min_tokens, **stops)
    engine.dispatch()
    assert engine.scheduler.reset_prefix_cache(preempt_running=True)
    engine.land()
    engine.run()
    engine.assert_as_if_alone()
    assert len(engine.tokens["x"]) == max(min_tokens, 1)


# A27


def test_a27_an_id_in_use_is_refused_and_its_owner_is_unharmed() -> None:
    """Adding an id twice raises; the first request goes on; after its end the id is free again."""
    engine = Engine()
    engine.add("x", 8)
    engine.step()
    with pytest.raises(DuplicateRequest):
        engine.add("x", 12)
    engine.run()
    engine.assert_as_if_alone()
    engine.add("x", 12)
    engine.run()
    engine.assert_as_if_alone()


@pytest.mark.parametrize("num_plans_before", [1, 2, 3])
def test_a27_old_results_and_old_aborts_never_touch_a_request_that_reuses_the_id(
    num_plans_before: int,
) -> None:
    """Results in flight for an aborted request are dropped, and its handle stays its own."""
    engine = Engine(max_num_seqs=1)
    old = engine.add("x", 8, max_tokens=8)
    for _ in range(num_plans_before):
        engine.dispatch()
    engine.abort("x")
    (event,) = engine.scheduler.drain()
    assert (event.request_id, event.finish_reason) == ("x", FinishReason.ABORT)
    new = engine.add("x", 12, max_tokens=8)
    assert new != old
    # The new one gets the old one's row while the old results are still out.
    assert engine.dispatch() == {"x": 12}
    for _ in range(num_plans_before):
        assert engine.land().outputs == ()
    engine.abort(old)
    engine.run(num_in_flight=2)
    engine.assert_as_if_alone()
    engine.assert_idle()


# A28


@pytest.mark.parametrize("num_steps_before", [0, 1, 2, 3])
@pytest.mark.parametrize("num_in_flight", PIPELINE_DEPTHS)
def test_a28_an_abort_between_plan_and_result_ends_a_request_once(
    num_steps_before: int, num_in_flight: int
) -> None:
    """In mid-prefill or decode: one finish event, blocks freed once, the others go on."""
    engine = Engine(num_usable_blocks=16, block_size=4, max_num_batched_tokens=10, max_num_seqs=2)
    engine.add("x", 18, max_tokens=8)
    engine.add("other", 6, max_tokens=8)
    for _ in range(num_steps_before):
        engine.step()
    for _ in range(num_in_flight):
        engine.dispatch()
    engine.abort("x", "x", "never seen")
    engine.run()
    engine.abort("x")
    assert engine.reason("x") is FinishReason.ABORT
    engine.assert_so_far_as_if_alone("x")
    engine.assert_as_if_alone("other")
    engine.assert_idle()
    assert engine.scheduler.drain() == ()
