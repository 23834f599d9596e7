"""The factory of a loopback connector's halves."""

from __future__ import annotations

from pdcore.checks import check_count, check_positive
from pdcore.connector.base import KVConnector
from pdcore.connector.loopback.fabric import LoopbackEngine, LoopbackFabric
from pdcore.connector.loopback.scheduler import LoopbackSchedulerConnector
from pdcore.connector.loopback.worker import LoopbackWorkerConnector
from pdcore.errors import ConfigError

__all__ = ["LoopbackConnector"]


class LoopbackConnector(KVConnector):
    """Joins prefill and decode engines of one process with real copies between their KV memories.

    A prefill request asks for a hand-over with ``kv_transfer_params={"do_remote_decode": True}``;
    what its last `RequestOutput` carries goes, unchanged, into the decode request with the same
    prompt. An engine may do both. Leases, tickets and acceptance work as over a network, and the
    fabric's faults make the wire as bad as a test wants it.

    Unlike other connectors it cannot travel to another process.

    Args:
        fabric: shared by all engines that are to reach each other.
        engine_id: this engine's name on it. Making a connector under a name that is taken starts
            that engine's next life, as after a crash.
        block_size: tokens in a block of its KV memory.
        lease_s: how long a hand-over is kept without a renewal.
    """

    def __init__(
        self, fabric: LoopbackFabric, *, engine_id: str, block_size: int, lease_s: float = 30.0
    ) -> None:
        check_count("block_size", block_size)
        check_positive("lease_s", lease_s)
        self._fabric = fabric
        self._block_size = block_size
        self._lease_s = lease_s
        self._engine: LoopbackEngine = fabric.join(engine_id)

    def scheduler_side(self) -> LoopbackSchedulerConnector:
        return LoopbackSchedulerConnector(
            self._fabric, self._engine, block_size=self._block_size, lease_s=self._lease_s
        )

    def worker_side(self, rank: int = 0) -> LoopbackWorkerConnector:
        if rank != 0:
            raise ConfigError(f"rank={rank}: a loopback engine has rank 0 alone")
        return LoopbackWorkerConnector(self._fabric, self._engine)
