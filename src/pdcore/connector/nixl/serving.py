"""Letting peers read: an agent over the KV memory, and a thread that answers for it."""

from __future__ import annotations

import logging
import threading

from pdcore.clock import Clock
from pdcore.connector.nixl.agent import TransferAgent
from pdcore.connector.nixl.doorbell import DoorbellListener, ring
from pdcore.connector.nixl.memory import MemoryRegion
from pdcore.connector.nixl.meta import Doorbell
from pdcore.errors import PeerLost

__all__ = ["ServingAgent"]

logger = logging.getLogger(__name__)


class ServingAgent:
    """Makes one rank's KV memory readable for peers.

    A peer's first read, and every read over a network, ends only if this side makes progress. The
    thread sleeps between rounds: ``busy_poll_s`` while the doorbell says that somebody reads,
    ``idle_poll_s`` otherwise. An idle engine thus uses well under 1 % of a core, and a first read
    whose ring got lost is late by ``idle_poll_s`` for each round trip.

    Args:
        region: the memory to open.
        clock: for how long a ring lasts.
        doorbell_host: where to listen for rings; loopback when the scheduler half is on this host.
        busy_poll_s, idle_poll_s: seconds between two rounds.

    Raises:
        MissingExtra: NIXL is not installed.
        PeerLost: NIXL does not start.
    """

    def __init__(
        self,
        region: MemoryRegion,
        *,
        clock: Clock,
        doorbell_host: str,
        busy_poll_s: float,
        idle_poll_s: float,
    ) -> None:
        self._clock = clock
        self._busy_poll_s = busy_poll_s
        self._idle_poll_s = idle_poll_s
        self._busy_until = -float("inf")
        self._closing = threading.Event()
        self._agent = TransferAgent(region)
        self.metadata = self._agent.metadata()
        self._listener = DoorbellListener(doorbell_host)
        self._thread = threading.Thread(target=self._run, name="pdcore-nixl-serve", daemon=True)
        self._thread.start()

    @property
    def doorbell(self) -> Doorbell:
        return self._listener.address

    def close(self) -> None:
        """End the thread, then the agent. Peers that still read lose their connection."""
        self._closing.set()
        ring(self.doorbell, 0.0)
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._listen()
            try:
                self._agent.progress()
            except PeerLost as error:
                logger.info("a peer that read from here is gone: %s", error)
        self._agent.close()
        self._listener.close()

    def _listen(self) -> None:
        is_busy = self._clock.now() < self._busy_until
        seconds = self._listener.wait(self._busy_poll_s if is_busy else self._idle_poll_s)
        if seconds is not None:
            self._busy_until = self._clock.now() + seconds
