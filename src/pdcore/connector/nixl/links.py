"""The engines that an engine asks."""

from __future__ import annotations

import attrs

from pdcore.clock import Clock
from pdcore.connector.nixl.config import NixlConfig
from pdcore.connector.nixl.control import ControlThread
from pdcore.connector.nixl.engine_name import EngineName
from pdcore.connector.nixl.link import PeerLink
from pdcore.connector.nixl.meta import RankEndpoint
from pdcore.connector.nixl.peer_params import PeerParams

__all__ = ["PeerLinks"]


@attrs.define(eq=False)
class _Entry:
    link: PeerLink
    used_at: float


class PeerLinks:
    """One `PeerLink` for each life of each engine; unused ones are let go after a while.

    The scheduler's thread owns it.

    Args:
        name: this engine.
        config: its settings.
        control: the thread that the links run on.
        clock: for how long a link is unused.
    """

    def __init__(
        self, *, name: EngineName, config: NixlConfig, control: ControlThread, clock: Clock
    ) -> None:
        self._name = name
        self._config = config
        self._control = control
        self._clock = clock
        self._entries: dict[tuple[str, int, str], _Entry] = {}
        self.endpoints: tuple[RankEndpoint, ...] = ()

    def get(self, params: PeerParams) -> PeerLink:
        """The link to a ticket's or push's engine, for one more user; see `PeerLink.num_users`."""
        now = self._clock.now()
        self._let_go_unused(now)
        address = (params.host, params.port, params.peer_id)
        entry = self._entries.get(address)
        if entry is None:
            link = PeerLink(params, name=self._name, config=self._config, endpoints=self.endpoints)
            entry = self._entries[address] = _Entry(link, now)
        entry.used_at = now
        return entry.link

    def close(self) -> None:
        """Close every link."""
        for entry in self._entries.values():
            self._control.call(entry.link.close)
        self._entries.clear()

    def _let_go_unused(self, now: float) -> None:
        oldest_s = now - self._config.idle_peer_timeout_s
        for address, entry in tuple(self._entries.items()):
            if entry.link.num_users == 0 and entry.used_at < oldest_s:
                del self._entries[address]
                self._control.call(entry.link.close)
