"""Which requests of an engine run on KV that was pushed."""

from __future__ import annotations

import numpy as np

from pdcore.connector.nixl.meta import NixlMeta
from pdcore.connector.nixl.worker_side import NixlWorkerConnector

__all__ = ["PushedLoads"]


class PushedLoads:
    """Looks at the orders that a worker gets: how many blocks of a load come from staging memory.

    Args:
        worker: whose orders to look at.
    """

    def __init__(self, worker: NixlWorkerConnector) -> None:
        self._num_blocks: dict[int, int] = {}
        start_load_kv = worker.start_load_kv

        def start(meta: NixlMeta | None) -> None:
            for read in meta.reads if meta is not None else ():
                slots = read.staged_slots
                num_blocks = 0 if slots is None else int(np.count_nonzero(slots >= 0))
                self._num_blocks[read.transfer.uid] = num_blocks
            start_load_kv(meta)

        worker.start_load_kv = start  # type: ignore[method-assign]

    def take(self, uid: int) -> int:
        """The number of pushed blocks in a request's newest load, once it ended."""
        return self._num_blocks.pop(uid, 0)
