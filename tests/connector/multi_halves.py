"""Halves of connectors that do what a test says, and of the `MultiConnector` that has two."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from pdcore.connector import ConnectorEvents, ExternalMatch, FinishedBlocks, HandOver, KVLoad
from pdcore.connector.multi.meta import MultiMeta
from pdcore.connector.multi.scheduler_side import MultiSchedulerConnector
from pdcore.connector.multi.worker_side import MultiWorkerConnector
from pdcore.connector.null import NullSchedulerConnector, NullWorkerConnector
from pdcore.errors import InvalidTransferParams
from pdcore.messages import SchedulerOutput, TransferKey, TransferReport
from pdcore.request import FinishReason, Request

NAMES = ("near", "far")
KEY = TransferKey(1, 1)
HAND_OVER = {"do_remote_decode": True}
NO_IDS = np.zeros(0, np.int32)
PLAN = SchedulerOutput(
    step_id=0,
    rows=NO_IDS,
    epochs=NO_IDS,
    num_scheduled_tokens=NO_IDS,
    num_computed_tokens=NO_IDS,
    samples=np.zeros(0, np.bool_),
    block_rows=NO_IDS,
    block_positions=NO_IDS,
    block_ids=NO_IDS,
    finished_rows=NO_IDS,
)
BLOCKS = FinishedBlocks(
    block_ids=np.array([1], np.int32),
    generations=np.ones(1, np.int64),
    num_tokens=3,
    finish_reason=FinishReason.LENGTH,
)


class Half(NullSchedulerConnector):
    """Does what a test says, and remembers what it was shown.

    Attributes:
        match: its answer about KV, or what it raises.
        wish: what it hands over.
        added, finished, refused: the parameters of requests that it heard of.
        kind: of the parameters that it reads.
    """

    def __init__(self, kind: str = "", *, match: Any = 0, is_async: bool = True) -> None:
        super().__init__()
        self.kind = kind
        self.match = match
        self.is_async = is_async
        self.wish: HandOver | None = None
        self.meta: Any = None
        self.added: list[Any] = []
        self.finished: list[Any] = []
        self.refused: list[Any] = []
        self.loads: list[KVLoad] = []
        self.bad: set[str] = set()
        self.said = ConnectorEvents()

    def recognizes(self, params: Any) -> bool:
        return bool(self.kind) and params.get("kind") == self.kind

    def request_added(self, request: Request, uid: int) -> None:
        self._raise_if_bad("request_added")
        params = request.kv_transfer_params or {}
        if params.get("kind", self.kind) != self.kind or params.get("is_bad"):
            raise InvalidTransferParams(f"not for {self.kind!r}: {params}")
        self.added.append(request.kv_transfer_params)

    def request_refused(self, request: Request) -> None:
        self.refused.append(request.kv_transfer_params)
        self._raise_if_bad("request_refused")

    def get_num_new_matched_tokens(
        self, request: Request, num_local_tokens: int
    ) -> ExternalMatch | None:
        self._raise_if_bad("get_num_new_matched_tokens")
        if self.match is None:
            return None
        return ExternalMatch(num_tokens=self.match, is_async=self.is_async)

    def update_state_after_alloc(self, request: Request, load: KVLoad) -> None:
        self._raise_if_bad("update_state_after_alloc")
        assert load.request is request
        self.loads.append(load)

    def build_connector_meta(self, output: SchedulerOutput) -> Any:
        self._raise_if_bad("build_connector_meta")
        return self.meta

    def request_finished(
        self, request: Request, uid: int, blocks: FinishedBlocks
    ) -> HandOver | None:
        self.finished.append(request.kv_transfer_params)
        self._raise_if_bad("request_finished")
        return self.wish

    def take_events(self) -> ConnectorEvents:
        said, self.said = self.said, super().take_events()
        self._raise_if_bad("take_events")
        return attrs.evolve(said, failed=(*said.failed, *self.said.failed))

    def _raise_if_bad(self, hook: str) -> None:
        if hook in self.bad:
            raise OSError(f"bad {hook}")


class Worker(NullWorkerConnector):
    """Writes down who was called with what; raises when a test says so."""

    def __init__(self, name: str, calls: list[tuple[str, str, Any]]) -> None:
        self.name, self.calls = name, calls
        self.bad: set[str] = set()
        self.report = TransferReport()

    def start_save_kv(self, meta: Any) -> None:
        self._called("save", meta)

    def start_load_kv(self, meta: Any) -> None:
        self._called("load", meta)

    def wait_for_save(self) -> None:
        self._called("wait", None)

    def get_finished(self) -> TransferReport:
        self._called("report", None)
        return self.report

    def _called(self, hook: str, argument: Any) -> None:
        self.calls.append((self.name, hook, argument))
        if hook in self.bad:
            raise OSError(f"bad {hook} of {self.name}")


def a_request(params: dict[str, Any] | None = None) -> Request:
    return Request("r", range(4, 20), kv_transfer_params=params)


def a_load(request: Request, transfer: TransferKey = KEY) -> KVLoad:
    return KVLoad(
        transfer=transfer,
        request=request,
        num_local_tokens=4,
        num_external_tokens=11,
        block_ids=np.arange(1, 4, dtype=np.int32),
        deadline=60.0,
    )


def two(**options: Any) -> tuple[Half, Half, MultiSchedulerConnector]:
    near, far = Half("near", **options), Half("far", **options)
    return near, far, MultiSchedulerConnector({"near": near, "far": far})


def two_workers() -> tuple[Worker, Worker, MultiWorkerConnector, list[tuple[str, str, Any]]]:
    calls: list[tuple[str, str, Any]] = []
    near, far = Worker("near", calls), Worker("far", calls)
    return near, far, MultiWorkerConnector({"near": near, "far": far}), calls


def a_meta(*, synchronous: str | None = None, **options: Any) -> MultiMeta:
    return MultiMeta(
        parts={"near": "n", "far": "f"},
        loads={KEY: "near"},
        synchronous=frozenset([synchronous] if synchronous else []),
        **options,
    )


def loading(multi: MultiSchedulerConnector, request: Request) -> KVLoad:
    """Let a request join, find its KV, and begin to load."""
    multi.request_added(request, 1)
    multi.get_num_new_matched_tokens(request, 4)
    load = a_load(request)
    multi.update_state_after_alloc(request, load)
    return load
