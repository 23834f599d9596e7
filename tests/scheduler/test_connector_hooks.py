"""The connector's hooks, as the scheduler calls them: loads, answers that do not come, errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scheduler_rig import Rig, draw

from pdcore import FinishReason, Request
from pdcore.connector.base import (
    ConnectorEvents,
    ExternalMatch,
    HandOver,
    KVLoad,
    SchedulerConnector,
)
from pdcore.connector.multi.scheduler_side import MultiSchedulerConnector
from pdcore.connector.null import NullSchedulerConnector
from pdcore.connector.stats import ConnectorStats
from pdcore.messages import LoadFailure, TransferKey, TransferReport
from pdcore.scheduler import SkipCode


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


@pytest.mark.parametrize(
    "method", ["take_events", "update_connector_output", "build_connector_meta", "next_wakeup"]
)
def test_a_connector_that_always_raises_fills_no_log(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of these is asked in every step: the first failure is told, and which method it was."""
    rig = Rig(connector=BrokenConnector(method))
    rig.add("a")
    assert rig.ends() == {"a": FinishReason.LENGTH}
    rig.scheduler.next_wakeup()
    told = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(told) == 1
    assert f"{method}() raised" in told[0].getMessage()


class OddConnector(NullSchedulerConnector):
    """Answers with something that is no answer."""

    def __init__(self, method: str, answer: Any) -> None:
        super().__init__()
        setattr(self, method, lambda *_: answer)


@pytest.mark.parametrize(
    ("method", "answer"), [("request_finished", True), ("take_events", None), ("take_events", ())]
)
def test_a_connector_that_answers_nonsense_is_as_one_that_raises(
    method: str, answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody loses a token by it, and the log says what it answered."""
    rig = Rig(connector=OddConnector(method, answer))
    for name in ("one", "two"):
        rig.add(name)
    assert rig.ends() == {"one": FinishReason.LENGTH, "two": FinishReason.LENGTH}
    assert f"it returned {answer!r}" in caplog.text


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


class Loads(RemoteConnector):
    """Begins a load for "remote", that a test ends; does what a test says in one method."""

    def __init__(self, method: str = "", answer: Callable[[], Any] = lambda: None) -> None:
        super().__init__(is_async=True)
        self.transfers: list[TransferKey] = []
        self.cancelled: list[TransferKey] = []
        if method:
            setattr(self, method, lambda *_: answer())

    def update_state_after_alloc(self, request: Request, load: KVLoad) -> None:
        self.transfers.append(load.transfer)

    def undo_alloc(self, request: Request, load: KVLoad) -> None:
        return None

    def cancel(self, transfer: TransferKey) -> None:
        self.cancelled.append(transfer)


def _raise() -> Any:
    raise OSError("broken")


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("num_tokens", [4.5, math.nan, math.inf, None, "7", True])
def test_a_number_of_tokens_that_is_none_ends_its_request_alone(
    num_tokens: Any, is_async: bool
) -> None:
    """The others are served, those behind it in the queue as well."""
    connector = Loads("get_num_new_matched_tokens")
    answers = {"bad": lambda: ExternalMatch(num_tokens=num_tokens, is_async=is_async)}
    connector.get_num_new_matched_tokens = lambda request, _: answers.get(  # type: ignore[method-assign]
        request.request_id, lambda: ExternalMatch(num_tokens=0)
    )()
    rig = Rig(connector=connector)
    for name in ("one", "bad", "two"):
        rig.add(name)
    assert rig.ends() == {
        "one": FinishReason.LENGTH,
        "bad": FinishReason.ERROR,
        "two": FinishReason.LENGTH,
    }


def test_a_load_that_cannot_be_undone_costs_its_request_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All else of the plan is taken back, and nobody wants a load that may begin after all."""
    connector = Loads("undo_alloc", _raise)
    rig = Rig(connector=connector)
    rig.add("remote", num_tokens=16)
    rig.add("other")
    rig.scheduler.abandon(rig.scheduler.schedule())
    rig.scheduler.check()
    assert connector.cancelled == connector.transfers
    assert rig.ends() == {"remote": FinishReason.ERROR, "other": FinishReason.LENGTH}
    assert "undo_alloc() raised" in caplog.text


@pytest.mark.parametrize("hook", ["rebuild_connector_meta", "step_failed"])
def test_orders_that_cannot_be_rebuilt_do_not_stop_a_plan_from_being_taken_back(
    hook: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The plan is gone, and the next one is made."""
    connector = Loads(hook, _raise)
    connector.build_connector_meta = lambda output: "orders"  # type: ignore[method-assign]
    rig = Rig(connector=connector)
    rig.add("other")
    rig.scheduler.abandon(rig.scheduler.schedule(), dispatched=hook == "step_failed")
    assert rig.ends() == {"other": FinishReason.LENGTH}
    assert f"{hook}() raised" in caplog.text


@pytest.mark.parametrize("dispatched", [True, False])
@pytest.mark.parametrize("is_aborted", [True, False])
def test_a_load_within_a_step_that_failed_is_called_off_once(
    dispatched: bool, is_aborted: bool
) -> None:
    """Whether or not its request still has the row; not if nobody saw the plan or its undoing."""
    connector = Loads()
    connector.is_async = False
    rig = Rig(connector=connector)
    rig.add("remote", prompt=range(4, 20))
    plan = rig.scheduler.schedule()
    if is_aborted:
        rig.scheduler.abort_requests(["remote"])
    rig.scheduler.abandon(plan, dispatched=dispatched)
    is_exact = not (dispatched or is_aborted)
    assert connector.cancelled == ([] if is_exact else connector.transfers)
    rig.scheduler.check()


def test_a_load_within_a_step_that_is_done_is_forgotten() -> None:
    """Neither the failure of the next step calls it off, nor the end of its request."""
    connector = Loads()
    connector.is_async = False
    rig = Rig(connector=connector)
    rig.add("remote", prompt=range(4, 20), max_tokens=9)
    plan = rig.scheduler.schedule()
    assert plan.num_computed_tokens.tolist() == [12]
    rig.scheduler.update_from_output(plan, draw(plan))
    rig.scheduler.abandon(rig.scheduler.schedule(), dispatched=True)
    rig.scheduler.abort_requests(["remote"])
    assert connector.cancelled == []
    assert rig.scheduler._core.synchronous_loads == {}


def test_what_workers_reported_with_a_failed_step_is_known_before_orders_are_repeated() -> None:
    """Else what they did would be said to them once more."""
    connector, told = Loads(), []
    connector.build_connector_meta = lambda output: "orders"  # type: ignore[method-assign]
    connector.update_connector_output = told.append  # type: ignore[method-assign]
    connector.step_failed = told.append  # type: ignore[method-assign]
    rig = Rig(connector=connector)
    rig.add("other")
    report = TransferReport(finished_sending=("gone",))
    rig.scheduler.abandon(rig.scheduler.schedule(), dispatched=True, transfer_report=report)
    assert told == [report, "orders"]


@pytest.mark.parametrize("transfer_id", ["same", [1], 7])
def test_blocks_are_kept_once_under_a_name_that_is_one(transfer_id: Any) -> None:
    """What cannot be kept is an error of its request; what was kept before is let go of later."""
    connector = Loads(
        "request_finished",
        lambda: HandOver(transfer_id=transfer_id, kv_transfer_params={"x": 1}),
    )
    rig = Rig(connector=connector)
    for start in (4, 24):
        asks = {"do_remote_decode": True}
        rig.add(str(start), prompt=range(start, start + 7), max_tokens=1, kv_transfer_params=asks)
    rig.driver.step()
    num_kept = int(transfer_id == "same")
    ends = [got.finish_reason for got in rig.driver.delivered.values()]
    assert ends == [FinishReason.LENGTH] * num_kept + [FinishReason.ERROR] * (2 - num_kept)
    assert rig.scheduler.stats().num_held_for_peers == num_kept
    rig.scheduler.check()
    connector.update_connector_output(TransferReport(finished_sending=("same", "same")))
    rig.scheduler.abandon(rig.scheduler.schedule())
    rig.scheduler.check()
    assert not rig.scheduler.has_requests()


@pytest.mark.parametrize(
    "events",
    [
        {"finished_recving": (5,)},
        {"finished_recving": ((1, 1),)},
        {"finished_recving": (TransferKey([], 1),)},  # type: ignore[arg-type]
        {"finished_recving": None},
        {"finished_sending": "abc"},
        {"finished_sending": ([],)},
        {"failed": (5,)},
        {"failed": None},
    ],
)
@pytest.mark.parametrize("kind", [ConnectorEvents, TransferReport])
def test_events_about_nothing_are_refused_where_they_are_made(
    events: dict[str, Any], kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """By name, in the connector's own call; so the engine goes on."""
    rig = Rig(connector=Loads("take_events", lambda: kind(**events)))
    rig.add("a")
    assert rig.ends() == {"a": FinishReason.LENGTH}
    assert f"TransferError: {kind.__name__}({next(iter(events))}=" in caplog.text


@pytest.mark.parametrize("num_valid_tokens", [None, "3", 4.5, math.nan])
def test_a_failure_that_vouches_for_nonsense_vouches_for_nothing(num_valid_tokens: Any) -> None:
    """Its request is computed here, and no block is lost."""
    connector = Loads()
    rig = Rig(connector=connector, limits={"max_load_retries": 0})
    rig.add("remote", num_tokens=16)
    rig.driver.step()
    (transfer,) = connector.transfers
    failure = LoadFailure(transfer=transfer, num_valid_tokens=num_valid_tokens, cause="lost")
    connector.update_connector_output(TransferReport(failed=(failure,)))
    assert rig.ends() == {"remote": FinishReason.LENGTH}
    assert not rig.scheduler.stats().num_quarantined_blocks


@pytest.mark.parametrize("method", ["request_finished", "take_events", "update_connector_output"])
def test_a_connector_that_calls_the_scheduler_stops_nothing(method: str) -> None:
    """It is told so, and both requests get all their tokens."""
    rig = Rig(connector=Loads(method, lambda: rig.scheduler.abort_requests(["b"])))
    for name in ("a", "b"):
        rig.add(name)
    assert rig.ends() == {"a": FinishReason.LENGTH, "b": FinishReason.LENGTH}
    rig.scheduler.check()


@pytest.mark.parametrize("as_reports", [1, 2])
@pytest.mark.parametrize("part_of_multi", [False, True])
def test_a_load_that_failed_is_not_complete_whatever_else_is_said(
    part_of_multi: bool, as_reports: int
) -> None:
    """A worker's report that comes twice may be believed once; what nobody vouched for is not read.

    The fake runner would find that the blocks were never written.
    """
    connector = Loads()
    half: SchedulerConnector = connector
    if part_of_multi:
        half = MultiSchedulerConnector({"only": connector})
    rig = Rig(connector=half, limits={"max_load_retries": 0})
    rig.add("remote", num_tokens=16)
    rig.driver.step()
    (transfer,) = connector.transfers
    failure = LoadFailure(transfer=transfer, num_valid_tokens=0, cause="nobody vouches for it")
    reports = [TransferReport(finished_recving=(transfer,)), TransferReport(failed=(failure,))]
    if as_reports == 1:
        reports = [TransferReport(finished_recving=(transfer,), failed=(failure,))]
    for report in reports:
        connector.update_connector_output(report)
    assert rig.ends() == {"remote": FinishReason.LENGTH}
    got = rig.driver.delivered["remote"]
    assert got.token_ids == rig.runner.solo_tokens(got.request)
    assert got.end is not None
    assert got.end.num_external_tokens == 0


@pytest.mark.parametrize(
    ("method", "answers"),
    [
        ("stats", [_raise, lambda: None]),
        ("explain", [_raise, lambda: 5]),
        ("next_wakeup", [lambda: "x", lambda: math.nan]),
        ("has_pending", [lambda: np.zeros(2)]),
    ],
)
def test_what_a_connector_says_of_itself_stops_nothing(
    method: str, answers: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The scheduler answers as if it had said nothing, and the log has why."""
    for answer in answers:
        caplog.clear()
        rig = Rig(connector=Loads(method, answer))
        rig.add("remote", num_tokens=16)
        rig.driver.step()
        assert rig.scheduler.stats().connector == ConnectorStats()
        assert rig.scheduler.explain("remote").waits_on == "its remote KV"
        assert rig.scheduler.next_wakeup() == rig.scheduler.limits.load_timeout_s
        rig.scheduler.has_work()
        assert not Rig(connector=Loads(method, answer)).scheduler.has_requests()
        assert f"{method}() raised" in caplog.text


def test_a_handle_of_another_scheduler_aborts_nobody() -> None:
    """Its uid may be that of a request here."""
    here, there = Rig(), Rig()
    here.add("mine")
    handle = there.scheduler.add_request(Request("theirs", range(4, 9)))
    here.scheduler.abort_requests([handle])
    assert here.ends() == {"mine": FinishReason.LENGTH}
