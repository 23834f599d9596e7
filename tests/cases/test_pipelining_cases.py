"""Faults that users of inference engines met with several steps under way, as smallest scenarios.

Two ways of driving: `Engine` hands over plans and results one at a time, where a case depends on
the exact moment; `BatchQueue` on an executor that lags, where it depends on the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
from harness import Engine
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import DEPTHS, END, MaskBlind, Pipeline

from grammars import CompilesAtOnce, text_of
from pdcore.errors import OutputMismatch
from pdcore.messages import GrammarBitmask, ModelRunnerOutput, SchedulerOutput
from pdcore.request import FinishReason
from pdcore.testing import PlanError
from simulated_executors import SimulatedExecutor, TimedExecutor

# D6


@settings(max_examples=40)
@given(
    structured=st.lists(st.booleans(), min_size=2, max_size=5),
    failing=st.integers(0, 4),
    fails_at=st.integers(8, 12),
    depth=st.sampled_from(DEPTHS),
)
def test_d6_a_row_that_the_worker_leaves_out_moves_no_mask_to_another_row(
    structured: list[bool], failing: int, fails_at: int, depth: int
) -> None:
    """Masks name (row, epoch): whoever is missing before a structured row, its text is its own."""

    def fault(request_id: str, position: int) -> str | None:
        return "NaN" if (request_id, position) == (f"r{failing}", fails_at) else None

    grammar = CompilesAtOnce(text_of)
    engine = Engine(grammar=grammar, runner={"row_fault": fault})
    texts = {f"r{i}": range(100 * i + 10, 100 * i + 16) for i in range(len(structured))}
    for (request_id, text), is_structured in zip(texts.items(), structured, strict=True):
        engine.add(request_id, 8, max_tokens=6, structured_output=text if is_structured else None)
    Pipeline(engine, depth=depth).run()
    for (request_id, text), is_structured in zip(texts.items(), structured, strict=True):
        expected = list(text) if is_structured else engine.solo(request_id)
        if request_id == f"r{failing}":
            assert engine.reason(request_id) is FinishReason.ERROR
            expected = expected[: len(engine.tokens[request_id])]
        assert engine.tokens[request_id] == expected
    engine.assert_idle()


def test_d6_the_order_of_a_masks_rows_means_nothing() -> None:
    """The runner finds each row's mask by its name."""
    engine = Engine(grammar=CompilesAtOnce(text_of))
    for index in range(3):
        engine.add(f"r{index}", 8, max_tokens=1, structured_output=[50 + index])
    output = engine.schedule()
    mask = engine.scheduler.get_grammar_bitmask(output)
    assert mask is not None
    shuffled = {name: getattr(mask, name)[[2, 0, 1]] for name in ("rows", "epochs", "bits")}
    engine.runner.execute_model(output)
    result = engine.runner.sample_tokens(attrs.evolve(mask, **shuffled))
    assert result.sampled_token_ids[:, 0].tolist() == [50, 51, 52]


# D7


@pytest.mark.parametrize("depth", DEPTHS)
def test_d7_a_mask_of_another_epoch_is_not_applied_and_not_believed(depth: int) -> None:
    """What was drawn without the right mask ends its request with a reason, not silently."""

    class Stale(SimulatedExecutor):
        def sample_tokens(self, bitmask: GrammarBitmask | None, *, non_block: bool = False) -> Any:
            if bitmask is not None:
                bitmask = attrs.evolve(bitmask, epochs=bitmask.epochs - 1)
            return super().sample_tokens(bitmask, non_block=non_block)

    engine = Engine(grammar=CompilesAtOnce(text_of))
    engine.add("a", 8, structured_output=[50, 51, 52, 53])
    engine.add("b", 8)
    Pipeline(engine, depth=depth, make_executor=Stale).run()
    assert engine.reason("a") is FinishReason.ERROR
    assert "grammar does not allow" in str(engine.end("a").cause)
    engine.assert_as_if_alone("b")
    engine.assert_idle()


def test_d7_a_result_with_drafts_that_nobody_planned_is_refused() -> None:
    """Two tokens for a row that was to draw one change nothing; the right result may still come."""
    engine = Engine()
    engine.add("a", 8, max_tokens=2)
    output = engine.schedule()
    engine.runner.execute_model(output)
    result = engine.runner.sample_tokens(None)
    twice = np.repeat(result.sampled_token_ids, 2, axis=1)
    before = engine.scheduler.fingerprint()
    with pytest.raises(OutputMismatch, match=r"sampled_token_ids \(1, 2\)"):
        engine.scheduler.update_from_output(output, attrs.evolve(result, sampled_token_ids=twice))
    assert engine.scheduler.fingerprint() == before
    for event in engine.scheduler.update_from_output(output, result).outputs:
        engine._take(event)
    engine.run()
    engine.assert_as_if_alone()


# D8


@pytest.mark.parametrize("depth", DEPTHS)
def test_d8_a_grammar_has_seen_exactly_the_tokens_that_were_emitted(depth: int) -> None:
    """The token that ends the text is the last it is told, whatever was in flight."""
    grammar = CompilesAtOnce(text_of)
    engine = Engine(grammar=grammar, num_usable_blocks=9, block_size=2)
    engine.add("plain", 6, max_tokens=12)
    engine.add("a", 6, max_tokens=9, eos_token_id=END, structured_output=[1, 2, END])
    Pipeline(engine, depth=depth).run()
    assert engine.reason("a") is FinishReason.STOP
    assert engine.tokens["a"] == grammar.matchers["a"].tokens == [1, 2, END]
    engine.assert_as_if_alone("plain")
    engine.assert_idle()


@pytest.mark.parametrize(
    ("drawn", "num_emitted"),
    [([1, 2, 9], 3), ([1, END], 2), ([1, 2, END, 9], 3), ([3], 1)],
    ids=["another token", "an early end", "the end", "the first token"],
)
@pytest.mark.parametrize("depth", DEPTHS)
def test_d8_a_token_that_the_grammar_rejects_ends_its_request_with_a_reason(
    drawn: list[int], num_emitted: int, depth: int
) -> None:
    """Of what a runner without masks draws, the first wrong token is the last, also an end."""
    grammar = CompilesAtOnce(text_of)
    script = {8 + place: token for place, token in enumerate(drawn)}
    engine = Engine(grammar=grammar, runner={"script": lambda name, place: script.get(place)})
    engine.add("a", 8, max_tokens=9, eos_token_id=END, structured_output=[1, 2, END])
    Pipeline(engine, depth=depth, make_executor=MaskBlind).run()
    assert engine.tokens["a"] == grammar.matchers["a"].tokens == drawn[:num_emitted]
    is_good = drawn[:num_emitted] == [1, 2, END]
    assert engine.reason("a") is (FinishReason.STOP if is_good else FinishReason.ERROR)
    if not is_good:
        assert f"does not allow token {drawn[num_emitted - 1]}" in str(engine.end("a").cause)
    engine.assert_idle()


@pytest.mark.parametrize("is_masked", [True, False])
def test_d8_a_late_token_of_a_preempted_request_is_judged_as_any_other(is_masked: bool) -> None:
    """The end that lands after a preemption stops the request if the grammar allows it there."""
    grammar = CompilesAtOnce(text_of)
    script = {8: END}
    engine = Engine(
        num_usable_blocks=5,
        block_size=4,
        grammar=grammar,
        runner={"script": lambda name, place: script.get(place) if name == "a" else None},
    )
    engine.add("first", 8, max_tokens=5)
    text = [END, 2] if is_masked else [1, 2]
    engine.add("a", 8, eos_token_id=END, structured_output=text)
    output = engine.schedule()
    engine.runner.execute_model(output)
    mask = engine.scheduler.get_grammar_bitmask(output) if is_masked else None
    engine._in_flight.append((output, engine.runner.sample_tokens(mask)))
    engine.dispatch()
    assert engine.scheduler.reset_prefix_cache(preempt_running=True)
    engine.land()
    assert engine.tokens["a"] == grammar.matchers["a"].tokens == [END]
    assert engine.reason("a") is (FinishReason.STOP if is_masked else FinishReason.ERROR)
    engine.run()
    engine.assert_as_if_alone("first")
    engine.assert_idle()


# D12


@pytest.mark.parametrize("depth", DEPTHS)
def test_d12_each_mask_knows_the_token_before_it_and_nobody_else_waits(depth: int) -> None:
    """A structured row is left out until its token is in; a plain one runs in every step."""
    grammar = CompilesAtOnce(text_of)
    engine = Engine(grammar=grammar)
    engine.add("a", 8, max_tokens=6, structured_output=[11, 12, 13, 14, 15, 16])
    engine.add("b", 8, max_tokens=24)
    pipeline = Pipeline(engine, depth=depth)
    pipeline.run()
    assert engine.tokens["a"] == [11, 12, 13, 14, 15, 16]
    assert grammar.matchers["a"].masked_after == [0, 1, 2, 3, 4, 5]
    # A plain request alone takes as many steps; A takes every depth-th.
    assert [names for names in pipeline.produced if "b" in names] == pipeline.produced[:24]
    assert [index for index, names in enumerate(pipeline.produced) if "a" in names] == [
        depth * place for place in range(6)
    ]
    engine.assert_as_if_alone("b")
    engine.assert_idle()


@pytest.mark.parametrize("depth", DEPTHS)
def test_d12_a_runner_that_ignores_masks_is_found_out(depth: int) -> None:
    """The structured request ends with the token that it should not have; the other is unharmed."""
    engine = Engine(grammar=CompilesAtOnce(text_of))
    engine.add("a", 8, structured_output=[11, 12, 13, 14])
    engine.add("b", 8)
    Pipeline(engine, depth=depth, make_executor=MaskBlind).run()
    assert engine.reason("a") is FinishReason.ERROR
    assert "which the runner drew nevertheless" in str(engine.end("a").cause)
    engine.assert_as_if_alone("b")
    engine.assert_idle()


# D13


@pytest.mark.parametrize("depth", DEPTHS)
def test_d13_the_pipe_stays_full_and_no_position_is_computed_twice(depth: int) -> None:
    """A decode row is in several plans under way, each one token further than the one before."""
    engine = Engine()
    for name in ("a", "b"):
        engine.add(name, 8, max_tokens=20)
    pipeline = Pipeline(engine, depth=depth)
    for num_tokens in range(1, 15):
        pipeline.step()
        assert len(engine.tokens["a"]) == len(engine.tokens["b"]) == num_tokens
        # What is under way now, and one more while the next step waits.
        assert len(pipeline.queue) == depth - 1
    pipeline.run()
    ends: dict[tuple[int, int], int] = {}
    for plan in pipeline.executor.executed:
        columns = (plan.rows, plan.epochs, plan.num_computed_tokens, plan.num_scheduled_tokens)
        for row, epoch, start, num_tokens in zip(*(c.tolist() for c in columns), strict=True):
            assert ends.get((row, epoch), 0) == start
            ends[row, epoch] = start + num_tokens
    assert list(ends.values()) == [27, 27]
    engine.assert_as_if_alone()


def test_d13_two_stages_are_busy_with_the_chunks_of_two_plans() -> None:
    """Chunks wait for no token: a stage takes the next one as the last leaves it."""
    engine = Engine(max_num_batched_tokens=16, max_num_seqs=4)

    def make_executor(runner: Any) -> TimedExecutor:
        return TimedExecutor(runner, clock=engine.clock, step_s=1.0, num_stages=2)

    for name in ("a", "b"):
        engine.add(name, 320, max_tokens=1)
    pipeline = Pipeline(engine, depth=2, make_executor=make_executor)
    pipeline.run()
    executor = pipeline.executor
    assert isinstance(executor, TimedExecutor)
    # 40 chunks; each stage misses only the first or the last second.
    assert engine.clock.now() == 41.0
    assert executor.busy_s == [40.0, 40.0]
    engine.assert_as_if_alone()


# D14


def _with_column(name: str, change: int) -> Callable[[SchedulerOutput], SchedulerOutput]:
    def tamper(output: SchedulerOutput) -> SchedulerOutput:
        return attrs.evolve(output, **{name: getattr(output, name) + change})

    return tamper


@pytest.mark.parametrize(
    "tamper",
    [
        _with_column("num_computed_tokens", 1),
        _with_column("num_computed_tokens", -1),
        _with_column("num_scheduled_tokens", 1),
        _with_column("epochs", 1),
        lambda output: attrs.evolve(output, samples=~output.samples),
    ],
    ids=["one token ahead", "one token behind", "one token more", "another tenant", "no draw"],
)
@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_d14_a_plan_that_counts_other_tokens_than_the_worker_is_refused(
    tamper: Callable[[SchedulerOutput], SchedulerOutput], num_steps: int
) -> None:
    """Computed tokens, known tokens and draws of every row are checked against the worker's own."""
    engine = Engine()
    engine.add("a", 8, max_tokens=20)
    for _ in range(num_steps):
        engine.step()
    with pytest.raises(PlanError):
        engine.runner.execute_model(tamper(engine.schedule()))


@pytest.mark.parametrize("change", [-1, 1])
def test_d14_a_chunk_that_begins_elsewhere_is_refused_though_its_end_is_right(change: int) -> None:
    """A token of the prompt would be skipped, or written a second time."""
    engine = Engine(max_num_batched_tokens=8, max_num_seqs=4)
    engine.add("a", 16)
    assert engine.step() == {"a": 8}
    output = _with_column("num_computed_tokens", change)(engine.schedule())
    with pytest.raises(PlanError, match="the worker computed 8"):
        engine.runner.execute_model(_with_column("num_scheduled_tokens", -change)(output))


@pytest.mark.parametrize("place", ["forward pass", "draw"])
def test_d14_a_step_that_the_worker_missed_is_noticed_in_the_next(place: str) -> None:
    """A lost step, and a lost draw, leave counts that the next plan contradicts."""
    engine = Engine()
    engine.add("a", 8, max_tokens=20)
    engine.step()
    missed = engine.schedule()
    if place == "draw":
        engine.runner.execute_model(missed)
    nexts = engine.schedule()
    with pytest.raises(PlanError):
        engine.runner.execute_model(nexts)


@pytest.mark.parametrize("depth", DEPTHS)
def test_d14_scheduler_and_worker_count_alike_in_every_plan(depth: int) -> None:
    """Tokens known, in flight and computed add up to the worker's count, through preemptions."""
    engine = Engine(num_usable_blocks=9, block_size=4)
    for index in range(4):
        engine.add(f"r{index}", 7, max_tokens=9)
    table = engine.scheduler._core.table
    planned: list[dict[tuple[int, int], int]] = []
    original = engine.scheduler.schedule

    def schedule() -> SchedulerOutput:
        output = original()
        totals = (table.num_tokens + table.num_in_flight)[output.rows].tolist()
        keys = zip(output.rows.tolist(), output.epochs.tolist(), strict=True)
        if not output.is_empty:
            planned.append(dict(zip(keys, totals, strict=True)))
        return output

    class Counting(SimulatedExecutor):
        def _sample(self, bitmask: GrammarBitmask | None) -> ModelRunnerOutput:
            result = super()._sample(bitmask)
            counts = planned[len(self.executed) - 1]
            for (row, epoch), num_tokens in counts.items():
                worker = engine.runner._initialized().rows._rows[row]
                assert (worker.epoch, len(worker.chain)) == (epoch, num_tokens)
            return result

    engine.scheduler.schedule = schedule  # type: ignore[method-assign]
    Pipeline(engine, depth=depth, make_executor=Counting).run()
    assert engine.scheduler.stats().num_preemptions > 0
    engine.assert_as_if_alone()
    engine.assert_idle()
