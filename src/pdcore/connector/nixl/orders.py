"""What the workers are to hear with the next plan."""

from __future__ import annotations

from collections.abc import Callable

from pdcore.connector.nixl.meta import NixlMeta, PeerCutOff, ReadTask
from pdcore.connector.nixl.pull import Pull
from pdcore.messages import TransferKey

__all__ = ["WorkerOrders"]


class WorkerOrders:
    """Collects orders between two plans. The scheduler's thread owns it."""

    def __init__(self) -> None:
        self._reads: dict[TransferKey, Pull] = {}
        self._cancels: list[TransferKey] = []
        self._cut_offs: dict[str, str] = {}

    def read(self, transfer: TransferKey, pull: Pull) -> None:
        """Start a load, unless it is dropped before the plan is made."""
        self._reads[transfer] = pull

    def drop(self, transfer: TransferKey) -> None:
        """Do not start a load after all."""
        self._reads.pop(transfer, None)

    def cancel(self, transfer: TransferKey) -> None:
        """Tell the workers that nobody wants a load any more."""
        self._cancels.append(transfer)

    def cut_off(self, peer_id: str, cause: str) -> None:
        """Stop everything from a peer by force. The first cause stands."""
        self._cut_offs.setdefault(peer_id, cause)

    def take(self, describe: Callable[[Pull], ReadTask]) -> NixlMeta:
        """Return the orders and forget them; ``describe`` turns each load into its task."""
        reads, self._reads = self._reads, {}
        cancels, self._cancels = self._cancels, []
        cut_offs, self._cut_offs = self._cut_offs, {}
        return NixlMeta(
            reads=tuple(describe(pull) for pull in reads.values()),
            cancels=tuple(cancels),
            cut_offs=tuple(PeerCutOff(peer_id=k, cause=v) for k, v in cut_offs.items()),
        )

    def __bool__(self) -> bool:
        return bool(self._reads or self._cancels or self._cut_offs)
