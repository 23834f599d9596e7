"""The queue: requests without a row that could be admitted."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from pdcore.request import Request
from pdcore.scheduler.state import RequestState

__all__ = ["QueueNumbers", "WaitingTable", "WaitingView"]

# The policy's key, the place among equals, a number that is never repeated, the request.
_Entry = tuple[Any, int, int, RequestState]
# Named, since `int | float` is made anew wherever it is written.
_NUMBERS = (int, float)


class _GuardedKey:
    """A policy's key of any type, whose comparisons never raise.

    Keys that do not compare count as equal, so that the place in the queue decides between them.
    """

    __slots__ = ("key",)

    def __init__(self, key: Any) -> None:
        self.key = key

    def __lt__(self, other: Any) -> bool:
        try:
            return bool(self.key < getattr(other, "key", other))
        except Exception:
            return False

    def __gt__(self, other: Any) -> bool:
        try:
            return bool(self.key > getattr(other, "key", other))
        except Exception:
            return False

    def __eq__(self, other: object) -> bool:
        return not (self < other or self > other)

    __hash__ = None  # type: ignore[assignment]


def _width(key: Any) -> int | None:
    """0 for a number, n for a tuple of n numbers, None for keys of any other kind."""
    if isinstance(key, _NUMBERS):
        return 0
    if isinstance(key, tuple) and all(isinstance(part, _NUMBERS) for part in key):
        return len(key)
    return None


@attrs.define(eq=False)
class QueueNumbers:
    """Gives out places among equals: ever higher ones behind, ever lower ones ahead."""

    last: int = 0
    first: int = 0

    def behind(self) -> int:
        """A number above all others."""
        self.last += 1
        return self.last

    def ahead(self) -> int:
        """A number below all others."""
        self.first -= 1
        return self.first


@attrs.frozen(kw_only=True, eq=False)
class WaitingView:
    """The queue as columns, for policies that order it anew in every step.

    Args:
        states: one for each entry, in order of joining.
        arrival_time: float64, seconds on the scheduler's clock.
        deadline: float64, infinity where there is none.
        priority: int64.
        num_tokens: int32, prompt and output so far.
    """

    states: tuple[RequestState, ...]
    arrival_time: npt.NDArray[np.float64]
    deadline: npt.NDArray[np.float64]
    priority: npt.NDArray[np.int64]
    num_tokens: npt.NDArray[np.int32]

    @property
    def requests(self) -> tuple[Request, ...]:
        """One for each entry."""
        return tuple(state.request for state in self.states)

    @property
    def tenants(self) -> list[str | None]:
        """Whose request each is."""
        return [state.request.tenant for state in self.states]


class WaitingTable:
    """A priority queue with a column for whatever a policy may order by.

    Requests leave in order of ``(key, number)``: the key is the policy's, the number goes up with
    each arrival, and goes down for requests that return to the head of their equals. Joining and
    leaving cost O(log n), wherever the request is; the columns are built only when asked for.

    Args:
        numbers: shared by tables between which requests move, so that their places compare.
    """

    def __init__(self, numbers: QueueNumbers | None = None) -> None:
        self._numbers = numbers or QueueNumbers()
        self._heap: list[_Entry] = []
        self._live: dict[int, _Entry] = {}
        self._num_pushed = 0
        # The one kind of key whose comparisons cannot raise; all others are guarded.
        self._plain_width: int | None = None
        # What joined when nobody was here; all others compare with it.
        self._first_key: Any = None

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, state: RequestState) -> bool:
        return state.uid in self._live

    def join(self, state: RequestState, *, ahead: bool = False) -> None:
        """Add a request behind those with an equal key, or ahead of them."""
        number = self._numbers.ahead() if ahead else self._numbers.behind()
        state.queue_key = (state.queue_key[0], number)
        self.put_back(state)

    def put_back(self, state: RequestState) -> None:
        """Return a request to the place it had."""
        self._num_pushed += 1
        key, place = state.queue_key
        if not self._live:
            self._first_key = key
        width = _width(key)
        if self._plain_width is None:
            self._plain_width = width
        if width is None or width != self._plain_width:
            key = _GuardedKey(key)
        entry = (key, place, self._num_pushed, state)
        self._live[state.uid] = entry
        heapq.heappush(self._heap, entry)

    def can_compare(self, key: Any) -> bool:
        """Whether a key has an order with the first that joined since the queue was empty; raises
        what its ``<`` raises.

        Always with the same: two kinds of key that come in turn would leave the queue in no order.
        """
        return (key < (self._first_key if self._live else key)) in (True, False)

    def peek(self) -> RequestState | None:
        """The first in order, or None."""
        heap, live = self._heap, self._live
        while heap:
            entry = heap[0]
            state = entry[-1]
            if live.get(state.uid) is entry:
                return state
            heapq.heappop(heap)
        return None

    def front(self, n: int) -> list[RequestState]:
        """At most ``n`` requests, about the first in order. Cost: O(n)."""
        return [entry[-1] for entry in self._heap[:n] if self._is_current(entry)]

    def remove(self, state: RequestState) -> None:
        """Take a request out, wherever it is."""
        del self._live[state.uid]
        if self._heap and self._heap[0][-1] is state:
            heapq.heappop(self._heap)
        elif len(self._heap) > 64 and len(self._heap) > 2 * len(self._live):
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)

    def __iter__(self) -> Iterator[RequestState]:
        """All requests in order. Cost: O(n log n)."""
        return iter([entry[-1] for entry in sorted(self._live.values())])

    def view(self) -> WaitingView:
        """The queue as columns, in order of joining. Cost: O(n)."""
        # By the place among equals, whatever was passed over and put back since.
        entries = sorted(self._live.values(), key=lambda entry: entry[1])
        states = tuple(entry[-1] for entry in entries)
        infinity = float("inf")
        return WaitingView(
            states=states,
            arrival_time=np.array([state.arrival_time for state in states], np.float64),
            deadline=np.array(
                [
                    infinity if state.request.deadline is None else state.request.deadline
                    for state in states
                ],
                np.float64,
            ),
            priority=np.array([state.request.priority for state in states], np.int64),
            num_tokens=np.array([len(state.sequence) for state in states], np.int32),
        )

    def _is_current(self, entry: _Entry) -> bool:
        return self._live.get(entry[-1].uid) is entry
