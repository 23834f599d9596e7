"""Hand-overs that several connectors take part in."""

from __future__ import annotations

from collections.abc import Mapping

from pdcore.connector.base import HandOver
from pdcore.connector.multi.params import join_params

__all__ = ["JointHandOvers"]


class JointHandOvers:
    """Gives each hand-over one name, and knows which connectors still need its blocks."""

    def __init__(self) -> None:
        self._num_granted = 0
        self._names: dict[tuple[str, str], str] = {}
        self._num_open: dict[str, int] = {}

    def join(self, wishes: Mapping[str, HandOver]) -> HandOver | None:
        """One hand-over out of those that connectors want, by their name."""
        if not wishes:
            return None
        kept = {
            (name, wish.transfer_id)
            for name, wish in wishes.items()
            if wish.transfer_id is not None
        }
        transfer_id = None
        if kept:
            self._num_granted += 1
            transfer_id = f"multi-{self._num_granted}"
            self._num_open[transfer_id] = len(kept)
            self._names.update(dict.fromkeys(kept, transfer_id))
        params = {
            name: wish.kv_transfer_params
            for name, wish in wishes.items()
            if wish.kv_transfer_params is not None
        }
        return HandOver(transfer_id=transfer_id, kv_transfer_params=join_params(params))

    def is_known(self, connector: str, transfer_id: str) -> bool:
        """Whether a connector has taken part in this hand-over, and not let go of it yet."""
        return (connector, transfer_id) in self._names

    def sent(self, connector: str, transfer_id: str) -> str | None:
        """A connector needs the blocks no more; the hand-over's name if it was the last one."""
        name = self._names.pop((connector, transfer_id))
        self._num_open[name] -= 1
        if self._num_open[name]:
            return None
        del self._num_open[name]
        return name
