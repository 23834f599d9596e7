"""Time, passed in.

Nothing in the control plane asks the operating system what time it is. It asks its `Clock`, so the
same scheduler, pool and connectors run in production and in a simulation.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

__all__ = ["Clock", "MonotonicClock", "VirtualClock"]


class Clock(ABC):
    """A source of seconds that never goes back. The zero point means nothing."""

    @abstractmethod
    def now(self) -> float:
        """Return the current time in seconds. Must never return less than it did before."""


class MonotonicClock(Clock):
    """The operating system's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


class VirtualClock(Clock):
    """A clock that moves only when it is told to, for tests and simulations.

    Args:
        start: the first value that `now` returns, in seconds.
    """

    def __init__(self, *, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> float:
        """Move the clock on and return the new time. Raises `ValueError` for a negative step."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back: advance({seconds}); pass seconds >= 0")
        self._now += seconds
        return self._now

    def __repr__(self) -> str:
        return f"<VirtualClock {self._now:g} s>"
