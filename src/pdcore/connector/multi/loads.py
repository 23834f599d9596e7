"""Which connector brings which load."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import attrs

from pdcore.connector.base import KVLoad
from pdcore.connector.multi.sharing import SharedRequest
from pdcore.messages import TransferKey

__all__ = ["JointLoads", "OwnedLoad"]

_MAX_NUM_ENDED = 4096


@attrs.frozen(kw_only=True, eq=False)
class OwnedLoad:
    """A load and the connector that brings it.

    Args:
        owner: the connector's name.
        load: as the connector was told of it.
        shared: the request it is for.
        is_async: whether its end will be reported.
    """

    owner: str
    load: KVLoad
    shared: SharedRequest
    is_async: bool


class JointLoads:
    """The loads that were begun and have not ended.

    The first report of a load, by the connector that brings it, ends it. Of those that ended the
    newest four thousand are remembered, so that what is said of them again finds its connector.
    """

    def __init__(self) -> None:
        self._loads: dict[TransferKey, OwnedLoad] = {}
        self._unsent: dict[TransferKey, OwnedLoad] = {}
        self._ended: OrderedDict[TransferKey, str] = OrderedDict()

    def begin(self, load: OwnedLoad) -> None:
        self._loads[load.load.transfer] = self._unsent[load.load.transfer] = load

    def undo(self, transfer: TransferKey) -> OwnedLoad | None:
        """Forget a load whose plan was taken back."""
        self._unsent.pop(transfer, None)
        return self._loads.pop(transfer, None)

    def take_unsent(self) -> dict[TransferKey, OwnedLoad]:
        """The loads that no worker has heard of; now they have."""
        unsent, self._unsent = self._unsent, {}
        return unsent

    def retake(self, transfers: Iterable[TransferKey]) -> None:
        """No worker has heard of these loads after all."""
        self._unsent.update({key: self._loads[key] for key in transfers if key in self._loads})

    def owner_of(self, transfer: TransferKey) -> str | None:
        """Who brings, or brought, a load."""
        load = self._loads.get(transfer)
        return self._ended.get(transfer) if load is None else load.owner

    def of(self, shared: SharedRequest) -> OwnedLoad | None:
        """The newest load that a request waits for."""
        mine = [load for load in self._loads.values() if load.shared is shared]
        return mine[-1] if mine else None

    def end(self, connector: str, transfer: TransferKey) -> OwnedLoad | None:
        """A connector says that a load ended; None if it is not its own, or ended before."""
        load = self._loads.get(transfer)
        if load is None or load.owner != connector:
            return None
        self._forget(transfer)
        return load

    def request_ended(self, uid: int) -> None:
        """Nothing more is heard of a request's synchronous loads."""
        for transfer, load in tuple(self._loads.items()):
            if transfer.uid == uid and not load.is_async:
                self._forget(transfer)

    def _forget(self, transfer: TransferKey) -> None:
        self._unsent.pop(transfer, None)
        self._ended[transfer] = self._loads.pop(transfer).owner
        if len(self._ended) > _MAX_NUM_ENDED:
            self._ended.popitem(last=False)
