"""What the benchmarks share: contenders in processes of their own, interleaved repeats, one table.

Every figure is the median over the repeats. Ratios are formed within a repeat, in which the
contenders run one after the other, so that a busy machine slows both sides alike; the spread beside
a ratio is the lowest and the highest repeat. A ratio above 1 means that pdcore is better, whether
less of a figure is better or more.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

__all__ = [
    "Better",
    "Case",
    "Contender",
    "Ratio",
    "Report",
    "contenders",
    "cpu_name",
    "ending",
    "measure",
    "parser",
    "progress",
    "run",
]

CONTENDERS = Path(__file__).parent / "contenders"
Figures = dict[str, float]


class Contender:
    """A process that answers tasks; see `contenders/serving.py`."""

    def __init__(self, name: str, command: Sequence[str], **environment: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # A group of its own: it may have processes too, and is stopped and woken with them.
            start_new_session=True,
            env={**os.environ, **environment},
        )
        try:
            self.tasks: list[str] = self._read()["tasks"]
        except BaseException:
            self.kill()
            raise

    def ask(self, task: str, **settings: Any) -> dict[str, Any]:
        """Run a task and return its answer; raises `RuntimeError` with what went wrong there."""
        assert self._process.stdin is not None
        print(
            json.dumps({"task": task, "settings": settings}), file=self._process.stdin, flush=True
        )
        answer = self._read()
        if "error" in answer:
            raise RuntimeError(f"{self.name} failed at {task}({settings}): {answer['error']}")
        figures: dict[str, Any] = answer["figures"]
        return figures

    def close(self) -> None:
        """End the process, which has no task."""
        self._process.communicate(timeout=60)

    def kill(self) -> None:
        """End it and what it has started, whatever they are doing."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with exit status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark of the control plane has."""
    options = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    options.add_argument("--repeats", type=int, default=5, help="interleaved repeats of each case")
    options.add_argument("--json", type=Path, help="where to write all figures")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument(
        "--peer-python",
        default=os.environ.get("PEER_PYTHON"),
        help="an interpreter with vLLM 0.32 (default: $PEER_PYTHON); without it, only pdcore runs",
    )
    options.add_argument(
        "--nano-vllm",
        default=os.environ.get("NANO_VLLM"),
        help="a folder with nano-vllm's source, for the peer's interpreter (default: $NANO_VLLM)",
    )
    return options


def contenders(options: argparse.Namespace) -> list[Contender]:
    """pdcore, and the peers that were given."""
    found = [Contender("pdcore", [sys.executable, str(CONTENDERS / "pdcore_control.py")])]
    if options.peer_python:
        script = str(CONTENDERS / "vllm_control.py")
        found.append(Contender("vLLM", [options.peer_python, script]))
    if options.peer_python and options.nano_vllm:
        script = str(CONTENDERS / "nano_vllm_control.py")
        command = [options.peer_python, script]
        found.append(Contender("nano-vllm", command, NANO_VLLM=options.nano_vllm))
    return found


@attrs.frozen(kw_only=True)
class Case:
    """One line of a table.

    Args:
        label: what people read.
        task: what the contenders are asked.
        settings: with what.
        variants: further settings by contender's name, each a column of its own: for vLLM, its
            two schedulers. Without an entry a contender has one column.
    """

    label: str
    task: str
    settings: dict[str, Any]
    variants: dict[str, dict[str, dict[str, Any]]] = attrs.field(factory=dict)

    def columns(self, contender: Contender) -> Iterable[tuple[str, dict[str, Any]]]:
        """The name and the settings of each column that a contender fills."""
        if self.task not in contender.tasks:
            return
        for suffix, extra in self.variants.get(contender.name, {"": {}}).items():
            yield f"{contender.name}{suffix}", {**self.settings, **extra}


class Better(enum.Enum):
    """Which way a figure is better: less of a cost, more of a rate."""

    LESS = "less is better"
    MORE = "more is better"


@attrs.frozen
class Ratio:
    """How many times better one side is: the median of the repeats, the lowest and the highest."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f}x ({self.low:.2f}-{self.high:.2f})"


class Report:
    """All figures of a benchmark: by label, by column, one dictionary a repeat."""

    def __init__(self, title: str, settings: dict[str, Any]) -> None:
        self.title = title
        self.settings = settings
        self.figures: dict[str, dict[str, list[Figures]]] = {}

    def add(self, label: str, column: str, figures: Figures) -> None:
        """Note what one contender took in one repeat."""
        self.figures.setdefault(label, {}).setdefault(column, []).append(figures)

    def add_sum(self, name: str, *parts: str) -> None:
        """Give every repeat of every case one more figure: the sum of some that it has."""
        for runs in self.figures.values():
            for figures in (figures for column in runs.values() for figures in column):
                figures[name] = sum(figures[part] for part in parts)

    def median(self, label: str, column: str, figure: str) -> float | None:
        """The middle of the repeats; None when the contender did not run this case."""
        runs = self.figures[label].get(column)
        return statistics.median(run[figure] for run in runs) if runs else None

    def ratio(
        self, label: str, column: str, figure: str, *, better: Better = Better.LESS
    ) -> Ratio | None:
        """How many times better pdcore is than another contender."""
        ours, theirs = self.figures[label]["pdcore"], self.figures[label].get(column)
        if not theirs:
            return None
        over, under = (theirs, ours) if better is Better.LESS else (ours, theirs)
        pairs = [(a[figure], b[figure]) for a, b in zip(over, under, strict=True)]
        # Beside nothing, an idle engine's figure for instance, anything is any number of times.
        each = [a / b if b else math.inf for a, b in pairs]
        return Ratio(statistics.median(each), min(each), max(each))

    def print_head(self) -> None:
        """The machine and the settings."""
        print(self.title)
        settings = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        print(
            f"Python {platform.python_version()}, {cpu_name()}, {os.cpu_count()} cores; {settings}"
        )

    def print_table(self, figure: str, unit: str, *, better: Better = Better.LESS) -> None:
        """One line a case: each contender's figure, and how many times better pdcore's is."""
        columns = list(dict.fromkeys(name for runs in self.figures.values() for name in runs))
        peers = [name for name in columns if name != "pdcore"]
        ratio = "{} / pdcore" if better is Better.LESS else "pdcore / {}"
        heads = [*columns, *map(ratio.format, peers)]
        width = max(map(len, self.figures), default=0) + 2
        print(f"\n{figure}, {unit}; {better.value}")
        print(" " * width + "".join(f"{head:>26}" for head in heads))
        for label in self.figures:
            cells = [_number(self.median(label, name, figure)) for name in columns]
            cells += [str(self.ratio(label, name, figure, better=better) or "-") for name in peers]
            print(label.ljust(width) + "".join(f"{cell:>26}" for cell in cells))

    def save(self, path: Path | None) -> None:
        """Write everything as JSON."""
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            data = {"title": self.title, "settings": self.settings, "figures": self.figures}
            path.write_text(json.dumps(data, indent=1))


def measure(
    report: Report,
    cases: Sequence[Case],
    rivals: Sequence[Contender],
    repeats: int,
    *,
    show: Callable[[str], None] | None = None,
) -> None:
    """Run every case ``repeats`` times on every contender, turn by turn."""
    for case in cases:
        for repeat in range(repeats):
            if show is not None:
                show(f"{case.label}, {repeat + 1} of {repeats}")
            for contender in rivals:
                for column, settings in case.columns(contender):
                    report.add(case.label, column, contender.ask(case.task, **settings))


def progress(text: str) -> None:
    """What is being measured, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def ending(rivals: Sequence[Contender]) -> Iterator[None]:
    """End the contenders with the block: the polite way, or at once if it is left by an error.

    A signal to terminate counts as one: contenders that stand still would be left for ever.
    """
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    except BaseException:
        for contender in rivals:
            contender.kill()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
        progress("")
    for contender in rivals:
        contender.close()


def _leave(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def cpu_name() -> str:
    """The processor's name, as the system has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def run(title: str, cases: Sequence[Case], options: argparse.Namespace) -> Report:
    """Measure the cases on all contenders and return the report; prints its head."""
    report = Report(title, {"repeats": options.repeats, "seed": options.seed})
    report.print_head()
    rivals = contenders(options)
    with ending(rivals):
        measure(report, cases, rivals, options.repeats, show=progress)
    return report


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
