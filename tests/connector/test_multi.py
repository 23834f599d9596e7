"""`MultiConnector`: whom each hook reaches, and what is said of all at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from multi_halves import (
    BLOCKS,
    HAND_OVER,
    NAMES,
    PLAN,
    a_meta,
    a_request,
    loading,
    two,
    two_workers,
)

from pdcore.clock import VirtualClock
from pdcore.connector import (
    ConnectorStats,
    KVCaches,
    KVConnector,
    KVLoad,
    LoadCounts,
    MultiConnector,
    NullConnector,
    OffloadCounts,
    SchedulerConnector,
    TicketCounts,
    WorkerConnector,
)
from pdcore.connector.multi.scheduler_side import MultiSchedulerConnector
from pdcore.connector.multi.worker_side import MultiWorkerConnector
from pdcore.connector.null import NullWorkerConnector
from pdcore.errors import AddressInUse, ConfigError
from pdcore.kvcache import KVCacheManager, LRUBlockPool
from pdcore.messages import TransferReport
from pdcore.request import Request


def hooks(base: type) -> list[str]:
    return [name for name in vars(base) if not name.startswith("_")]


def test_it_overrides_every_hook() -> None:
    """A hook that is added to a half's interface and not passed on is noticed here."""
    for base, multi in (
        (SchedulerConnector, MultiSchedulerConnector),
        (WorkerConnector, MultiWorkerConnector),
    ):
        assert set(hooks(base)) <= set(vars(multi)), set(hooks(base)) - set(vars(multi))


def a_manager() -> KVCacheManager:
    return KVCacheManager(LRUBlockPool(4, 4))


# How to call each hook of the scheduler's half once a load is on its way.
SCHEDULER_CALLS: dict[str, Callable[[Any, Request, KVLoad], Any]] = {
    "start": lambda half, r, load: half.start(clock=VirtualClock(), notify=lambda: None),
    "bind_kv_manager": lambda half, r, load: half.bind_kv_manager(a_manager()),
    "reset_cache": lambda half, r, load: half.reset_cache(),
    "set_xfer_handshake_metadata": lambda half, r, load: half.set_xfer_handshake_metadata([None]),
    "recognizes": lambda half, r, load: half.recognizes({}),
    "request_added": lambda half, r, load: half.request_added(a_request(), 2),
    "request_refused": lambda half, r, load: half.request_refused(a_request(HAND_OVER)),
    "get_num_new_matched_tokens": lambda half, r, load: half.get_num_new_matched_tokens(r, 0),
    "update_state_after_alloc": lambda half, r, load: half.update_state_after_alloc(r, load),
    "undo_alloc": lambda half, r, load: half.undo_alloc(r, load),
    "build_connector_meta": lambda half, r, load: half.build_connector_meta(PLAN),
    "rebuild_connector_meta": lambda half, r, load: half.rebuild_connector_meta(a_meta()),
    "step_failed": lambda half, r, load: half.step_failed(a_meta()),
    "request_finished": lambda half, r, load: half.request_finished(r, 1, BLOCKS),
    "cancel": lambda half, r, load: half.cancel(load.transfer),
    "cut_off": lambda half, r, load: half.cut_off(load.transfer),
    "update_connector_output": lambda half, r, load: half.update_connector_output(TransferReport()),
    "take_events": lambda half, r, load: half.take_events(),
    "next_wakeup": lambda half, r, load: half.next_wakeup(),
    "has_pending": lambda half, r, load: half.has_pending(),
    "explain": lambda half, r, load: half.explain(a_request()) or half.explain(r),
    "stats": lambda half, r, load: half.stats(),
    "close": lambda half, r, load: half.close(),
}
# Those about one load, which concern the one that brings it alone.
OF_THE_OWNER = {"update_state_after_alloc", "undo_alloc", "cancel", "cut_off", "explain"}

WORKER_CALLS: dict[str, Callable[[Any], Any]] = {
    "register_kv_caches": lambda half: half.register_kv_caches(
        KVCaches(buffer=np.zeros((2, 4)), bytes_per_block=32, fingerprint="f")
    ),
    "get_handshake_metadata": lambda half: half.get_handshake_metadata(),
    "start_save_kv": lambda half: half.start_save_kv(a_meta()),
    "start_load_kv": lambda half: half.start_load_kv(a_meta()),
    "needs_layer_calls": lambda half: half.needs_layer_calls(),
    "wait_for_layer_load": lambda half: half.wait_for_layer_load(0),
    "save_kv_layer": lambda half: half.save_kv_layer(0),
    "wait_for_save": lambda half: half.wait_for_save(),
    "get_finished": lambda half: half.get_finished(),
    "close": lambda half: half.close(),
}


def listen(half: Any, hook: str, heard: list[str], name: str) -> None:
    original = getattr(half, hook)

    def hear(*args: Any, **kwargs: Any) -> Any:
        heard.append(name)
        return original(*args, **kwargs)

    setattr(half, hook, hear)


@pytest.mark.parametrize("hook", hooks(SchedulerConnector))
def test_every_hook_of_the_scheduler_half_reaches_whom_it_concerns(hook: str) -> None:
    """All of them; or, if it is about one load, the one that brings it."""
    near, far, multi = two()
    far.match = 11
    request = a_request()
    load = loading(multi, request)
    heard: list[str] = []
    for name, half in (("near", near), ("far", far)):
        listen(half, hook, heard, name)
    if hook == "get_num_new_matched_tokens":
        far.match = 0
    SCHEDULER_CALLS[hook](multi, request, load)
    assert heard == (["far"] if hook in OF_THE_OWNER else ["near", "far"])


@pytest.mark.parametrize("hook", hooks(WorkerConnector))
def test_every_hook_of_the_worker_half_reaches_all(hook: str) -> None:
    """Each of them is called once."""
    near, far, multi, _ = two_workers()
    heard: list[str] = []
    for name, half in (("near", near), ("far", far)):
        listen(half, hook, heard, name)
    WORKER_CALLS[hook](multi)
    assert heard == ["near", "far"]


def test_the_earliest_time_counts() -> None:
    """Whoever wants to be woken first is."""
    near, far, multi = two()
    assert multi.next_wakeup() is None
    far.next_wakeup = lambda: 7.0  # type: ignore[method-assign]
    assert multi.next_wakeup() == 7.0
    near.next_wakeup = lambda: 9.0  # type: ignore[method-assign]
    assert multi.next_wakeup() == 7.0


def test_numbers_are_added_up_and_kept_apart() -> None:
    """Sums in the usual places, and each connector's own by its name."""
    near, far, multi = two()
    numbers = {
        "near": ConnectorStats(tickets=TicketCounts(num_granted=2), loads=LoadCounts(num_late=1)),
        "far": ConnectorStats(
            tickets=TicketCounts(num_granted=3, num_expired=1), offload=OffloadCounts(num_lost=2)
        ),
    }
    near.stats = lambda: numbers["near"]  # type: ignore[method-assign]
    far.stats = lambda: numbers["far"]  # type: ignore[method-assign]
    stats = multi.stats()
    assert stats.tickets == TicketCounts(num_granted=5, num_expired=1)
    assert stats.loads == LoadCounts(num_late=1)
    assert stats.offload == OffloadCounts(num_lost=2)
    assert stats.by_connector == numbers


def test_each_gets_its_own_ranks_metadata() -> None:
    """By name, of all ranks; a rank without any is None for all."""
    near, _, worker, _ = two_workers()
    assert worker.get_handshake_metadata() is None
    near.get_handshake_metadata = lambda: "address"  # type: ignore[method-assign]
    metadata = worker.get_handshake_metadata()
    got: dict[str, Any] = {}
    halves = two()
    for name, half in zip(NAMES, halves, strict=False):
        half.set_xfer_handshake_metadata = (  # type: ignore[method-assign]
            lambda ranks, name=name: got.update({name: ranks})
        )
    halves[-1].set_xfer_handshake_metadata([metadata, None])
    assert got == {"near": ["address", None], "far": [None, None]}


@pytest.mark.usefixtures("quiet_log")
def test_if_one_cannot_start_none_is_left_running() -> None:
    """The error is the one that it raised, also when closing fails as well."""
    near, far, multi = two()
    closed: list[str] = []

    def cannot(**_: Any) -> None:
        raise AddressInUse("taken")

    def close(name: str) -> None:
        closed.append(name)
        raise OSError("cannot close")

    far.start = cannot  # type: ignore[method-assign]
    near.close, far.close = (lambda: close("near")), (lambda: close("far"))  # type: ignore[method-assign]
    with pytest.raises(AddressInUse):
        multi.start(clock=VirtualClock(), notify=lambda: None)
    assert closed == ["near", "far"]


@pytest.mark.usefixtures("quiet_log")
def test_a_worker_half_that_cannot_close_leaves_no_other_open() -> None:
    """All are closed."""
    near, far, worker, _ = two_workers()
    closed: list[str] = []

    def close_near() -> None:
        closed.append("near")
        raise OSError("cannot close")

    near.close = close_near  # type: ignore[method-assign]
    far.close = lambda: closed.append("far")  # type: ignore[method-assign]
    worker.close()
    assert closed == ["near", "far"]


def test_a_cache_that_is_not_forgotten_is_an_error() -> None:
    """All are told, and the one that could not forget is not passed over in silence."""
    near, far, multi = two()
    told: list[str] = []

    def cannot() -> None:
        told.append("near")
        raise OSError("still there")

    near.reset_cache = cannot  # type: ignore[method-assign]
    far.reset_cache = lambda: told.append("far")  # type: ignore[method-assign]
    with pytest.raises(OSError, match="still there"):
        multi.reset_cache()
    assert told == ["near", "far"]


@pytest.mark.parametrize("names", [(), ("",), ("a/b",), ("a\n",), ("a" * 65,)])
def test_names_must_be_names(names: tuple[str, ...]) -> None:
    """There is at least one, and each can stand in a log line and before a slash."""
    with pytest.raises(ConfigError):
        MultiConnector({name: NullConnector() for name in names})


def test_the_factory_makes_both_halves() -> None:
    """Of each connector, for each rank."""

    ranks: list[int] = []

    class Ranked(NullConnector):
        def worker_side(self, rank: int = 0) -> NullWorkerConnector:
            ranks.append(rank)
            return super().worker_side(rank)

    connector: KVConnector = MultiConnector({"a": Ranked(), "b": Ranked()})
    connector.worker_side(3)
    assert ranks == [3, 3]
    assert (
        connector.scheduler_side().stats()
        == MultiConnector({"a": NullConnector(), "b": NullConnector()}).scheduler_side().stats()
    )


def test_a_half_is_found_by_its_name() -> None:
    """What only one connector has is asked of its own half."""
    multi = MultiConnector({"a": NullConnector(), "b": NullConnector()}).scheduler_side()
    assert multi.half("a") is not multi.half("b")
    assert multi.half("b") is multi.half("b")
    with pytest.raises(ConfigError, match="no connector 'c' here, but 'a', 'b'"):
        multi.half("c")
