"""Deadlines: what falls due next, at no cost for what does not."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from itertools import count

__all__ = ["Alarms"]


class Alarms:
    """Named times, earliest first. Setting, cancelling and looking cost O(log n)."""

    def __init__(self) -> None:
        self._times: dict[Hashable, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, Hashable]] = []
        self._count = count()

    def set(self, name: Hashable, time: float) -> None:
        """Set or move an alarm."""
        entry = (time, next(self._count))
        self._times[name] = entry
        heapq.heappush(self._heap, (*entry, name))

    def cancel(self, name: Hashable) -> None:
        """Take an alarm back; nothing happens when there is none."""
        self._times.pop(name, None)
        if len(self._heap) > 64 and len(self._heap) > 4 * len(self._times):
            self._heap = [(*entry, name) for name, entry in self._times.items()]
            heapq.heapify(self._heap)

    def next(self) -> float | None:
        """The earliest time, or None."""
        heap = self._heap
        while heap and self._times.get(heap[0][2]) != heap[0][:2]:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def take_due(self, now: float) -> list[Hashable]:
        """Remove and return the names of all alarms at or before ``now``, in order."""
        due: list[Hashable] = []
        while (time := self.next()) is not None and time <= now:
            name = heapq.heappop(self._heap)[2]
            del self._times[name]
            due.append(name)
        return due
