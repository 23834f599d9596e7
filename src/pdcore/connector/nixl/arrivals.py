"""Whose data is all here, as the workers say it ahead of their reports."""

from __future__ import annotations

import threading
from collections.abc import Coroutine
from typing import Any

import attrs

from pdcore.connector.nixl.driver import TicketDriver
from pdcore.connector.nixl.notices import Notice, NoticeKind
from pdcore.messages import TransferKey

__all__ = ["Arrivals"]


@attrs.define(eq=False)
class _Expected:
    driver: TicketDriver
    ranks: set[int] = attrs.field(factory=set)
    is_asked: bool = False
    is_closed: bool = False


class Arrivals:
    """Has the peer asked to vouch for a load as soon as the last rank says that its data is here.

    Without it that would wait for the step which brings the report. The report is still what ends
    a load: it and the peer's word are both needed, and come in either order.

    The scheduler's thread says which loads are expected, the control thread what it heard. Each
    load is asked for once: by this, or, when `close` says that it was not, by whoever closed it.
    """

    def __init__(self) -> None:
        self.num_ranks = 1
        self._lock = threading.Lock()
        self._expected: dict[TransferKey, _Expected] = {}

    def expect(self, transfer: TransferKey, driver: TicketDriver) -> None:
        """The workers are given this load now; what they said of it before does not count."""
        with self._lock:
            self._expected[transfer] = _Expected(driver)

    def close(self, transfer: TransferKey) -> bool:
        """Ask for this load no more; return whether its peer was asked already. Until `forget` its
        calls for the peer are passed on: while it is read, it must come to its end."""
        with self._lock:
            expected = self._expected.get(transfer)
            if expected is None:
                return False
            expected.is_closed = True
            return expected.is_asked

    def forget(self, transfer: TransferKey) -> None:
        """The load has ended, or no worker has it."""
        with self._lock:
            self._expected.pop(transfer, None)

    def hear(self, notice: Notice) -> Coroutine[Any, Any, None] | None:
        """Take a notice; return what is to be said to the peer now. On the control thread."""
        with self._lock:
            expected = self._expected.get(notice.transfer)
            if expected is None or notice.kind is NoticeKind.REPORT:
                return None
            if notice.kind is NoticeKind.NEEDS_PEER:
                return expected.driver.announce()
            expected.ranks.add(notice.rank)
            is_done = expected.is_asked or expected.is_closed
            if is_done or expected.ranks != set(range(self.num_ranks)):
                return None
            expected.is_asked = True
            return expected.driver.accept(notice.transfer)
