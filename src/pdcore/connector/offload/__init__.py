"""KV in host memory and on disk, for prefixes that the block pool has no room for."""

from __future__ import annotations

from pdcore.connector.offload.config import OffloadConfig
from pdcore.connector.offload.connector import OffloadConnector
from pdcore.connector.offload.scheduler_side import OffloadSchedulerConnector
from pdcore.connector.offload.worker_side import OffloadWorkerConnector

__all__ = [
    "OffloadConfig",
    "OffloadConnector",
    "OffloadSchedulerConnector",
    "OffloadWorkerConnector",
]
