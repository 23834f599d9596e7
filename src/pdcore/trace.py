"""A record of what ran when: spans in lanes, instants, and the states of requests.

Nothing in the library writes to a `Tracer`; an application wraps the calls that it wants to see::

    tracer = Tracer("decode")
    with tracer.span("engine", "schedule"):
        output = scheduler.schedule()
    tracer.state("r1", scheduler.status("r1"))
    write_chrome_trace("trace.json", [tracer.snapshot()])

The file opens in Perfetto and in ``chrome://tracing``: a process for each trace, a thread for each
lane, and a track for each request with its states. Traces of several processes may be merged when
their clocks agree. `MonotonicClock` does among the processes of one Linux machine, where the
monotonic clock counts from boot for all of them; across machines it does not.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import attrs

from pdcore.clock import Clock, MonotonicClock

__all__ = [
    "Instant",
    "RequestState",
    "Span",
    "Trace",
    "Tracer",
    "chrome_trace",
    "write_chrome_trace",
]


class Span(NamedTuple):
    """Something that took from ``start`` to ``end`` seconds in a lane."""

    lane: str
    name: str
    start: float
    end: float
    args: Mapping[str, Any] = {}

    @property
    def duration_s(self) -> float:
        return self.end - self.start


class Instant(NamedTuple):
    """Something that happened at ``time`` seconds in a lane."""

    lane: str
    name: str
    time: float
    args: Mapping[str, Any] = {}


class RequestState(NamedTuple):
    """A request was in ``state`` from ``start`` to ``end`` seconds."""

    request_id: str
    state: str
    start: float
    end: float

    @property
    def duration_s(self) -> float:
        return self.end - self.start


@attrs.frozen(kw_only=True)
class Trace:
    """What a tracer has recorded. Plain data that pickles, so that processes can send it.

    Args:
        process: whose record it is.
        lanes: the lanes in the order in which they are drawn.
        spans, instants: in the order in which they ended.
        states: by request in order of first appearance, then by time. A state that still lasted
            ends at the time of the snapshot.
    """

    process: str
    lanes: tuple[str, ...]
    spans: tuple[Span, ...]
    instants: tuple[Instant, ...]
    states: tuple[RequestState, ...]

    @property
    def start(self) -> float | None:
        """The earliest time in the record, in seconds; None when it is empty."""
        times = [span.start for span in self.spans]
        times += [instant.time for instant in self.instants]
        times += [state.start for state in self.states]
        return min(times, default=None)

    def request_states(self, request_id: str) -> tuple[RequestState, ...]:
        """The states of one request, by time."""
        return tuple(state for state in self.states if state.request_id == request_id)


class _OpenSpan:
    """Times the body of a ``with`` block, also when it raises."""

    __slots__ = ("_args", "_lane", "_name", "_start", "_tracer")

    def __init__(self, tracer: Tracer, lane: str, name: str, args: Mapping[str, Any]) -> None:
        self._tracer = tracer
        self._lane = lane
        self._name = name
        self._args = args

    def __enter__(self) -> None:
        self._start = self._tracer.clock.now()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        end = self._tracer.clock.now()
        self._tracer.add_span(self._lane, self._name, self._start, end, **self._args)


class Tracer:
    """Records in memory. Any thread may record at any time.

    One record is one append of a tuple, a span two readings of the clock more: a few microseconds.
    Threads need no lock, since a list's append is atomic. The states of one request must come from
    one thread.

    Args:
        process: whose record it is, for instance ``"prefill"``.
        lanes: the lanes in the order to draw them; others follow in order of appearance.
        clock: gives the times; `MonotonicClock` unless given.
        enabled: False makes every call return at once and record nothing.
    """

    def __init__(
        self,
        process: str,
        *,
        lanes: Iterable[str] = (),
        clock: Clock | None = None,
        enabled: bool = True,
    ) -> None:
        self.process = process
        self.clock = clock or MonotonicClock()
        self.enabled = enabled
        self._lanes = tuple(lanes)
        self._spans: list[Span] = []
        self._instants: list[Instant] = []
        self._changes: list[tuple[str, str | None, float]] = []
        self._state_now: dict[str, str | None] = {}

    def span(self, lane: str, name: str, **args: Any) -> AbstractContextManager[None]:
        """Record how long the body of a ``with`` block takes.

        Args:
            lane: the lane to show it in.
            name: what it is.
            args: further facts, shown when the span is selected; anything that JSON can hold.
        """
        return _OpenSpan(self, lane, name, args) if self.enabled else _NO_SPAN

    def add_span(self, lane: str, name: str, start: float, end: float, **args: Any) -> None:
        """Record a span whose ends, in seconds on the tracer's clock, are known."""
        if self.enabled:
            self._spans.append(Span(lane, name, start, end, args))

    def instant(self, lane: str, name: str, **args: Any) -> None:
        """Record that something happened now."""
        if self.enabled:
            self._instants.append(Instant(lane, name, self.clock.now(), args))

    def state(self, request_id: str, state: enum.Enum | str | None) -> None:
        """Record that a request is in ``state`` from now on; None ends its record.

        A state that the request is in already is not recorded again, so this can be called for
        every request in every step.
        """
        if not self.enabled:
            return
        name = state.name if isinstance(state, enum.Enum) else state
        if self._state_now.get(request_id) != name:
            self._state_now[request_id] = name
            self._changes.append((request_id, name, self.clock.now()))

    def snapshot(self) -> Trace:
        """Return everything recorded so far. Recording may go on meanwhile, and afterwards."""
        spans, instants = tuple(self._spans), tuple(self._instants)
        seen = dict.fromkeys([*self._lanes, *(e.lane for e in spans), *(e.lane for e in instants)])
        return Trace(
            process=self.process,
            lanes=tuple(seen),
            spans=spans,
            instants=instants,
            states=tuple(_intervals(tuple(self._changes), self.clock.now())),
        )


_NO_SPAN: AbstractContextManager[None] = nullcontext()


def _intervals(
    changes: Iterable[tuple[str, str | None, float]], now: float
) -> Iterator[RequestState]:
    by_request: dict[str, list[tuple[str | None, float]]] = {}
    for request_id, state, time in changes:
        by_request.setdefault(request_id, []).append((state, time))
    for request_id, steps in by_request.items():
        ends = [time for _, time in steps[1:]] + [now]
        for (state, start), end in zip(steps, ends, strict=True):
            if state is not None:
                yield RequestState(request_id, state, start, end)


def chrome_trace(traces: Iterable[Trace]) -> dict[str, Any]:
    """Merge traces into one object of the Trace Event Format, ready for `json.dump`.

    The earliest time of all becomes zero. Each request has one asynchronous track in each process:
    an outer slice with its id, and its states within.
    """
    traces = list(traces)
    zero = min((t.start for t in traces if t.start is not None), default=0.0)
    events: list[dict[str, Any]] = []
    for pid, trace in enumerate(traces, start=1):
        events += _names(trace, pid)
        threads = {lane: tid for tid, lane in enumerate(trace.lanes, start=1)}
        for span in trace.spans:
            where = {"pid": pid, "tid": threads[span.lane], "name": span.name, "ph": "X"}
            times = {"ts": _us(span.start - zero), "dur": _us(span.duration_s)}
            events.append(where | times | {"args": dict(span.args)})
        for mark in trace.instants:
            where = {"pid": pid, "tid": threads[mark.lane], "name": mark.name, "ph": "i", "s": "t"}
            events.append(where | {"ts": _us(mark.time - zero), "args": dict(mark.args)})
        events += _request_tracks(trace, pid, zero)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def write_chrome_trace(path: str | Path, traces: Iterable[Trace]) -> None:
    """Write what `chrome_trace` returns as a JSON file."""
    Path(path).write_text(json.dumps(chrome_trace(traces)) + "\n", encoding="utf-8")


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _names(trace: Trace, pid: int) -> Iterator[dict[str, Any]]:
    """Metadata events: what the process and its lanes are called, and their order."""
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": trace.process}}
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
    for tid, lane in enumerate(trace.lanes, start=1):
        where = {"ph": "M", "pid": pid, "tid": tid}
        yield where | {"name": "thread_name", "args": {"name": lane}}
        yield where | {"name": "thread_sort_index", "args": {"sort_index": tid}}


def _request_tracks(trace: Trace, pid: int, zero: float) -> Iterator[dict[str, Any]]:
    """Nested asynchronous events; ``id2.local`` keeps one id in two processes apart."""
    for request_id in dict.fromkeys(state.request_id for state in trace.states):
        states = trace.request_states(request_id)
        track = {"cat": "request", "pid": pid, "tid": 0, "id2": {"local": request_id}}
        yield track | {"ph": "b", "name": request_id, "ts": _us(states[0].start - zero)}
        for state in states:
            yield track | {"ph": "b", "name": state.state, "ts": _us(state.start - zero)}
            yield track | {"ph": "e", "name": state.state, "ts": _us(state.end - zero)}
        yield track | {"ph": "e", "name": request_id, "ts": _us(states[-1].end - zero)}
