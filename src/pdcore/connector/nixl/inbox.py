"""What one thread learns for another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Inbox"]

FactT = TypeVar("FactT")


class Inbox(Generic[FactT]):
    """Facts on their way from the control thread to the scheduler's, in order.

    Args:
        notify: wakes the engine's loop, which will take them.
    """

    def __init__(self, notify: Callable[[], None]) -> None:
        self._notify = notify
        self._lock = threading.Lock()
        self._facts: list[FactT] = []

    def put(self, fact: FactT) -> None:
        """Tell something. From any thread."""
        with self._lock:
            self._facts.append(fact)
        self._notify()

    def take(self) -> list[FactT]:
        """All that was told since the last call."""
        if not self._facts:
            return []
        with self._lock:
            facts, self._facts = self._facts, []
        return facts

    def __bool__(self) -> bool:
        return bool(self._facts)
