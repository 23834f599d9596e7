"""The factory of the offload connector's two halves."""

from __future__ import annotations

from pdcore.connector.base import KVConnector
from pdcore.connector.offload.config import OffloadConfig
from pdcore.connector.offload.scheduler_side import OffloadSchedulerConnector
from pdcore.connector.offload.worker_side import OffloadWorkerConnector

__all__ = ["OffloadConnector"]


class OffloadConnector(KVConnector):
    """Keeps KV blocks that the pool has no room for in host memory, and behind that on disk.

    Blocks are saved once they are full and the step that wrote them is committed: each once, while
    the pool still has it, in the step after. So nothing that a step in flight may yet take back is
    ever saved; a request that is preempted, or ends, has what it computed saved already; and what
    is on disk survives the engine, crash included. Saving at eviction instead would save fewer
    blocks, but all of a burst in the one step that needs the room, and would lose at the end of the
    engine what it never evicted.

    The copy to host memory is made at the start of a step, before the step writes anything. The
    blocks that it reads were handed out by no plan before that step's, so it needs no hold and
    takes no room from the pool. From there on the pool is not involved: loads and disk writes read
    host memory, and loads pin what they read.

    Both tiers are caches, and every record says itself whose it is. A block whose record is
    missing, damaged or another's when it is loaded counts as a miss: what came before it is kept,
    the rest is computed. So a write to disk may fail or be dropped (when host memory is needed
    again before the disk kept up) and nobody need be told. It takes
    ``Limits(on_load_failure="recompute")``, the default.

    After the model runner was initialised, pass what each rank's `get_handshake_metadata` returns
    to `set_xfer_handshake_metadata` of the scheduler's half; until then nothing is saved.

    Args:
        config: how much is kept, and where.
    """

    def __init__(self, config: OffloadConfig) -> None:
        self.config = config

    def scheduler_side(self) -> OffloadSchedulerConnector:
        return OffloadSchedulerConnector(self.config)

    def worker_side(self, rank: int = 0) -> OffloadWorkerConnector:
        return OffloadWorkerConnector(self.config, rank=rank)
