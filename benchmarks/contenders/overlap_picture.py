"""Draws what `bench_overlap.py` measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")

from matplotlib import pyplot

__all__ = ["draw"]

_COMPUTE, _COPY, _POOL, _WINDOW, _INK = "#4a9d5f", "#e08a1e", "#b5485d", "#f3cf9b", "#1f2430"
_BIN_S = 0.05
_SHOWN_S = 0.45


def draw(path: Path, decodes: Sequence[Any], served: Sequence[Any]) -> None:
    """Write a PNG: decode's speed with loads coming and going, then each case's lanes.

    Args:
        path: the file to write.
        decodes, served: the benchmark's `Decode` and `Served`.
    """
    num_panels = len(decodes) + len(served)
    with pyplot.rc_context({"font.size": 10, "axes.edgecolor": "#c9ced6", "text.color": _INK}):
        figure, axes = pyplot.subplots(
            num_panels, 1, figsize=(13, 2.3 * num_panels), layout="constrained"
        )
        for axis, each in zip(axes, decodes, strict=False):
            _draw_decode(axis, each)
        for axis, each in zip(axes[len(decodes) :], served, strict=True):
            _draw_lanes(axis, each)
        axes[-1].set_xlabel("seconds")
        figure.suptitle("Loads of 64 MB beside decode", x=0.01, ha="left", fontweight="bold")
        figure.savefig(path, dpi=110)
        pyplot.close(figure)


def _draw_decode(axis: Any, decode: Any) -> None:
    """Tokens per second over time; loads come in where it is shaded."""
    zero, end = decode.windows[0][0] - 0.5, decode.windows[-1][1]
    num_bins = int((end - zero) / _BIN_S)
    counts = [0.0] * num_bins
    for tick in decode.ticks:
        place = int((tick.ended - zero) / _BIN_S)
        if 0 <= place < num_bins:
            counts[place] += tick.num_tokens
    times = [(place + 0.5) * _BIN_S for place in range(num_bins)]
    axis.step(times, [count / _BIN_S for count in counts], where="mid", color=_COMPUTE)
    for start, stop in decode.windows:
        axis.axvspan(start - zero, stop - zero, color=_WINDOW, alpha=0.45, linewidth=0)
    for start, stop in decode.reads:
        if start >= zero:
            axis.axvspan(start - zero, stop - zero, 0, 0.06, color=_COPY, linewidth=0)
    axis.set_ylim(0, 1.3 * max(count / _BIN_S for count in counts))
    axis.set_xlim(0, end - zero)
    axis.set_ylabel("tokens/s")
    axis.set_title(
        f"The model runs on {decode.label}: decode loses {100 * decode.loss:.1f} % while loads "
        f"come in (shaded); copies take {100 * decode.copy_share:.1f} % of that time (orange)",
        loc="left",
        fontsize=10,
    )
    axis.axhline(statistics.median(decode.quiet), color=_INK, linewidth=0.6, linestyle=":")


def _draw_lanes(axis: Any, served: Any) -> None:
    """When the model ran, when copies ran, and when the pool had no room."""
    lanes = (
        ("pool is full", served.short, _POOL),
        ("copy", served.reads, _COPY),
        ("model", served.busy, _COMPUTE),
    )
    for row, (_, spans, colour) in enumerate(lanes):
        bars = [(start - served.began, end - start) for start, end in spans]
        axis.broken_barh(bars, (row - 0.38, 0.76), facecolors=colour, linewidth=0)
    axis.set_yticks(range(len(lanes)), [name for name, _, _ in lanes])
    axis.set_xlim(0, min(_SHOWN_S, served.seconds))
    shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in served.shares.items())
    axis.set_title(
        f"{served.case.label}: {served.num_tokens / served.seconds:.0f} tokens/s; {shares}; "
        f"{served.binds} binds; {100 * served.overlap:.0f} % of the copying beside the model",
        loc="left",
        fontsize=10,
    )
