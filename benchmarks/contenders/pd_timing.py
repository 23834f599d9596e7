"""What a client of a prefill/decode pair sees: when each token came.

Written for the standard library alone, because it runs in every contender's own interpreter.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from control_tasks import prompts

__all__ = ["FreshPrompts", "Timeline", "cpu_shares", "figures"]


class FreshPrompts:
    """Random prompts, none of them twice: in a repeat, no prefix cache must know the last one's."""

    def __init__(self) -> None:
        self._sources: dict[tuple[int, int], Iterator[list[int]]] = {}

    def take(self, count: int, num_tokens: int, seed: int) -> list[list[int]]:
        """The next so many; all contenders get the same ones in the same repeat."""
        source = self._sources.setdefault((num_tokens, seed), prompts(num_tokens, seed))
        return [next(source) for _ in range(count)]


class Timeline:
    """When one request was sent and when its tokens came, in seconds."""

    def __init__(self) -> None:
        self.sent_at = time.monotonic()
        self.token_times: list[float] = []


def figures(timelines: Iterable[Timeline]) -> dict[str, float]:
    """Milliseconds to the first token and from token to token, and output tokens per second."""
    timelines = list(timelines)
    num_tokens = sum(len(line.token_times) for line in timelines)
    begin = min(line.sent_at for line in timelines)
    end = max(line.token_times[-1] for line in timelines)
    gaps = [
        (line.token_times[-1] - line.token_times[0]) / max(len(line.token_times) - 1, 1)
        for line in timelines
    ]
    return {
        "first": 1e3 * statistics.mean(line.token_times[0] - line.sent_at for line in timelines),
        "per_token": 1e3 * statistics.mean(gaps),
        "seconds": end - begin,
        "tokens": num_tokens,
        "token_rate": num_tokens / (end - begin),
    }


def cpu_shares(pids: list[int], seconds: float) -> dict[str, float]:
    """Per cent of a core that both engines use, each with its children, over so many seconds."""
    before = {pid: _cpu_seconds(pid) for pid in pids}
    time.sleep(seconds)
    shares = [100 * (_cpu_seconds(pid) - before[pid]) / seconds for pid in pids]
    return dict(zip(("prefill", "decode"), shares, strict=True))


def _cpu_seconds(pid: int) -> float:
    """Of a process and all its descendants."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(") ")[2].split()
        except OSError:
            continue  # it ended meanwhile
        number = int(path.parent.name)
        children.setdefault(int(fields[1]), []).append(number)
        ticks[number] = int(fields[11]) + int(fields[12])
    total, todo = 0, [pid]
    while todo:
        number = todo.pop()
        total += ticks.get(number, 0)
        todo += children.get(number, [])
    return total / os.sysconf("SC_CLK_TCK")
