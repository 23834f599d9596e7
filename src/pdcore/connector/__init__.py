"""KV connectors: they bring KV from elsewhere, and hand it over.

The interface is here. Connectors that move KV are imported from their own folders, so that nobody
pays for those not used: `pdcore.connector.loopback`, `pdcore.connector.nixl`,
`pdcore.connector.offload`.
"""

from __future__ import annotations

from pdcore.connector.base import (
    ConnectorEvents,
    ExternalMatch,
    FinishedBlocks,
    HandOver,
    KVCaches,
    KVConnector,
    KVLoad,
    SchedulerConnector,
    WorkerConnector,
)
from pdcore.connector.layout import KVLayout
from pdcore.connector.multi import MultiConnector, MultiStats
from pdcore.connector.null import NullConnector
from pdcore.connector.stats import (
    ConnectorStats,
    LandingCounts,
    LoadCounts,
    OffloadCounts,
    PushCounts,
    TicketCounts,
    TransferStats,
)

__all__ = [
    "ConnectorEvents",
    "ConnectorStats",
    "ExternalMatch",
    "FinishedBlocks",
    "HandOver",
    "KVCaches",
    "KVConnector",
    "KVLayout",
    "KVLoad",
    "LandingCounts",
    "LoadCounts",
    "MultiConnector",
    "MultiStats",
    "NullConnector",
    "OffloadCounts",
    "PushCounts",
    "SchedulerConnector",
    "TicketCounts",
    "TransferStats",
    "WorkerConnector",
]
