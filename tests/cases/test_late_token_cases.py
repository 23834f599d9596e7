"""Faults of results that come after their request has moved on."""

from __future__ import annotations

import pytest
from harness import Engine
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import DEPTHS, END, Pipeline

from pdcore.request import FinishReason
from pdcore.scheduler import SkipCode

# D1


def test_d1_a_token_in_flight_of_a_preempted_request_is_kept_once() -> None:
    """It is delivered when it lands, and the request does not run before, nor draws it again."""
    engine = Engine(num_usable_blocks=5, block_size=4)
    engine.add("first", 8, max_tokens=5)
    engine.add("a", 8, max_tokens=5)
    assert engine.dispatch() == {"first": 8, "a": 8}
    # Both need a third block and one is left: the last to start gives way, its token pending.
    assert engine.dispatch() == {"first": 1}
    assert engine.scheduler.stats().num_preemptions == 1
    assert engine.dispatch() == {"first": 1}
    assert engine.scheduler.explain("a").code is SkipCode.WAITING_FOR_OUTPUT
    engine.land()
    assert engine.tokens["a"] == engine.solo("a")[:1]
    engine.run(num_in_flight=2)
    assert engine.end("a").num_preemptions == 1
    engine.assert_as_if_alone()
    engine.assert_idle()


def test_d1_a_token_that_will_never_come_is_not_waited_for() -> None:
    """The step that was to draw it failed after the request was preempted: it begins anew."""
    faults = [RuntimeError("the device hiccuped")]
    engine = Engine(
        num_usable_blocks=5,
        block_size=4,
        runner={"step_fault": lambda plan: faults.pop() if faults else None},
    )
    engine.add("first", 8, max_tokens=5)
    engine.add("a", 8, max_tokens=5)
    pipeline = Pipeline(engine, depth=2)
    with pytest.raises(RuntimeError, match="hiccuped"):
        pipeline.step()
    assert engine.scheduler.stats().num_preemptions >= 1
    pipeline.run()
    engine.assert_as_if_alone()
    engine.assert_idle()


@settings(max_examples=60)
@given(
    depth=st.sampled_from(DEPTHS),
    block_size=st.sampled_from([1, 2, 4]),
    num_usable_blocks=st.integers(8, 16),
    prompts=st.lists(st.integers(1, 12), min_size=2, max_size=4),
    max_tokens=st.integers(1, 9),
)
def test_d1_preemption_with_tokens_in_flight_changes_no_token(
    depth: int, block_size: int, num_usable_blocks: int, prompts: list[int], max_tokens: int
) -> None:
    """In any small pool, with any number of plans under way, no token is lost or repeated."""
    engine = Engine(num_usable_blocks=num_usable_blocks, block_size=block_size)
    room = num_usable_blocks * block_size
    for index, num_tokens in enumerate(prompts):
        if num_tokens + max_tokens <= room:
            engine.add(f"r{index}", num_tokens, max_tokens=max_tokens)
    Pipeline(engine, depth=depth).run()
    engine.assert_as_if_alone()
    engine.assert_idle()


# D2


@pytest.mark.parametrize("depth", DEPTHS)
def test_d2_results_of_a_cancelled_request_never_reach_one_with_the_same_id(depth: int) -> None:
    """With the old one's plans still under way, the new one's tokens are its own, all of them."""
    engine = Engine(max_num_seqs=1)
    pipeline = Pipeline(engine, depth=depth)
    engine.add("x", 8, max_tokens=20)
    pipeline.step()
    assert len(pipeline.queue) == depth - 1
    engine.abort("x")
    (event,) = engine.scheduler.drain()
    assert event.finish_reason is FinishReason.ABORT
    engine.add("x", 12, max_tokens=5)
    pipeline.run()
    engine.assert_as_if_alone()
    engine.assert_idle()


# D4


def test_d4_a_reset_after_a_full_drain_loses_no_token() -> None:
    """Nothing is in flight, so the first token after the reset is the next of the answer."""
    engine = Engine()
    pipeline = Pipeline(engine, depth=2)
    engine.add("x", 20, max_tokens=8)
    pipeline.step()
    for result in pipeline.queue.drain():
        for event in result.outputs:
            engine._take(event)
    num_before = len(engine.tokens["x"])
    assert num_before == 2
    assert engine.scheduler.reset_prefix_cache(preempt_running=True)
    engine.scheduler.check()
    pipeline.step()
    assert engine.tokens["x"] == engine.solo("x")[: num_before + 1]
    pipeline.run()
    # The prompt and both tokens were computed again, and nothing else.
    assert engine.scheduler.stats().num_scheduled_tokens == (20 + 7) + (20 + 1)
    engine.assert_as_if_alone()
    engine.assert_idle()


@pytest.mark.parametrize("num_in_flight", DEPTHS)
def test_d4_a_reset_with_steps_in_flight_keeps_exactly_their_tokens(num_in_flight: int) -> None:
    """Each result that lands brings its one token; the request starts again after the last."""
    engine = Engine()
    engine.add("x", 20, max_tokens=8)
    for _ in range(num_in_flight):
        engine.dispatch()
    engine.scheduler.pause()
    assert engine.scheduler.reset_prefix_cache(preempt_running=True)
    assert engine.dispatch() == {}
    engine.scheduler.resume()
    for num_landed in range(num_in_flight):
        assert engine.dispatch() == {}
        engine.land()
        assert engine.tokens["x"] == engine.solo("x")[: num_landed + 1]
    assert engine.dispatch() == {"x": 20 + num_in_flight}
    engine.run()
    engine.assert_as_if_alone()
    engine.assert_idle()


# D9


@pytest.mark.parametrize("depth", [2, 3])
def test_d9_blocks_and_row_of_a_finished_request_pass_on_behind_its_last_step(depth: int) -> None:
    """Who gets them runs in a step after every one that names the old owner."""
    engine = Engine(
        num_usable_blocks=4,
        block_size=4,
        max_num_seqs=1,
        enable_prefix_caching=False,
        runner={"script": lambda name, place: END if (name, place) == ("a", 9) else None},
    )
    engine.add("a", 8, max_tokens=8, eos_token_id=END)
    engine.add("b", 13, max_tokens=3)
    pipeline = Pipeline(engine, depth=depth)
    while engine.scheduler.status("a") is not None:
        pipeline.step()
    # A's last token came from its second step; the steps behind that one were for nothing.
    assert len(engine.tokens["a"]) == 2
    pipeline.run()
    names = [
        new.request_id for plan in pipeline.executor.executed for new in plan.scheduled_new_reqs
    ]
    assert names == ["a", "b"]
    runs_a = [plan.rows.size and plan.epochs[0] == 1 for plan in pipeline.executor.executed]
    assert sum(map(bool, runs_a)) == 1 + depth
    engine.assert_as_if_alone()
    engine.assert_idle()


# D11


@pytest.mark.parametrize("num_chunks", [1, 2, 3])
@pytest.mark.parametrize("depth", DEPTHS)
def test_d11_an_abort_between_the_final_chunk_and_its_result_ends_once(
    num_chunks: int, depth: int
) -> None:
    """One finish event, no token after it, nothing left; who waited for the blocks gets them."""
    engine = Engine(
        num_usable_blocks=3 * num_chunks, block_size=4, max_num_batched_tokens=12, max_num_seqs=2
    )
    engine.add("a", 12 * num_chunks, max_tokens=2)
    for _ in range(num_chunks):
        assert engine.dispatch() == {"a": 12}
    engine.add("b", 8, max_tokens=4)
    engine.abort("a")
    for _ in range(depth - 1):
        engine.dispatch()
    engine.run(num_in_flight=depth)
    assert engine.reason("a") is FinishReason.ABORT
    assert engine.tokens["a"] == []
    engine.assert_as_if_alone("b")
    engine.assert_idle()
