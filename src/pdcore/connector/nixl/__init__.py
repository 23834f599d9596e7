"""KV transfer between engines over NIXL."""

from __future__ import annotations

from pdcore.connector.nixl.config import NixlConfig
from pdcore.connector.nixl.connector import NixlConnector
from pdcore.connector.nixl.params import TransferParams
from pdcore.connector.nixl.scheduler_side import NixlSchedulerConnector
from pdcore.connector.nixl.worker_side import NixlWorkerConnector, WorkerHandshake
from pdcore.connector.stats import TransferStats

__all__ = [
    "NixlConfig",
    "NixlConnector",
    "NixlSchedulerConnector",
    "NixlWorkerConnector",
    "TransferParams",
    "TransferStats",
    "WorkerHandshake",
]
