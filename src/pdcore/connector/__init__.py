"""KV connectors: they bring KV from elsewhere, and hand it over."""

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
from pdcore.connector.loopback import LoopbackConnector, LoopbackFabric, LoopbackFaults
from pdcore.connector.null import NullConnector
from pdcore.connector.tickets import TicketAnswer, TicketRegistry

__all__ = [
    "ConnectorEvents",
    "ExternalMatch",
    "FinishedBlocks",
    "HandOver",
    "KVCaches",
    "KVConnector",
    "KVLoad",
    "LoopbackConnector",
    "LoopbackFabric",
    "LoopbackFaults",
    "NullConnector",
    "SchedulerConnector",
    "TicketAnswer",
    "TicketRegistry",
    "WorkerConnector",
]
