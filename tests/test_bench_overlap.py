"""The arithmetic of the overlap benchmark."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("matplotlib")

from bench_overlap import CASES, Decode, Served


def served(**spans: Any) -> Served:
    """Ten seconds of a case."""
    nothing: dict[str, Any] = {"busy": [], "reads": [], "short": []}
    return Served(
        case=CASES[0],
        began=0.0,
        seconds=10.0,
        num_tokens=1,
        num_bytes=1,
        ticks=[],
        **(nothing | spans),
    )


@pytest.mark.parametrize(
    ("spans", "name"),
    [
        ({"busy": [(0, 4), (5, 9)], "reads": [(0, 3)]}, "compute"),
        ({"busy": [(0, 1)], "reads": [(0, 9)], "short": [(1, 2)]}, "bandwidth"),
        ({"busy": [(0, 3)], "reads": [(3, 5)], "short": [(1, 9)]}, "pool"),
        ({"busy": [(0, 3)], "reads": [(3, 5)]}, "nothing for long"),
    ],
)
def test_what_binds_is_what_took_most_of_the_time(spans: dict[str, Any], name: str) -> None:
    """The largest of the three shares binds, if it is more than half."""
    assert served(**spans).binds == name


def test_shares_and_overlap() -> None:
    """Shares are of the whole time; the overlap is of the copying."""
    run = served(busy=[(0, 4), (5, 9)], reads=[(3, 6), (8, 10)], short=[(0, 1)])
    assert run.shares == {"compute": 0.8, "bandwidth": 0.5, "pool": 0.1}
    assert run.overlap == pytest.approx(3 / 5)


def test_loss_is_paired_by_window() -> None:
    """What decode lost is the middle of the windows, each against the quiet one before it."""
    decode = Decode(
        label="",
        quiet=[100.0, 200.0, 50.0],
        loaded=[90.0, 100.0, 50.0],
        copy_share=0.0,
        windows=[],
        ticks=[],
        reads=[],
    )
    assert decode.loss == pytest.approx(0.1)
