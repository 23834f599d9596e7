"""What is to be done later."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from itertools import count

__all__ = ["Timers"]


class Timers:
    """Calls functions when their time has come, whenever `run_due` is called."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call a function once, after so many seconds; at once when there are none."""
        if seconds <= 0:
            call()
        else:
            heapq.heappush(self._heap, (time.monotonic() + seconds, next(self._numbers), call))

    def run_due(self) -> None:
        """Call what is due, in order."""
        while self._heap and self._heap[0][0] <= time.monotonic():
            heapq.heappop(self._heap)[2]()

    def seconds_left(self, limit_s: float) -> float:
        """Until the next call, at most ``limit_s``."""
        if not self._heap:
            return limit_s
        return min(max(self._heap[0][0] - time.monotonic(), 0.0), limit_s)

    def __len__(self) -> int:
        return len(self._heap)
