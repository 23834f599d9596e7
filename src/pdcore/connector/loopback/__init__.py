"""A connector between engines of one process, with programmable faults."""

from __future__ import annotations

from pdcore.connector.loopback.connector import LoopbackConnector
from pdcore.connector.loopback.fabric import LoopbackFabric
from pdcore.connector.loopback.faults import LoopbackFaults

__all__ = ["LoopbackConnector", "LoopbackFabric", "LoopbackFaults"]
