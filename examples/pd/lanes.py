"""Bars in rows over time: what the pictures of the examples are made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import matplotlib

matplotlib.use("Agg")

__all__ = ["GRID", "INK", "MIN_WIDTH", "Bar", "draw_rows", "in_ms"]

INK, GRID = "#1f2430", "#e6e8ec"
MIN_WIDTH = 0.0008
"""The least share of the axis that a bar takes; else short ones would be lost."""


@attrs.frozen(kw_only=True)
class Bar:
    """Something that lasted from ``start`` to ``end`` in a row.

    Args:
        row: in which row it is drawn.
        start, end: in the axis's unit.
        colour: of the bar.
        label: written into it where there is room.
        min_width: the least share of the axis that it takes.
    """

    row: str
    start: float
    end: float
    colour: str
    label: str = ""
    min_width: float = MIN_WIDTH


def in_ms(bar: Bar, origin: float) -> Bar:
    """The same bar in milliseconds since ``origin`` seconds."""
    return attrs.evolve(bar, start=1e3 * (bar.start - origin), end=1e3 * (bar.end - origin))


def draw_rows(
    axis: Any,
    rows: Sequence[str],
    bars: Iterable[Bar],
    limits: tuple[float, float],
    title: str,
    *,
    with_labels: bool = False,
) -> None:
    """Draw the bars of ``rows``, the first row at the top, between two times.

    Args:
        axis: a matplotlib axis.
        rows: their names, in order.
        bars: those of other rows, or outside the limits, are left out.
        limits: first and last time that is shown.
        title: above the axis.
        with_labels: whether to write the bars' labels.
    """
    position = {row: index for index, row in enumerate(rows)}
    for bar in bars:
        if bar.row not in position or bar.end < limits[0] or bar.start > limits[1]:
            continue
        width = max(bar.end - bar.start, bar.min_width * (limits[1] - limits[0]))
        where = (position[bar.row] - 0.36, 0.72)
        axis.broken_barh([(bar.start, width)], where, color=bar.colour, linewidth=0)
        if with_labels:
            _label(axis, bar, position[bar.row], limits)
    axis.set_yticks(range(len(rows)), rows)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.set_xlim(*limits)
    axis.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axis.tick_params(length=0, labelcolor=INK)
    axis.grid(axis="x", color=GRID)
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _label(axis: Any, bar: Bar, y: float, limits: tuple[float, float]) -> None:
    """Write a bar's name into it, if there is room."""
    start, end = max(bar.start, limits[0]), min(bar.end, limits[1])
    if (end - start) / (limits[1] - limits[0]) > 0.011 * len(bar.label):
        axis.text(
            (start + end) / 2, y, bar.label, ha="center", va="center", fontsize=8, color="white"
        )
