"""Tests of `pdcore.trace`."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from pdcore.clock import VirtualClock
from pdcore.request import RequestStatus
from pdcore.trace import RequestState, Span, Trace, Tracer, chrome_trace, write_chrome_trace


@pytest.fixture
def clock() -> VirtualClock:
    """A clock at 100 seconds that the test moves."""
    return VirtualClock(start=100.0)


@pytest.fixture
def tracer(clock: VirtualClock) -> Tracer:
    """An empty tracer with two lanes."""
    return Tracer("decode", lanes=("engine", "worker"), clock=clock)


def test_span_times_its_body(tracer: Tracer, clock: VirtualClock) -> None:
    """A span lasts as long as the body of its with block."""
    with tracer.span("engine", "schedule", step_id=7):
        clock.advance(0.25)
    assert tracer.snapshot().spans == (Span("engine", "schedule", 100.0, 100.25, {"step_id": 7}),)


def test_span_ends_when_its_body_raises(tracer: Tracer, clock: VirtualClock) -> None:
    """A body that raises is recorded too, and its exception goes on."""

    def body() -> None:
        with tracer.span("engine", "schedule"):
            clock.advance(1.0)
            raise KeyError

    with pytest.raises(KeyError):
        body()
    assert tracer.snapshot().spans[0].duration_s == 1.0


def test_states_become_intervals(tracer: Tracer, clock: VirtualClock) -> None:
    """A state lasts until the next one; the open one ends at the snapshot."""
    tracer.state("r", RequestStatus.WAITING)
    clock.advance(1.0)
    tracer.state("r", RequestStatus.RUNNING)
    clock.advance(2.0)
    assert tracer.snapshot().states == (
        RequestState("r", "WAITING", 100.0, 101.0),
        RequestState("r", "RUNNING", 101.0, 103.0),
    )


def test_repeated_state_is_one_interval(tracer: Tracer, clock: VirtualClock) -> None:
    """Telling a state again in every step does not cut it up."""
    for _ in range(3):
        tracer.state("r", "RUNNING")
        clock.advance(1.0)
    assert tracer.snapshot().states == (RequestState("r", "RUNNING", 100.0, 103.0),)


def test_none_ends_a_request(tracer: Tracer, clock: VirtualClock) -> None:
    """After None the request has no state, and its id may come back."""
    tracer.state("r", "RUNNING")
    clock.advance(1.0)
    tracer.state("r", None)
    clock.advance(5.0)
    tracer.state("r", "WAITING")
    clock.advance(1.0)
    assert tracer.snapshot().request_states("r") == (
        RequestState("r", "RUNNING", 100.0, 101.0),
        RequestState("r", "WAITING", 106.0, 107.0),
    )


def test_disabled_tracer_records_nothing(clock: VirtualClock) -> None:
    """Every call on a disabled tracer works and leaves no trace."""
    tracer = Tracer("decode", clock=clock, enabled=False)
    with tracer.span("engine", "schedule"):
        tracer.instant("engine", "arrival")
    tracer.state("r", "RUNNING")
    tracer.add_span("engine", "forward", 0.0, 1.0)
    empty = Trace(process="decode", lanes=(), spans=(), instants=(), states=())
    assert tracer.snapshot() == empty
    assert tracer.span("engine", "a") is tracer.span("engine", "b")  # nothing is even made
    assert empty.start is None


def test_lanes_keep_the_given_order(tracer: Tracer) -> None:
    """Named lanes come first, used or not; others follow as they appear."""
    tracer.instant("kv transfer", "accepted")
    tracer.instant("worker", "sampled")
    assert tracer.snapshot().lanes == ("engine", "worker", "kv transfer")


def test_threads_lose_no_span(tracer: Tracer) -> None:
    """Spans from many threads at once are all there."""
    threads = [
        threading.Thread(
            target=lambda: [tracer.add_span("worker", "x", 0.0, 1.0) for _ in range(2000)]
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tracer.snapshot().spans) == 8000


def test_trace_pickles(tracer: Tracer) -> None:
    """A trace can be sent to another process."""
    with tracer.span("engine", "schedule", n=1):
        tracer.state("r", "WAITING")
    trace = tracer.snapshot()
    assert pickle.loads(pickle.dumps(trace)) == trace


def _two_processes(clock: VirtualClock) -> list[Trace]:
    prefill, decode = Tracer("prefill", clock=clock), Tracer("decode", clock=clock)
    prefill.state("r", "RUNNING")
    with prefill.span("engine", "schedule"):
        clock.advance(0.5)
    prefill.state("r", None)
    decode.state("r", "WAITING_FOR_REMOTE_KVS")
    with decode.span("kv transfer", "r", num_bytes=4096):
        clock.advance(0.25)
    decode.instant("engine", "landed")
    return [prefill.snapshot(), decode.snapshot()]


def _events(trace: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def test_chrome_trace_puts_two_processes_on_one_time_line(clock: VirtualClock) -> None:
    """The earliest time is zero, times are microseconds, and each trace is a process."""
    merged = chrome_trace(_two_processes(clock))
    spans = [(e["pid"], e["name"], e["ts"], e["dur"], e["args"]) for e in _events(merged, "X")]
    assert spans == [(1, "schedule", 0.0, 5e5, {}), (2, "r", 5e5, 2.5e5, {"num_bytes": 4096})]
    assert [(e["pid"], e["ts"]) for e in _events(merged, "i")] == [(2, 7.5e5)]
    names = {e["pid"]: e["args"]["name"] for e in _events(merged, "M") if "process_n" in e["name"]}
    assert names == {1: "prefill", 2: "decode"}


def test_chrome_trace_nests_states_in_their_request(clock: VirtualClock) -> None:
    """Asynchronous events come in balanced pairs, the request's own around its states."""
    merged = chrome_trace(_two_processes(clock))
    decode = [e for e in merged["traceEvents"] if e["pid"] == 2 and e.get("cat") == "request"]
    assert [(e["ph"], e["name"]) for e in decode] == [
        ("b", "r"),
        ("b", "WAITING_FOR_REMOTE_KVS"),
        ("e", "WAITING_FOR_REMOTE_KVS"),
        ("e", "r"),
    ]


def test_write_chrome_trace_writes_json(clock: VirtualClock, tmp_path: Path) -> None:
    """The file holds exactly what `chrome_trace` returns."""
    traces = _two_processes(clock)
    write_chrome_trace(tmp_path / "trace.json", traces)
    assert json.loads((tmp_path / "trace.json").read_text()) == chrome_trace(traces)


def test_processes_of_one_machine_share_the_clock() -> None:
    """A child's monotonic times fall between the parent's before and after."""
    tracer = Tracer("parent")
    before = tracer.clock.now()
    code = "from pdcore.clock import MonotonicClock; print(MonotonicClock().now())"
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert before < float(child.stdout) < tracer.clock.now()
