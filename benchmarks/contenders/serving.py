"""The contender's side of a benchmark: a process that answers tasks, one JSON line each.

Written for the standard library alone, because it runs in every contender's own interpreter.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

__all__ = ["StepTimes", "serve", "timed"]


class StepTimes:
    """Microseconds of steps, as a contender reports them."""

    def __init__(self) -> None:
        self.samples: list[float] = []

    def add(self, start_ns: int, end_ns: int) -> None:
        """Note one step, by two readings of `time.perf_counter_ns`."""
        self.samples.append((end_ns - start_ns) / 1e3)

    def report(self) -> dict[str, float]:
        """Mean and median, in microseconds."""
        ordered = sorted(self.samples)
        return {
            "mean": sum(ordered) / len(ordered),
            "median": ordered[len(ordered) // 2],
            "num_steps": len(ordered),
        }


def timed(work: Callable[[], Any]) -> float:
    """Microseconds of a call, garbage collection on, garbage of others collected before."""
    gc.collect()
    start = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - start) / 1e3


def serve(tasks: dict[str, Callable[..., dict[str, float]]]) -> None:
    """Answer tasks until standard input ends.

    Args:
        tasks: by name; each takes keyword settings and returns figures.
    """
    # Whatever a library prints must not end up between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps({"tasks": sorted(tasks)}), file=answers, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer: dict[str, Any] = {"figures": tasks[question["task"]](**question["settings"])}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
