"""Finds out which engines that push live, and which have died."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from pdcore.connector.nixl.addresses import AllowedPeers
from pdcore.connector.nixl.config import NixlConfig
from pdcore.connector.nixl.control import ControlThread
from pdcore.connector.nixl.push.landing import Suspect
from pdcore.connector.nixl.push.life_sign import is_refused

__all__ = ["Lookout"]

logger = logging.getLogger(__name__)

_SHARE_OF_A_REQUEST = 0.5
"""So long may a look take while a peer waits for its answer."""
_MAX_NUM_WARNED = 1024


class Lookout:
    """Looks at the ports that are open as long as their processes live; see `LifeSign`.

    Each engine is looked at on its own, so that one whose host is silent delays nobody's proof. All
    of it runs on the control thread.

    Args:
        config: the connector's settings.
        control: where looks run.
    """

    def __init__(self, config: NixlConfig, control: ControlThread) -> None:
        self._config = config
        self._control = control
        self._allowed = AllowedPeers(config.allowed_peers)
        self._being_looked_at: set[Suspect] = set()
        self._warned_of: set[str] = set()

    async def can_see(self, writer: Suspect) -> bool:
        """Whether all ranks of an engine are seen to live, so that their death will be noticed."""
        timeout_s = _SHARE_OF_A_REQUEST * self._config.request_timeout_s
        if self._may_look(writer) and await self._are_all(False, writer, timeout_s=timeout_s):
            return True
        if len(self._warned_of) < _MAX_NUM_WARNED and writer.writer not in self._warned_of:
            self._warned_of.add(writer.writer)
            logger.warning(
                "engine %s at %s pushes, but its ports %s cannot be reached, or allowed_peers "
                "forbids it: if it dies while it writes, its slots stay in quarantine until this "
                "engine is restarted",
                writer.writer,
                writer.life_host,
                list(writer.life_ports),
            )
        return False

    def look_after(self, suspects: Iterable[Suspect], has_died: Callable[[Suspect], None]) -> None:
        """Begin to look at engines, those apart that are being looked at; returns at once.

        Args:
            suspects: engines that were seen alive.
            has_died: called, later, for each of them that is proven dead.
        """
        for suspect in suspects:
            if suspect not in self._being_looked_at:
                self._being_looked_at.add(suspect)
                self._control.spawn(self._look_at(suspect, has_died))

    async def _look_at(self, suspect: Suspect, has_died: Callable[[Suspect], None]) -> None:
        try:
            timeout_s = self._config.request_timeout_s
            is_dead = await self._are_all(True, suspect, timeout_s=timeout_s)
        finally:
            self._being_looked_at.discard(suspect)
        if is_dead:
            has_died(suspect)

    def _may_look(self, writer: Suspect) -> bool:
        if not writer.life_ports or not all(writer.life_ports):
            return False
        if self._config.key is not None and self._allowed.is_default:
            return True
        return all((writer.life_host, port) in self._allowed for port in writer.life_ports)

    async def _are_all(self, refused: bool, writer: Suspect, *, timeout_s: float) -> bool:
        looks = (
            is_refused(writer.life_host, port, timeout_s=timeout_s) for port in writer.life_ports
        )
        return all(look is refused for look in await asyncio.gather(*looks))
