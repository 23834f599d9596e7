"""Faults that users of inference engines met with several steps under way, as smallest scenarios.

Two ways of driving: `Engine` hands over plans and results one at a time, where a case depends on
the exact moment; `BatchQueue` on an executor that lags, where it depends on the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import pytest
from harness import Engine
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcore.errors import OutputMismatch
from pdcore.loop import BatchQueue
from pdcore.messages import GrammarBitmask, ModelRunnerOutput, SchedulerOutput
from pdcore.request import FinishReason, Request
from pdcore.scheduler import GrammarBackend, GrammarMatcher, SkipCode
from pdcore.testing import PlanError
from simulated_executors import SimulatedExecutor, TimedExecutor

DEPTHS = [1, 2, 3]


class Text(GrammarMatcher):
    """Allows exactly the tokens of a text, one after the other.

    Attributes:
        tokens: what it was told.
        masked_after: how many tokens it had been told when it made each mask.
    """

    def __init__(self, text: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self.masked_after: list[int] = []
        self._text = text

    def accept(self, token_id: int) -> bool:
        self.tokens.append(token_id)
        return self.tokens == list(self._text[: len(self.tokens)])

    def fill_bitmask(self, bits: npt.NDArray[np.int32]) -> None:
        self.masked_after.append(len(self.tokens))
        token = self._text[len(self.tokens)]
        bits[token // 32] = np.array(1 << token % 32, np.uint32).view(np.int32)


class Texts(GrammarBackend):
    """Takes ``structured_output`` as the text."""

    vocab_size = 32_000

    def __init__(self) -> None:
        self.matchers: dict[str, Text] = {}

    def compile(self, request: Request) -> Future[GrammarMatcher]:
        future: Future[GrammarMatcher] = Future()
        matcher = Text(request.sampling.structured_output)
        self.matchers[request.request_id] = matcher
        future.set_result(matcher)
        return future


class Pipeline:
    """A batch queue over a harness's engine, whose plans run only when somebody waits."""

    def __init__(
        self,
        engine: Engine,
        *,
        depth: int = 2,
        make_executor: Callable[[Any], SimulatedExecutor] = SimulatedExecutor,
    ) -> None:
        self.engine = engine
        self.executor = make_executor(engine.runner)
        self.queue = BatchQueue(engine.scheduler, self.executor, depth=depth)
        self.produced: list[list[str]] = []

    def step(self) -> None:
        result = self.queue.step()
        self.engine.scheduler.check()
        self.produced.append(result.request_ids[: result.token_ids.size])
        for event in result.outputs:
            self.engine._take(event)

    def run(self) -> None:
        while self.engine.scheduler.has_requests():
            self.step()
            assert len(self.produced) < 1000, self.engine.scheduler


class MaskBlind(SimulatedExecutor):
    """Loses the masks on the way to the runner."""

    def sample_tokens(self, bitmask: GrammarBitmask | None, *, non_block: bool = False) -> Any:
        return super().sample_tokens(None, non_block=non_block)


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

    grammar = Texts()
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
    engine = Engine(grammar=Texts())
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

    engine = Engine(grammar=Texts())
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

END = 7


@pytest.mark.parametrize("depth", DEPTHS)
def test_d8_a_grammar_has_seen_exactly_the_tokens_that_were_emitted(depth: int) -> None:
    """The token that ends the text is the last it is told, whatever was in flight."""
    grammar = Texts()
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
    grammar = Texts()
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
    grammar = Texts()
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


# D12


@pytest.mark.parametrize("depth", DEPTHS)
def test_d12_each_mask_knows_the_token_before_it_and_nobody_else_waits(depth: int) -> None:
    """A structured row is left out until its token is in; a plain one runs in every step."""
    grammar = Texts()
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
    engine = Engine(grammar=Texts())
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
