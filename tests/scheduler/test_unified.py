"""What the scheduler promises beyond the choice of tokens: hooks, deadlines, grammars, words."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pdcore import (
    FCFS,
    FinishReason,
    KVCacheManager,
    Limits,
    LRUBlockPool,
    ModelRunnerOutput,
    Priority,
    Request,
    RequestStatus,
    SamplingParams,
    UnifiedScheduler,
    VirtualClock,
)
from pdcore.connector.base import ExternalMatch
from pdcore.connector.null import NullConnector, NullSchedulerConnector
from pdcore.errors import (
    ConfigError,
    DuplicateRequest,
    InvalidRequest,
    InvariantBroken,
    OutputOrder,
)
from pdcore.kvcache import KVCacheConfig, KVCacheSpec, PrefixHasher
from pdcore.messages import TransferKey, TransferReport
from pdcore.scheduler import (
    Admission,
    AdmissionContext,
    GrammarBackend,
    GrammarMatcher,
    SkipCode,
    dispatch,
)
from pdcore.testing import FakeKVRunner
from pdcore.testing.drive import Driver

VOCAB_SIZE = 64


class Rig:
    """A scheduler with everything that a test may want to look at."""

    def __init__(self, *, num_blocks: int = 33, block_size: int = 4, **kwargs: Any) -> None:
        self.clock = VirtualClock()
        self.runner = FakeKVRunner(
            block_size=block_size, num_blocks=num_blocks, vocab_size=VOCAB_SIZE
        )
        spec = self.runner.get_kv_cache_spec()
        self.runner.initialize_from_config(KVCacheConfig(spec=spec, num_blocks=num_blocks))
        self.pool = LRUBlockPool(num_blocks, block_size)
        limits = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64}
        limits |= kwargs.pop("limits", {})
        self.scheduler = UnifiedScheduler(
            KVCacheManager(self.pool), limits=Limits(**limits), clock=self.clock, **kwargs
        )
        self.driver = Driver(self.scheduler, self.runner, clock=self.clock)

    def add(self, name: str, num_tokens: int = 5, *, max_tokens: int = 3, **kwargs: Any) -> None:
        sampling = SamplingParams(
            max_tokens=max_tokens, structured_output=kwargs.pop("structured_output", None)
        )
        prompt = kwargs.pop("prompt", range(4, 4 + num_tokens))
        self.driver.add(Request(name, prompt, sampling=sampling, **kwargs))

    def ends(self) -> dict[str, FinishReason | None]:
        return {name: got.finish_reason for name, got in self.driver.run().items()}


class FailingPolicy(FCFS):
    """Every scalar hook but key() fails for the request named "bad"."""

    def __init__(self, hook: str) -> None:
        self.hook = hook

    def _fail(self, hook: str, request: Request) -> None:
        if hook == self.hook and request.request_id == "bad":
            raise RuntimeError(f"{hook} is broken")

    def key(self, request: Request) -> Any:
        self._fail("key", request)
        return super().key(request)

    def admit(self, request: Request, context: Any) -> Admission:
        self._fail("admit", request)
        return super().admit(request, context)

    def chunk(self, request: Request, num_tokens: int, token_budget: int) -> int:
        self._fail("chunk", request)
        return super().chunk(request, num_tokens, token_budget)

    def displace(self, request: Request, running: Any) -> int | None:
        self._fail("displace", request)
        return None


@pytest.mark.parametrize("hook", ["admit", "chunk", "displace"])
def test_a29_a_hook_that_raises_costs_its_request_alone(hook: str) -> None:
    """The one request ends with an error that names the hook; all others get their tokens."""
    rig = Rig(policy=FailingPolicy(hook), limits={"max_num_seqs": 2})
    for start, name in enumerate(("one", "two", "bad", "three"), 4):
        rig.add(name, prompt=range(start, start + 6))
    assert rig.ends() == {
        "one": FinishReason.LENGTH,
        "two": FinishReason.LENGTH,
        "bad": FinishReason.ERROR,
        "three": FinishReason.LENGTH,
    }
    end = rig.driver.delivered["bad"].end
    assert end is not None
    assert f"{hook} is broken" in (end.cause or "")


def test_a_connector_in_place_of_its_half_is_refused() -> None:
    """The error says what to pass."""
    manager = KVCacheManager(LRUBlockPool(8, 4))
    with pytest.raises(ConfigError, match=r"NullConnector was given .* scheduler_side\(\) returns"):
        UnifiedScheduler(manager, connector=NullConnector())  # type: ignore[arg-type]


def test_a_hasher_of_another_block_size_is_refused() -> None:
    """Keys for blocks of 32 tokens do not name blocks of 4."""
    with pytest.raises(ConfigError, match="blocks of 32 tokens, the pool's have 4"):
        KVCacheManager(LRUBlockPool(8, 4), hasher=PrefixHasher(32))


def test_a_key_that_raises_or_cannot_be_compared_refuses_its_request() -> None:
    """The queue never holds a key that would break it."""
    rig = Rig(policy=FailingPolicy("key"))
    rig.add("good")
    with pytest.raises(InvalidRequest, match="key is broken"):
        rig.add("bad")

    class Mixed(FCFS):
        def key(self, request: Request) -> Any:
            return request.metadata

    rig = Rig(policy=Mixed())
    rig.add("number", metadata=1)
    with pytest.raises(InvalidRequest, match="cannot be compared"):
        rig.add("text", metadata="x")
    assert rig.ends()["number"] is FinishReason.LENGTH


class BrokenOrder(FCFS):
    """Gives a useless answer."""

    dynamic = True

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def order(self, waiting: Any, now: float) -> npt.NDArray[np.intp]:
        if isinstance(self.answer, Exception):
            raise self.answer
        return np.array(self.answer)


class BrokenVictim(FCFS):
    """Names a request that is not there."""

    def victim(self, running: Any) -> int:
        return 99


def test_a_victim_that_is_not_there_is_replaced_by_the_last_to_start() -> None:
    """The broken hook is counted, and every request gets its tokens all the same."""
    rig = Rig(policy=BrokenVictim(), num_blocks=9)
    for index in range(3):
        rig.add(f"r{index}", prompt=range(4 + index, 14 + index), max_tokens=12)
    assert set(rig.ends().values()) == {FinishReason.LENGTH}
    stats = rig.scheduler.stats()
    assert stats.num_policy_errors == stats.num_preemptions > 0
    for got in rig.driver.delivered.values():
        assert got.token_ids == rig.runner.solo_tokens(got.request)


@pytest.mark.parametrize("answer", [RuntimeError("broken"), [0, 0], [5], []])
def test_an_array_hook_that_fails_costs_a_step_in_order_of_arrival(answer: Any) -> None:
    """Broken answers are counted, and the step goes on first come, first served."""
    rig = Rig(policy=BrokenOrder(answer), limits={"max_num_seqs": 1})
    for name in ("one", "two"):
        rig.add(name)
    plan = rig.scheduler.schedule()
    assert [new.request_id for new in plan.scheduled_new_reqs] == ["one"]
    assert rig.scheduler.stats().num_policy_errors == 1


def test_a_dynamic_policy_orders_the_queue_in_every_step() -> None:
    """order() decides over columns, with the clock of the moment."""

    class OldestDeadline(FCFS):
        dynamic = True

        def order(self, waiting: Any, now: float) -> npt.NDArray[np.intp]:
            return np.argsort(waiting.deadline, kind="stable")

    rig = Rig(policy=OldestDeadline(), limits={"max_num_seqs": 1})
    for name, deadline in (("late", 90.0), ("none", None), ("soon", 50.0)):
        rig.add(name, deadline=deadline, max_tokens=1)
    started = []
    while rig.scheduler.has_requests():
        plan = rig.scheduler.schedule()
        started += [new.request_id for new in plan.scheduled_new_reqs]
        rig.runner.execute_model(plan)
        rig.scheduler.update_from_output(plan, rig.runner.sample_tokens(None))
    assert started == ["soon", "late", "none"]


@pytest.mark.parametrize("verdict", [Admission.SKIP, Admission.STOP])
def test_admit_decides_who_waits_and_whether_others_may_pass(verdict: Admission) -> None:
    """SKIP lets the next one run; STOP keeps everybody behind out."""

    class Gate(FCFS):
        is_open = False

        def admit(self, request: Request, context: Any) -> Admission:
            closed = request.request_id == "gated" and not self.is_open
            return verdict if closed else Admission.ADMIT

    gate = Gate()
    rig = Rig(policy=gate)
    for name in ("gated", "next"):
        rig.add(name)
    rig.driver.step()
    runs = rig.scheduler.status("next") is RequestStatus.RUNNING
    assert runs == (verdict is Admission.SKIP)
    assert rig.scheduler.status("gated") is RequestStatus.WAITING
    assert "the policy" in (rig.scheduler.explain("gated").waits_on or "")
    gate.is_open = True
    assert set(rig.ends().values()) == {FinishReason.LENGTH}


def test_a_deadline_ends_a_request_wherever_it_is() -> None:
    """Running and waiting requests time out on an empty step too, and say where they were."""
    rig = Rig(limits={"max_num_seqs": 1})
    rig.add("running", max_tokens=50, deadline=10.0)
    rig.add("waiting", deadline=10.0)
    rig.add("patient")
    rig.driver.step()
    assert rig.scheduler.next_wakeup() == 10.0
    rig.clock.advance(10.0)
    assert rig.scheduler.has_work()
    rig.driver.step()
    for name, status in (("running", "RUNNING"), ("waiting", "WAITING")):
        end = rig.driver.delivered[name].end
        assert end is not None
        assert end.finish_reason is FinishReason.TIMEOUT
        assert status in (end.cause or "")
    assert rig.ends()["patient"] is FinishReason.LENGTH


def test_pause_plans_nothing_and_resume_goes_on() -> None:
    """A paused scheduler still ends requests whose deadline passes."""
    rig = Rig()
    rig.add("r")
    rig.add("late", deadline=5.0)
    rig.driver.step()
    rig.scheduler.pause()
    assert not rig.scheduler.schedule().rows.size
    assert rig.scheduler.explain("r").code is SkipCode.PAUSED


def test_results_come_in_order_and_plans_are_abandoned_newest_first() -> None:
    """Anything else raises, and changes nothing."""
    rig = Rig()
    rig.add("r", max_tokens=9)
    plans = [rig.scheduler.schedule() for _ in range(2)]
    before = rig.scheduler.fingerprint()
    nothing = ModelRunnerOutput(
        rows=plans[1].rows,
        epochs=plans[1].epochs,
        sampled_token_ids=np.ones((plans[1].rows.size, 1), np.int32),
    )
    with pytest.raises(OutputOrder, match="oldest"):
        rig.scheduler.update_from_output(plans[1], nothing)
    with pytest.raises(OutputOrder, match="newest"):
        rig.scheduler.abandon(plans[0])
    assert rig.scheduler.fingerprint() == before
    for plan in reversed(plans):
        rig.scheduler.abandon(plan)
        rig.scheduler.check()
    assert rig.ends() == {"r": FinishReason.LENGTH}


def test_a_plan_that_was_abandoned_comes_again_the_same() -> None:
    """The same rows, tokens and blocks; only epochs and step ids go on."""
    rig = Rig(num_blocks=9)
    for index in range(4):
        rig.add(f"r{index}", 9 + index, max_tokens=8)
    for _ in range(12):
        first = rig.scheduler.schedule()
        rig.scheduler.abandon(first)
        again = rig.scheduler.schedule()
        for name in ("rows", "num_scheduled_tokens", "num_computed_tokens", "block_ids"):
            assert getattr(first, name).tolist() == getattr(again, name).tolist()
        rig.runner.execute_model(again)
        rig.scheduler.update_from_output(again, rig.runner.sample_tokens(None))
        rig.scheduler.check()


class RemoteConnector(NullSchedulerConnector):
    """Has the KV of 12 tokens of the request named "remote"."""

    def __init__(self, *, is_async: bool) -> None:
        super().__init__()
        self.is_async = is_async

    def get_num_new_matched_tokens(
        self, request: Request, num_local_tokens: int
    ) -> ExternalMatch | None:
        num_tokens = 12 - num_local_tokens if request.request_id == "remote" else 0
        return ExternalMatch(num_tokens=num_tokens, is_async=self.is_async)


@pytest.mark.parametrize("is_async", [True, False])
def test_blocks_of_a_request_admitted_before_are_not_given_to_a_load(is_async: bool) -> None:
    """6 blocks, 4 of them for the first in the queue: a load that needs 4 waits."""
    rig = Rig(
        num_blocks=7,
        connector=RemoteConnector(is_async=is_async),
        limits={"max_num_batched_tokens": 32},
    )
    rig.add("first", prompt=range(20, 36), max_tokens=1)
    rig.add("remote", prompt=range(4, 20))
    output = rig.scheduler.schedule()
    assert [new.request_id for new in output.scheduled_new_reqs] == ["first"]
    skip = rig.scheduler.explain("remote")
    assert (skip.code, skip.needed, skip.available) == (SkipCode.NO_BLOCKS, 4, 2)
    rig.scheduler.check()


def test_a_policy_is_told_of_those_admitted_before_in_the_same_step() -> None:
    """Running requests, free blocks and budget are as if each had started at once."""
    seen = []

    class Watching(FCFS):
        def admit(self, request: Request, context: AdmissionContext) -> Admission:
            seen.append((context.num_running, context.num_free_blocks, context.token_budget))
            return super().admit(request, context)

    rig = Rig(num_blocks=9, policy=Watching())
    for index in range(3):
        rig.add(f"r{index}", prompt=range(4 + 10 * index, 9 + 10 * index))
    rig.scheduler.schedule()
    assert seen == [(0, 8, 16), (1, 6, 11), (2, 4, 6)]


def test_an_admission_that_was_abandoned_is_counted_nowhere() -> None:
    """The statistics are as before, and what the request finds when it is admitted is its own."""
    rig = Rig(policy=Priority())
    rig.add("late", 9, priority=1)
    before = rig.scheduler.stats()
    rig.scheduler.abandon(rig.scheduler.schedule())
    assert rig.scheduler.stats() == before
    rig.add("early", 9)
    rig.scheduler.schedule()
    assert rig.scheduler.explain("late").code is SkipCode.RAN
    rig.scheduler.abandon(rig.scheduler.in_flight[0])
    rig.driver.run()
    ends = [rig.driver.delivered[name].end for name in ("early", "late")]
    assert [end.num_cached_tokens for end in ends if end is not None] == [0, 8]


@pytest.mark.parametrize(
    ("limits", "prompt", "words"),
    [
        ({"max_model_len": 8}, range(8), "max_model_len is 8"),
        ({"max_model_len": 1000}, range(33), "needs 9 blocks; the pool has 8"),
        ({"enable_chunked_prefill": False}, range(17), "chunked prefill is off"),
        ({"vocab_size": 10}, [3, 10], "token id 10; the vocabulary ends at 9"),
    ],
)
def test_what_can_never_fit_is_refused_with_the_numbers(
    limits: dict[str, Any], prompt: Any, words: str
) -> None:
    """The refusal is one line, and the requests that are there are unharmed."""
    rig = Rig(num_blocks=9, limits=limits)
    rig.add("good", prompt=[1, 2, 3])
    with pytest.raises(InvalidRequest, match=words) as caught:
        rig.add("bad", prompt=prompt)
    assert "\n" not in str(caught.value)
    with pytest.raises(DuplicateRequest, match="good"):
        rig.add("good")
    assert rig.ends() == {"good": FinishReason.LENGTH}


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_num_seqs": 32, "max_num_batched_tokens": 16}, "max_num_batched_tokens=16"),
        ({"load_timeout_s": 0.0}, "load_timeout_s"),
        ({"on_load_failure": "pray"}, "'pray'"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold"),
    ],
)
def test_limits_that_cannot_work_are_refused_by_name(limits: dict[str, Any], words: str) -> None:
    """A bound out of range, and two that contradict each other."""
    with pytest.raises(ConfigError, match=words):
        Limits(**limits)


def test_a_connector_with_a_sliding_window_is_refused() -> None:
    """It would hand over blocks that are not there any more."""
    spec = KVCacheSpec(num_layers=1, num_kv_heads=1, head_dim=1, block_size=4, sliding_window=8)
    manager = KVCacheManager(LRUBlockPool(9, 4), groups=(spec,))
    with pytest.raises(ConfigError, match="sliding window"):
        UnifiedScheduler(manager, connector=NullSchedulerConnector())


class EvenTokens(GrammarMatcher):
    """Allows even tokens only."""

    def accept(self, token_id: int) -> bool:
        return token_id % 2 == 0

    def fill_bitmask(self, bits: npt.NDArray[np.int32]) -> None:
        bits[:] = 0x55555555


class Compiler(GrammarBackend):
    """Hands out futures for the test to fill."""

    vocab_size = VOCAB_SIZE

    def __init__(self) -> None:
        self.futures: dict[str, Future[GrammarMatcher]] = {}

    def compile(self, request: Request) -> Future[GrammarMatcher]:
        future: Future[GrammarMatcher] = Future()
        self.futures[request.request_id] = future
        return future


def test_a30_a_request_waits_for_its_grammar_without_holding_up_others() -> None:
    """It draws allowed tokens once compiled; a failed, late or aborted one ends alone."""
    compiler = Compiler()
    rig = Rig(grammar=compiler, limits={"grammar_timeout_s": 5.0})
    for name in ("good", "fails", "late", "aborted"):
        rig.add(name, structured_output="even", max_tokens=6)
    rig.add("plain", max_tokens=2)
    rig.driver.step()
    assert rig.scheduler.status("good") is RequestStatus.WAITING_FOR_GRAMMAR
    assert rig.scheduler.status("plain") is RequestStatus.RUNNING
    compiler.futures["good"].set_result(EvenTokens())
    compiler.futures["fails"].set_exception(ValueError("no such rule"))
    rig.driver.abort(["aborted"])
    rig.driver.step()
    rig.clock.advance(5.0)
    assert rig.ends() == {
        "good": FinishReason.LENGTH,
        "fails": FinishReason.ERROR,
        "late": FinishReason.ERROR,
        "aborted": FinishReason.ABORT,
        "plain": FinishReason.LENGTH,
    }
    assert all(token % 2 == 0 for token in rig.driver.delivered["good"].token_ids)
    assert compiler.futures["aborted"].cancelled()
    assert compiler.futures["late"].cancelled()


def test_a_token_that_the_grammar_does_not_allow_ends_its_request() -> None:
    """A runner that ignores the mask is found out, and nobody else suffers."""
    compiler = Compiler()
    rig = Rig(grammar=compiler)
    rig.add("strict", structured_output="even", max_tokens=60)
    rig.add("plain", max_tokens=20)
    compiler.futures["strict"].set_result(EvenTokens())
    while rig.scheduler.has_requests():
        plan = rig.scheduler.schedule()
        rig.runner.execute_model(plan)
        rig.driver._collect(
            rig.scheduler.update_from_output(plan, rig.runner.sample_tokens(None)).outputs
        )
    ends = {name: got.finish_reason for name, got in rig.driver.delivered.items()}
    assert ends == {"strict": FinishReason.ERROR, "plain": FinishReason.LENGTH}
    assert rig.driver.delivered["strict"].token_ids[-1] % 2 == 1


def test_structured_output_without_a_grammar_is_refused() -> None:
    """Constraints are never dropped silently."""
    with pytest.raises(InvalidRequest, match="grammar"):
        Rig().add("r", structured_output="even")


class BrokenConnector(NullSchedulerConnector):
    """One of its methods raises."""

    def __init__(self, method: str) -> None:
        super().__init__()

        def broken(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError(f"{method} is broken")

        setattr(self, method, broken)


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("get_num_new_matched_tokens", FinishReason.ERROR),
        ("take_events", FinishReason.LENGTH),
        ("build_connector_meta", FinishReason.LENGTH),
        ("request_finished", FinishReason.LENGTH),
    ],
)
def test_c28_a_connector_that_raises_never_takes_the_engine_down(
    method: str, reason: FinishReason, caplog: pytest.LogCaptureFixture
) -> None:
    """What concerns one request ends that one; the rest is logged and goes on."""
    rig = Rig(connector=BrokenConnector(method))
    for name in ("one", "two"):
        rig.add(name)
    assert rig.ends() == {"one": reason, "two": reason}
    if reason is FinishReason.LENGTH:
        assert f"{method} is broken" in caplog.text


class Undecided(NullSchedulerConnector):
    """Always asks to be asked again."""

    def get_num_new_matched_tokens(self, request: Request, num_local_tokens: int) -> Any:
        return None


@pytest.mark.parametrize("on_load_failure", ["recompute", "fail"])
def test_a_connector_that_never_decides_holds_nobody_up_for_ever(on_load_failure: str) -> None:
    """ "Ask me later" has a deadline too, and an abandoned plan does not move it."""
    limits = {"on_load_failure": on_load_failure, "load_timeout_s": 5.0}
    rig = Rig(connector=Undecided(), limits=limits)
    rig.add("r")
    rig.driver.step()
    assert rig.scheduler.explain("r").code is SkipCode.CONNECTOR_NOT_READY
    rig.clock.advance(4.0)
    rig.scheduler.abandon(rig.scheduler.schedule())
    assert rig.scheduler.next_wakeup() == 5.0
    (reason,) = rig.ends().values()
    assert reason is (FinishReason.ERROR if on_load_failure == "fail" else FinishReason.LENGTH)
    assert rig.clock.now() == 5.0


def test_a_fault_inside_schedule_leaves_the_state_as_it_was() -> None:
    """A part that breaks its promise costs its step, and the next step works."""
    rig = Rig()
    for index in range(3):
        rig.add(f"r{index}")
    before = rig.scheduler.fingerprint()
    publish, rig.pool.publish = rig.pool.publish, None  # type: ignore[assignment]
    with pytest.raises(TypeError):
        rig.scheduler.schedule()
    rig.pool.publish = publish  # type: ignore[method-assign]
    assert rig.scheduler.fingerprint() == before
    rig.scheduler.check()
    assert set(rig.ends().values()) == {FinishReason.LENGTH}


def test_an_interrupt_while_the_plan_is_written_leaves_the_state_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing of a row that runs has advanced when those that start are described."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    rig = Rig()
    rig.add("running")
    rig.driver.step()
    rig.add("starting")
    before = rig.scheduler.fingerprint()
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "_new_request_data", interrupt)
        with pytest.raises(KeyboardInterrupt):
            rig.scheduler.schedule()
    rig.scheduler.check()
    assert rig.scheduler.fingerprint() == before
    assert set(rig.ends().values()) == {FinishReason.LENGTH}


def test_a_paused_scheduler_has_no_work_and_a_report_is_work() -> None:
    """A loop neither spins while paused nor sleeps over news that it has in hand."""
    rig = Rig(connector=NullSchedulerConnector())
    rig.add("r")
    rig.scheduler.pause()
    assert not rig.scheduler.has_work()
    plan = rig.scheduler.schedule()
    report = TransferReport(finished_recving=(TransferKey(99, 1),))
    nothing = np.zeros(0, np.int32)
    result = ModelRunnerOutput(
        rows=nothing,
        epochs=nothing,
        sampled_token_ids=nothing.reshape(0, 1),
        transfer_report=report,
    )
    rig.scheduler.update_from_output(plan, result)
    assert rig.scheduler.has_work()
    rig.scheduler.abandon(rig.scheduler.schedule())
    assert not rig.scheduler.has_work()
    assert rig.scheduler.stats().num_late_events == 1
    rig.scheduler.resume()
    assert rig.ends() == {"r": FinishReason.LENGTH}


def test_a_result_in_another_order_gives_each_request_its_own_token() -> None:
    """A runner may return its rows in any order, in steps of decodes as in others."""
    rig = Rig()
    for name in ("a", "b", "c"):
        rig.add(name, 3, max_tokens=6)
    for _ in range(5):
        output = rig.scheduler.schedule()
        order = np.argsort(-output.rows)
        result = ModelRunnerOutput(
            rows=output.rows[order],
            epochs=output.epochs[order],
            sampled_token_ids=(10 + output.rows[order]).astype(np.int32)[:, None],
        )
        told = rig.scheduler.update_from_output(output, result)
        tokens = dict(zip(told.request_ids, told.token_ids.tolist(), strict=True))
        assert tokens == {"a": 10, "b": 11, "c": 12}
        rig.scheduler.check()


def test_what_several_plans_share_cannot_be_written_to() -> None:
    """A runner that scribbles on its plan spoils no later one."""
    rig = Rig()
    rig.add("a", 3, max_tokens=6)
    output = rig.scheduler.schedule()
    rig.runner.execute_model(output)
    rig.scheduler.update_from_output(output, rig.runner.sample_tokens(None))
    output = rig.scheduler.schedule()
    for column in (output.rows, output.epochs, output.num_scheduled_tokens, output.samples):
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 0


def test_a_request_of_a_subclass_stays_one() -> None:
    """A policy may look at fields of its own."""

    class Team(Request):
        team = "blue"

    class ByTeam(FCFS):
        def key(self, request: Request) -> str:
            return request.team  # type: ignore[attr-defined]

    rig = Rig(policy=ByTeam())
    rig.scheduler.add_request(Team("a", [1, 2], sampling=SamplingParams(max_tokens=1)))
    assert rig.scheduler.stats().num_waiting == 1


@pytest.mark.parametrize(
    ("name", "value"), [("is_level", True), ("num_with_eos", 3), ("num_to_refresh", 1)]
)
def test_check_sees_what_the_table_remembers_wrongly(name: str, value: object) -> None:
    """A step of decodes rests on it."""
    rig = Rig()
    rig.add("a", 30, max_tokens=6)
    rig.scheduler.schedule()
    rig.scheduler.check()
    table = rig.scheduler._core.table
    setattr(table, name, value)
    if name == "is_level":
        table.num_computed[0] -= 1
    with pytest.raises(InvariantBroken, match=name):
        rig.scheduler.check()
