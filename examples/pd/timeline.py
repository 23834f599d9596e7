"""Draws the traces of the prefill and the decode process as one picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from pd.lanes import GRID, INK, MIN_WIDTH, Bar, draw_rows, in_ms
from pdcore.trace import RequestState, Span, Trace

__all__ = ["draw_timeline"]

# Each colour means one thing, in all parts of the picture.
_PREFILL, _DECODE, _HOST = "#3b6fb6", "#4a9d5f", "#7a63a8"
_READ, _PARKED, _HELD = "#8f3d0e", "#f0a23b", "#8fd0d0"
_WAITING, _PREEMPTED = "#c9ced6", "#d0417e"

_LEGEND = {
    "prefill computes": _PREFILL,
    "decode computes": _DECODE,
    "schedule, update, sample": _HOST,
    "KV is read": _READ,
    "waits for its KV (WAITING_FOR_REMOTE_KVS)": _PARKED,
    "blocks held for the reader": _HELD,
    "in the queue (WAITING)": _WAITING,
    "PREEMPTED": _PREEMPTED,
}
_STATE_COLOURS = {
    "WAITING": _WAITING,
    "WAITING_FOR_REMOTE_KVS": _PARKED,
    "PREEMPTED": _PREEMPTED,
}
_HELD_PREFIX = "held "
_MIN_TRANSFER_WIDTH = 0.003  # of the axis; loads are short, and what the picture is about


def draw_timeline(path: Path, traces: Sequence[Trace], *, title: str) -> None:
    """Write a PNG: lanes of each process, states of each request, and one load from close by.

    Args:
        path: the file to write.
        traces: of the prefill and the decode process, in this order; either may have ended early.
        title: the line above.
    """
    zero = min((t.start for t in traces if t.start is not None), default=0.0)
    lanes = [bar for trace in traces for bar in _lane_bars(trace, zero)]
    requests = _request_bars(traces, zero)
    lane_rows = [_lane_row(trace, lane) for trace in traces for lane in trace.lanes]
    request_rows = list(dict.fromkeys(bar.row for bar in requests))
    window = _close_up(traces[-1], zero)
    heights = [len(lane_rows), len(request_rows)]
    if window:
        heights.append(len(traces[-1].lanes) + len(_waiting_bars(traces[-1], zero, window)))
    with plt.rc_context({"font.size": 10, "axes.edgecolor": GRID, "text.color": INK}):
        figure, axes = plt.subplots(
            len(heights),
            1,
            figsize=(16, 2.6 + 0.42 * sum(heights)),
            height_ratios=[h + 0.6 for h in heights],
            layout="constrained",
        )
        end = max((bar.end for bar in [*lanes, *requests]), default=1.0)
        draw_rows(axes[0], lane_rows, lanes, (0.0, end), "Engines")
        draw_rows(axes[1], request_rows, requests, (0.0, end), "Requests")
        _separate_processes(axes[0], [len(trace.lanes) for trace in traces])
        axes[1].set_xlabel("seconds since the first request")
        if window:
            _draw_close_up(axes, traces[-1], zero, window)
        _add_legend(figure, title, used={bar.colour for bar in [*lanes, *requests]})
        figure.savefig(path, dpi=120)
        plt.close(figure)


def _lane_row(trace: Trace, lane: str) -> str:
    return f"{trace.process} · {lane}"


def _lane_bars(trace: Trace, zero: float) -> Iterable[Bar]:
    for state in trace.states:
        if state.request_id.startswith(_HELD_PREFIX):
            row = _lane_row(trace, trace.lanes[-1])
            yield Bar(row=row, start=state.start - zero, end=state.end - zero, colour=_HELD)
    for span in trace.spans:
        colour = _span_colour(span)
        yield Bar(
            row=_lane_row(trace, span.lane),
            start=span.start - zero,
            end=span.end - zero,
            colour=colour,
            label=span.name,
            min_width=_min_width(colour),
        )


def _min_width(colour: str) -> float:
    return _MIN_TRANSFER_WIDTH if colour in (_READ, _PARKED) else MIN_WIDTH


def _span_colour(span: Span) -> str:
    if span.lane == "kv transfer":
        return _READ
    if "prefill" in span.name:
        return _PREFILL
    return _DECODE if "decode" in span.name else _HOST


def _request_bars(traces: Sequence[Trace], zero: float) -> list[Bar]:
    """One row a request: what it did on the prefill side, then what it did on the decode side."""
    bars = []
    for trace in traces:
        running = _PREFILL if trace.process == "prefill" else _DECODE
        for state in trace.states:
            if not state.request_id.startswith(_HELD_PREFIX):
                colour = _STATE_COLOURS.get(state.state, running)
                bars.append(
                    Bar(
                        row=state.request_id,
                        start=state.start - zero,
                        end=state.end - zero,
                        colour=colour,
                        min_width=_min_width(colour),
                    )
                )
    return bars


def _close_up(trace: Trace, zero: float) -> tuple[float, float] | None:
    """A stretch of time around the load during which the device was busiest with others."""
    loads = [state for state in trace.states if state.state == "WAITING_FOR_REMOTE_KVS"]
    best = max(loads, key=lambda load: _busy_s(trace, load), default=None)
    if best is None or not _busy_s(trace, best):
        return None
    margin = max(0.75 * best.duration_s, 0.02)
    return best.start - zero - margin, best.end - zero + margin


def _busy_s(trace: Trace, load: RequestState) -> float:
    return sum(
        max(0.0, min(span.end, load.end) - max(span.start, load.start))
        for span in trace.spans
        if span.lane == "device"
    )


def _separate_processes(axis: Any, counts: Sequence[int]) -> None:
    for index in range(1, len(counts)):
        axis.axhline(sum(counts[:index]) - 0.5, color=INK, linewidth=0.8)


def _draw_close_up(axes: Any, trace: Trace, zero: float, window: tuple[float, float]) -> None:
    bars = [in_ms(bar, window[0]) for bar in _lane_bars(trace, zero)]
    for axis in axes[:2]:
        for edge in window:
            axis.axvline(edge, color=INK, linewidth=0.8, linestyle="dashed")
    rows = [_lane_row(trace, lane) for lane in trace.lanes]
    waiting = [in_ms(bar, window[0]) for bar in _waiting_bars(trace, zero, window)]
    rows += list(dict.fromkeys(bar.row for bar in waiting))
    limits = (0.0, 1e3 * (window[1] - window[0]))
    title = "Between the dashed lines: others decode while a request waits for its KV"
    draw_rows(axes[2], rows, [*bars, *waiting], limits, title, with_labels=True)
    axes[2].set_xlabel("milliseconds")


def _waiting_bars(trace: Trace, zero: float, window: tuple[float, float]) -> list[Bar]:
    """Who waited for remote KV during a stretch of time."""
    return [
        attrs.evolve(bar, row=f"{bar.row} waits for KV")
        for bar in _request_bars([trace], zero)
        if bar.colour == _PARKED and bar.end > window[0] and bar.start < window[1]
    ]


def _add_legend(figure: Any, title: str, used: set[str]) -> None:
    figure.suptitle(title, x=0.01, ha="left", fontsize=14, fontweight="bold")
    patches = [Patch(color=c, label=label) for label, c in _LEGEND.items() if c in used]
    num_columns = -(-len(patches) // 2)  # two lines of them
    figure.legend(handles=patches, loc="outside lower left", ncols=num_columns, frameon=False)
