"""The policy's hooks: when they are asked, what they decide, and what it costs if they fail."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scheduler_rig import Rig

from pdcore import FCFS, FinishReason, Priority, Request, RequestStatus
from pdcore.errors import InvalidRequest
from pdcore.messages import StepResult
from pdcore.scheduler import Admission, AdmissionContext, RunningView, SkipCode


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
    # What was refused, and who has left, decide nothing for those who come then.
    with pytest.raises(InvalidRequest, match="NaN has no place"):
        rig.add("first", metadata=((math.nan,), "x"))
    rig.add("text", metadata="x")
    rig.driver.abort(["text"])
    rig.add("number again", metadata=2)


@pytest.mark.parametrize("key", [math.nan, np.float32("nan"), (1, math.nan)])
def test_a_key_without_a_place_in_the_order_refuses_its_request(key: Any) -> None:
    """NaN is neither before nor after any other key, so a heap that holds it has no order."""

    class Mixed(FCFS):
        def key(self, request: Request) -> Any:
            return request.metadata

    rig = Rig(policy=Mixed())
    rig.add("good", metadata=(1, 2.0) if isinstance(key, tuple) else 1.0)
    with pytest.raises(InvalidRequest, match="NaN has no place in an order"):
        rig.add("bad", metadata=key)
    assert rig.ends()["good"] is FinishReason.LENGTH


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


def test_a_hook_that_fails_in_every_step_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    """The first failure is told whole, the next only if it is of another kind."""
    policy = BrokenOrder([5])
    rig = Rig(policy=policy, limits={"max_num_seqs": 1})
    for name in ("one", "two", "three"):
        rig.add(name)
    for _ in range(4):
        rig.driver.step()
    policy.answer = RuntimeError("broken")
    assert set(rig.ends().values()) == {FinishReason.LENGTH}
    assert rig.scheduler.stats().num_policy_errors > 4
    told = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [record.exc_info[0] for record in told if record.exc_info] == [ValueError, RuntimeError]


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


def test_who_is_skipped_holds_up_nobody_when_all_rows_are_taken() -> None:
    """The next one may still take a row from somebody."""

    asked: list[str] = []

    class Gate(Priority):
        def admit(self, request: Request, context: Any) -> Admission:
            is_gated = request.request_id.startswith("gated")
            return Admission.SKIP if is_gated else Admission.ADMIT

        def displace(self, request: Request, running: RunningView) -> int | None:
            asked.append(request.request_id)
            return super().displace(request, running)

    rig = Rig(policy=Gate(displace=True), limits={"max_num_seqs": 1})
    rig.add("low", priority=9, max_tokens=40)
    rig.driver.step()
    for index in range(20):
        rig.add(f"gated {index}", priority=0)
    rig.add("urgent", priority=1)
    rig.driver.step()
    assert asked == ["urgent"]
    assert rig.scheduler.status("urgent") is RequestStatus.RUNNING
    assert rig.scheduler.status("low") is RequestStatus.PREEMPTED
    assert rig.scheduler.explain("gated 0").code is SkipCode.POLICY


def test_a_hook_that_calls_the_scheduler_costs_its_request_alone() -> None:
    """What is being planned is not changed meanwhile; once it is over, `observe` may abort."""

    class Meddling(FCFS):
        def admit(self, request: Request, context: Any) -> Admission:
            if request.request_id == "meddles":
                rig.scheduler.abort_requests(["plain"])
            return Admission.ADMIT

        def observe(self, result: StepResult) -> None:
            rig.scheduler.abort_requests(["unwanted"])

    rig = Rig(policy=Meddling())
    for name in ("plain", "meddles", "unwanted"):
        rig.add(name)
    assert rig.ends() == {
        "plain": FinishReason.LENGTH,
        "meddles": FinishReason.ERROR,
        "unwanted": FinishReason.ABORT,
    }
    end = rig.driver.delivered["meddles"].end
    assert end is not None
    assert "ReentrantCall" in (end.cause or "")


def test_requests_that_take_each_others_row_come_to_an_end() -> None:
    """A row that was taken yields a token before it may be taken again."""

    class Grabbing(FCFS):
        def displace(self, request: Request, running: RunningView) -> int | None:
            assert running.requests
            return 0

    rig = Rig(policy=Grabbing(), limits={"max_num_seqs": 1, "max_num_batched_tokens": 2})
    for index in range(3):
        rig.add(f"r{index}", prompt=range(4 + 10 * index, 9 + 10 * index))
    assert set(rig.ends().values()) == {FinishReason.LENGTH}
    for got in rig.driver.delivered.values():
        assert got.token_ids == rig.runner.solo_tokens(got.request)


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
