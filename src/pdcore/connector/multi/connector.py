"""The factory of the halves that combine several connectors."""

from __future__ import annotations

from collections.abc import Mapping

from pdcore.connector.base import KVConnector
from pdcore.connector.multi.scheduler_side import MultiSchedulerConnector
from pdcore.connector.multi.worker_side import MultiWorkerConnector
from pdcore.errors import ConfigError

__all__ = ["MultiConnector"]

_MAX_NAME = 64


class MultiConnector(KVConnector):
    """Uses several connectors as one: it loads from the first that has something, and hands over
    and saves to all.

    - Loads: the connectors are asked in the order given. The first that has tokens brings them; one
      that says "ask me later" is waited for. After a failed load the one that failed comes last
      for that request.
    - Hand-overs: each connector may keep the blocks. They are let go when all of them have.
    - ``kv_transfer_params``: those of a single connector are passed on unchanged, unless another
      would take them for its own; those of several under one mapping, by name. On the other side
      they go to the connector of that name; unchanged ones to the first that recognizes and
      accepts them.
    - Faults: a connector that raises for one request is passed over for it, and the log says so.
      Where going on could use KV that is not there (a load that a step relies on, a save, KV about
      to be overwritten), the step fails as it does with one connector.

    Args:
        connectors: by name, in order of preference. Engines that hand over to each other need the
            same names for connectors that belong together; the order may differ.

    Raises:
        ConfigError: there is no connector, something is none, or a name is not 1 to 64 printable
            characters, or has a slash.
    """

    def __init__(self, connectors: Mapping[str, KVConnector]) -> None:
        if not (isinstance(connectors, Mapping) and connectors):
            raise ConfigError(
                f"connectors={connectors!r:.80}: must be a mapping from names to at least one "
                "connector"
            )
        for name, connector in connectors.items():
            _check_name(name)
            if not isinstance(connector, KVConnector):
                raise ConfigError(
                    f"connectors[{name!r}]={connector!r:.80}: must be a KVConnector, which makes "
                    "its halves itself"
                )
        self._connectors = dict(connectors)

    def scheduler_side(self) -> MultiSchedulerConnector:
        return MultiSchedulerConnector(
            {name: each.scheduler_side() for name, each in self._connectors.items()}
        )

    def worker_side(self, rank: int = 0) -> MultiWorkerConnector:
        return MultiWorkerConnector(
            {name: each.worker_side(rank) for name, each in self._connectors.items()}
        )


def _check_name(name: object) -> None:
    is_name = isinstance(name, str) and 0 < len(name) <= _MAX_NAME and name.isprintable()
    if not is_name or "/" in str(name):
        raise ConfigError(
            f"{name!r:.100} cannot name a connector: use 1 to {_MAX_NAME} printable "
            "characters without a slash"
        )
