"""A connector that brings nothing and keeps nothing."""

from __future__ import annotations

from typing import Any

from pdcore.connector.base import (
    ExternalMatch,
    FinishedBlocks,
    HandOver,
    KVCaches,
    KVConnector,
    KVLoad,
    SchedulerConnector,
    WorkerConnector,
)
from pdcore.messages import SchedulerOutput, TransferKey, TransferReport
from pdcore.request import Request

__all__ = ["NullConnector", "NullSchedulerConnector", "NullWorkerConnector"]


class NullSchedulerConnector(SchedulerConnector):
    """Knows of no KV anywhere else. The least that a scheduler's half must do."""

    def get_num_new_matched_tokens(self, request: Request, num_local_tokens: int) -> ExternalMatch:
        return ExternalMatch(num_tokens=0)

    def update_state_after_alloc(self, request: Request, load: KVLoad) -> None:
        pass

    def undo_alloc(self, request: Request, load: KVLoad) -> None:
        pass

    def build_connector_meta(self, output: SchedulerOutput) -> Any:
        return None

    def request_finished(
        self, request: Request, uid: int, blocks: FinishedBlocks
    ) -> HandOver | None:
        return None

    def cancel(self, transfer: TransferKey) -> None:
        pass


class NullWorkerConnector(WorkerConnector):
    """Moves no bytes. The least that a worker's half must do."""

    def register_kv_caches(self, caches: KVCaches) -> None:
        pass

    def start_load_kv(self, meta: Any) -> None:
        pass

    def get_finished(self) -> TransferReport:
        return TransferReport()


class NullConnector(KVConnector):
    """Makes halves that do nothing: for tests, and as the smallest example of a connector."""

    def scheduler_side(self) -> NullSchedulerConnector:
        return NullSchedulerConnector()

    def worker_side(self, rank: int = 0) -> NullWorkerConnector:
        return NullWorkerConnector()
