"""Hand-overs that several connectors take part in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pdcore.answers import check_answer, check_free
from pdcore.connector.base import HandOver
from pdcore.connector.multi.params import join_params

__all__ = ["JointHandOvers"]


class JointHandOvers:
    """Gives each hand-over one name, and knows which connectors still need its blocks."""

    def __init__(self) -> None:
        self._num_granted = 0
        self._names: dict[tuple[str, str], str] = {}
        self._num_open: dict[str, int] = {}

    def join(
        self, wishes: Mapping[str, HandOver], *, is_clear: Callable[[str, Mapping[str, Any]], bool]
    ) -> HandOver | None:
        """One hand-over out of those that connectors want.

        Args:
            wishes: by the connector's name.
            is_clear: says whose name need not be sent along with its parameters, since nobody else
                can take them for his own.
        """
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
        is_plain = all(is_clear(name, part) for name, part in params.items())
        return HandOver(
            transfer_id=transfer_id, kv_transfer_params=join_params(params, is_plain=is_plain)
        )

    def check(self, connector: str, wish: HandOver | None) -> None:
        """Raise `TransferError` for what is no wish, or names one that is still open."""
        check_answer(wish, HandOver, may_be_none=True)
        if wish is not None and wish.transfer_id is not None:
            name = wish.transfer_id
            check_free(name, is_open=self.is_known(connector, name))

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
