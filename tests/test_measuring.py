"""The tables that benchmarks print."""

from __future__ import annotations

import math
import os
import signal
import sys

import pytest

from measuring import Better, Contender, Report, ending


def a_report(ours: list[float], theirs: list[float]) -> Report:
    """A figure of both contenders, one for each repeat."""
    report = Report("title", {})
    for mine, peers in zip(ours, theirs, strict=True):
        report.add("case", "pdcore", {"figure": mine})
        report.add("case", "vLLM", {"figure": peers})
    return report


@pytest.mark.parametrize(
    ("better", "head", "ratio"),
    [
        (Better.LESS, "vLLM / pdcore", "0.40x (0.25-0.50)"),
        (Better.MORE, "pdcore / vLLM", "2.50x (2.00-4.00)"),
    ],
)
def test_a_ratio_above_one_is_in_pdcores_favour(
    better: Better, head: str, ratio: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a cost it is the peer's over pdcore's, of a rate the other way; the table says which."""
    a_report([100, 200, 400], [40, 100, 100]).print_table("figure", "units", better=better)
    title, heads, line = capsys.readouterr().out.strip().splitlines()
    assert title == f"figure, units; {better.value}"
    assert heads.split(maxsplit=2) == ["pdcore", "vLLM", head]
    assert line.split(maxsplit=3) == ["case", "200", "100", ratio]


@pytest.mark.parametrize(("better", "ours", "theirs"), [(Better.LESS, 0, 3), (Better.MORE, 3, 0)])
def test_beside_nothing_a_figure_is_any_number_of_times_better(
    better: Better, ours: float, theirs: float
) -> None:
    """An idle engine that takes no time at all is not an error."""
    ratio = a_report([ours], [theirs]).ratio("case", "vLLM", "figure", better=better)
    assert ratio is not None
    assert ratio.median == math.inf


def test_a_benchmark_that_is_terminated_leaves_no_contender_behind() -> None:
    """Not even one that stands still, as those do that have no turn."""
    script = "import time; print('{\"tasks\": []}', flush=True); time.sleep(600)"
    contender = Contender("sleeper", [sys.executable, "-c", script])
    process = contender._process
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(SystemExit), ending([contender]):
        signal.raise_signal(signal.SIGTERM)
    assert process.poll() == -signal.SIGKILL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
