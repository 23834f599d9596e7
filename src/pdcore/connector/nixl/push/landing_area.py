"""A rank's staging memory for what peers push, and the thread that copies it into place."""

from __future__ import annotations

import logging
import mmap
import queue
import threading
from collections.abc import Callable

import attrs
import numpy as np

from pdcore.clock import Clock
from pdcore.connector.base import KVCaches
from pdcore.connector.nixl.config import NixlConfig
from pdcore.connector.nixl.memory import MemoryRegion
from pdcore.connector.nixl.meta import Doorbell, RankEndpoint, ReadTask
from pdcore.connector.nixl.serving import ServingAgent
from pdcore.connector.nixl.staging import as_blocks
from pdcore.errors import ConfigError

__all__ = ["LandingArea"]

logger = logging.getLogger(__name__)

_ABANDONED: list[mmap.mmap] = []
"""Where peers may still write to though nobody reads: addresses that must not be used again."""


class LandingArea:
    """Slots of one block each, which peers write to. Only this engine copies out of them.

    So a late or wrong write of a peer hits nothing but slots; which of them may be used, and for
    what, is for the scheduler half to say.

    Args:
        caches: the rank's KV memory, in host memory.
        config: the connector's settings.
        clock: for how long a ring lasts.

    Raises:
        ConfigError: the KV is not in host memory, or not even one block fits.
    """

    def __init__(self, caches: KVCaches, *, config: NixlConfig, clock: Clock) -> None:
        num_slots = config.push_staging_bytes // caches.bytes_per_block
        if num_slots < 1:
            raise ConfigError(
                f"push_staging_bytes={config.push_staging_bytes} has no room for a block of "
                f"{caches.bytes_per_block} bytes: raise it, or set 0 to take no pushes"
            )
        if MemoryRegion.of(caches).mem_type != "DRAM":
            raise ConfigError(
                "push_staging_bytes is set, but the KV is not in host memory: set it to 0"
            )
        self._cache = as_blocks(caches.buffer, caches.bytes_per_block)
        self._memory = mmap.mmap(
            -1, num_slots * caches.bytes_per_block, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        self.slots = np.frombuffer(self._memory, np.uint8).reshape(num_slots, -1)
        region = MemoryRegion.of(
            KVCaches(buffer=self.slots, bytes_per_block=caches.bytes_per_block, fingerprint="")
        )
        self._serving = ServingAgent(
            region,
            clock=clock,
            doorbell_host=config.doorbell_host,
            busy_poll_s=config.busy_poll_s,
            idle_poll_s=config.idle_poll_s,
        )
        self.endpoint = RankEndpoint(
            agent_metadata=self._serving.metadata,
            region=region,
            fingerprint=caches.fingerprint,
            layout=caches.layout,
        )
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="pdcore-nixl-landing", daemon=True)
        self._thread.start()

    @property
    def doorbell(self) -> Doorbell:
        return self._serving.doorbell

    def submit(self, task: ReadTask, then: Callable[[ReadTask | None], None]) -> None:
        """Copy a load's staged blocks into place; returns at once.

        Args:
            task: a load with ``staged_slots``.
            then: called on this area's thread with what is left to read, which may be nothing; or
                with None if the blocks could not be copied.
        """

        def copy() -> None:
            try:
                rest = self._copy(task)
            except Exception:
                logger.exception("copying pushed blocks failed")
                then(None)
            else:
                then(rest)

        self._orders.put(copy)

    def close(self) -> None:
        """End the copying, then the agent. Peers that still write lose their connection.

        On one host a peer may write even then, so the addresses stay reserved; the memory behind
        them goes back to the system.
        """
        self._orders.put(None)
        self._thread.join()
        self._serving.close()
        self._memory.madvise(mmap.MADV_DONTNEED)
        _ABANDONED.append(self._memory)

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            order()

    def _copy(self, task: ReadTask) -> ReadTask:
        slots = task.staged_slots
        assert slots is not None
        is_here = slots >= 0
        for block_id, slot in zip(
            task.local_block_ids[is_here].tolist(), slots[is_here].tolist(), strict=True
        ):
            self._cache[block_id] = self.slots[slot]
        return attrs.evolve(
            task,
            local_block_ids=task.local_block_ids[~is_here],
            remote_block_ids=task.remote_block_ids[~is_here],
            staged_slots=None,
        )
