"""`MultiConnector`: one step's orders and reports, and workers that raise."""

from __future__ import annotations

from typing import Any

import pytest
from multi_halves import (
    BLOCKS,
    KEY,
    NAMES,
    PLAN,
    a_load,
    a_meta,
    a_request,
    loading,
    two,
    two_workers,
)

from pdcore.connector import ConnectorEvents, HandOver
from pdcore.connector.stats import ConnectorStats
from pdcore.errors import TransferError
from pdcore.messages import LoadFailure, TransferKey, TransferReport


def test_orders_come_apart_again_and_can_be_made_again() -> None:
    """Each gets its own back; loads are named until a worker has heard of them."""
    near, _, multi = two(match=5)
    taken_back: list[Any] = []
    near.rebuild_connector_meta = taken_back.append  # type: ignore[method-assign]
    assert multi.build_connector_meta(PLAN) is None
    request = a_request()
    loading(multi, request)
    near.meta = "orders"
    meta = multi.build_connector_meta(PLAN)
    assert meta is not None
    assert (meta.parts, meta.loads) == ({"near": "orders"}, {KEY: "near"})
    multi.rebuild_connector_meta(meta)
    assert taken_back == ["orders"]
    near.step_failed = taken_back.append  # type: ignore[method-assign]
    multi.step_failed(meta)
    assert taken_back == ["orders", "orders"]
    again, third = multi.build_connector_meta(PLAN), multi.build_connector_meta(PLAN)
    assert again is not None
    assert third is not None
    assert (again.loads, third.loads) == ({KEY: "near"}, {})
    multi.rebuild_connector_meta(None)
    multi.rebuild_connector_meta(again)
    multi.undo_alloc(request, a_load(request))
    last = multi.build_connector_meta(PLAN)
    assert last is not None
    assert last.loads == {}


@pytest.mark.usefixtures("quiet_log")
def test_a_half_that_cannot_repeat_its_orders_keeps_nobody_else_from_it() -> None:
    """After a step that failed; which load is whose is not said again, since it was called off."""
    near, far, multi = two(match=5)
    loading(multi, a_request())
    near.meta, far.meta = "near orders", "far orders"
    meta = multi.build_connector_meta(PLAN)
    assert meta is not None
    told: list[Any] = []

    def broken(part: Any) -> None:
        told.append(part)
        raise OSError("broken")

    near.step_failed, far.step_failed = broken, told.append  # type: ignore[method-assign]
    multi.step_failed(meta)
    assert told == ["near orders", "far orders"]
    again = multi.build_connector_meta(PLAN)
    assert again is not None
    assert again.loads == {}


@pytest.mark.usefixtures("quiet_log")
@pytest.mark.parametrize("is_async", [True, False])
def test_orders_that_cannot_be_made_break_only_a_step_that_relies_on_them(is_async: bool) -> None:
    """The worker raises for lost synchronous loads; others run to their deadline."""
    near, far, multi = two(match=5, is_async=is_async)
    far.meta = "orders"
    loading(multi, a_request())
    near.bad = {"build_connector_meta"}
    meta = multi.build_connector_meta(PLAN)
    _, _, worker, calls = two_workers()
    if is_async:
        worker.start_load_kv(meta)
    else:
        with pytest.raises(TransferError, match=r"'near' has no orders .*bad build"):
            worker.start_load_kv(meta)
    assert calls == [("far", "load", "orders")]


def test_all_save_before_any_loads() -> None:
    """One's load may overwrite what another one is to save."""
    _, _, worker, calls = two_workers()
    for meta in (None, a_meta()):
        worker.start_save_kv(meta)
        worker.start_load_kv(meta)
    assert calls == [
        ("near", "save", "n"),
        ("far", "save", "f"),
        ("near", "load", "n"),
        ("far", "load", "f"),
    ]


@pytest.mark.usefixtures("quiet_log")
@pytest.mark.parametrize("hook", ["save", "load", "wait"])
@pytest.mark.parametrize("synchronous", [None, "near", "far"])
def test_a_worker_that_raises_breaks_a_step_that_relies_on_it(
    hook: str, synchronous: str | None
) -> None:
    """Saves, and loads that are done at once; the others are called all the same."""
    near, _, worker, calls = two_workers()
    near.bad = {hook}
    meta = a_meta(synchronous=synchronous)
    call = {
        "save": lambda: worker.start_save_kv(meta),
        "load": lambda: worker.start_load_kv(meta),
        "wait": worker.wait_for_save,
    }[hook]
    if hook == "load" and synchronous != "near":
        call()
    else:
        with pytest.raises(OSError, match=f"bad {hook} of near"):
            call()
    assert [(name, called) for name, called, _ in calls] == [("near", hook), ("far", hook)]


@pytest.mark.usefixtures("quiet_log")
def test_a_report_is_that_of_all_who_can_give_one() -> None:
    """Without what one says of another one's load; hand-overs find their connector again."""
    near, far, worker, _ = two_workers()
    other = TransferKey(2, 1)
    failure = LoadFailure(transfer=KEY, num_valid_tokens=0, cause="no")
    worker.start_load_kv(a_meta())
    near.report = TransferReport(finished_sending=("t",), finished_recving=(KEY,))
    far.report = TransferReport(
        finished_sending=("t", "u/v"), finished_recving=(KEY, other), failed=(failure,)
    )
    report = worker.get_finished()
    assert report.finished_recving == (KEY, other)
    assert report.failed == ()
    near.bad = {"report"}
    assert worker.get_finished().finished_sending == report.finished_sending[1:]

    halves = two(match=5)
    reports: dict[str, TransferReport] = {}
    for name, half in zip(NAMES, halves, strict=False):
        half.update_connector_output = (  # type: ignore[method-assign]
            lambda part, name=name: reports.update({name: part})
        )
    multi = halves[-1]
    loading(multi, a_request())
    multi.update_connector_output(report)
    assert reports == {
        "near": TransferReport(finished_sending=("t",), finished_recving=(KEY,)),
        "far": TransferReport(finished_sending=("t", "u/v")),
    }
    assert multi.stats().num_dropped_events == 1  # of the load that nobody brings


def test_a_load_that_is_done_at_once_is_no_event() -> None:
    """Its connector may say that it ended; the scheduler does not wait for it."""
    near, _, multi = two(match=5, is_async=False)
    request = a_request()
    loading(multi, request)
    near.said = ConnectorEvents(finished_recving=(KEY,))
    assert multi.take_events() == ConnectorEvents()
    assert multi.stats().num_dropped_events == 0
    loading(multi, other := a_request())
    multi.request_finished(other, 1, BLOCKS)
    near.said = ConnectorEvents(finished_recving=(KEY,))
    assert multi.take_events() == ConnectorEvents()
    assert multi.stats().num_dropped_events == 1


@pytest.mark.usefixtures("quiet_log")
def test_one_whose_events_cannot_be_had_holds_up_no_other() -> None:
    """The other's load is told of, and so are its times and what it owes."""
    near, far, multi = two()
    far.match = 5
    loading(multi, a_request())
    near.bad = {"take_events"}
    far.said = ConnectorEvents(finished_recving=(KEY,))
    assert multi.take_events().finished_recving == (KEY,)
    for half in (near, far):
        half.next_wakeup = lambda: 7.0  # type: ignore[method-assign]
        half.has_pending = lambda: True  # type: ignore[method-assign]
    near.next_wakeup = near.has_pending = lambda: [][0]  # type: ignore[method-assign]
    assert multi.next_wakeup() == 7.0
    assert multi.has_pending()


@pytest.mark.usefixtures("quiet_log")
def test_what_one_said_is_not_lost_when_another_answers_nonsense() -> None:
    """A hand-over that was let go of is let go of, and each number is that of the others."""
    near, far, multi = two()
    near.wish = HandOver(transfer_id="t")
    request = a_request()
    multi.request_added(request, 1)
    joint = multi.request_finished(request, 1, BLOCKS)
    assert joint is not None
    near.said = ConnectorEvents(finished_sending=("t",))
    nonsense: Any = object()
    for method in ("take_events", "stats", "next_wakeup"):
        setattr(far, method, lambda: nonsense)
    assert multi.take_events() == ConnectorEvents(finished_sending=(str(joint.transfer_id),))
    assert multi.stats().by_connector["far"] == ConnectorStats()
    assert multi.next_wakeup() is None


@pytest.mark.usefixtures("quiet_log")
def test_a_hand_over_under_the_name_of_an_open_one_keeps_nothing() -> None:
    """The first is still let go of when its connector says so."""
    near, _, multi = two()
    near.wish = HandOver(transfer_id="t")
    first, second = a_request(), a_request()
    multi.request_added(first, 1)
    multi.request_added(second, 2)
    joint = multi.request_finished(first, 1, BLOCKS)
    assert joint is not None
    assert multi.request_finished(second, 2, BLOCKS) is None
    near.said = ConnectorEvents(finished_sending=("t",))
    assert multi.take_events().finished_sending == (joint.transfer_id,)


@pytest.mark.usefixtures("quiet_log")
def test_a_load_that_cannot_be_undone_is_cancelled() -> None:
    """Its connector may begin it after all, and brings nothing more for that request."""
    near, far, multi = two(match=5)
    far.match = 3
    cancelled: list[TransferKey] = []
    near.cancel = cancelled.append  # type: ignore[method-assign]
    near.undo_alloc = lambda: None  # type: ignore[assignment]
    request = a_request()
    loading(multi, request)
    multi.undo_alloc(request, a_load(request))
    assert cancelled == [KEY]
    match = multi.get_num_new_matched_tokens(request, 4)
    assert match is not None
    assert match.num_tokens == 3
