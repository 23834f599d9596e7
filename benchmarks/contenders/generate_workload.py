"""What every contender of `bench_generate.py` is asked to do, and how it is timed.

Written for the standard library alone, because it runs in every contender's own interpreter.
"""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Callable, Sequence

from serving import serve

__all__ = ["Generate", "bind_threads", "serve_generation"]

FIRST_TOKEN, LAST_TOKEN = 1_000, 49_000

Generate = Callable[[Sequence[list[int]], int], None]
"""``generate(prompts, num_tokens)``: draw exactly so many tokens for each, greedily."""


def bind_threads(num_threads: int) -> None:
    """Keep this process to the first cores, as vLLM's own binding keeps it. Before any thread."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(num_threads))


class _Timer:
    """Times workloads. No two prompts are alike, so no repeat finds the last one in a cache."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate
        self._num_runs = 0

    def generate(
        self, *, num_requests: int, num_shared: int, num_own: int, num_tokens: int, seed: int
    ) -> dict[str, float]:
        """Run a workload twice: up to the first token of each request, and to the end.

        Returns:
            ``seconds`` of the whole, ``first`` and ``per_token`` in milliseconds; ``cpu_seconds``
            of the whole, over all threads: others on a busy machine touch it less.
        """
        sizes = num_requests, num_shared, num_own, seed
        first = self._seconds(self._prompts(*sizes), 1)
        cpu_start = time.process_time()
        whole = self._seconds(self._prompts(*sizes), num_tokens)
        return {
            "seconds": whole,
            "cpu_seconds": time.process_time() - cpu_start,
            "first": first * 1e3,
            "per_token": (whole - first) / max(num_tokens - 1, 1) * 1e3,
        }

    def _prompts(
        self, num_requests: int, num_shared: int, num_own: int, seed: int
    ) -> list[list[int]]:
        self._num_runs += 1
        source = random.Random(seed * 1_000_003 + self._num_runs)

        def draw(count: int) -> list[int]:
            return [source.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(count)]

        shared = draw(num_shared)
        return [shared + draw(num_own) for _ in range(num_requests)]

    def _seconds(self, prompts: list[list[int]], num_tokens: int) -> float:
        gc.collect()
        start = time.perf_counter()
        self._generate(prompts, num_tokens)
        return time.perf_counter() - start


def serve_generation(load: Callable[[], Generate]) -> None:
    """Load a model, warm it up, and answer the task ``generate`` until standard input ends."""
    # What a library prints while it loads must not be taken for an answer.
    answers = os.dup(1)
    os.dup2(2, 1)
    timer = _Timer(load())
    timer.generate(num_requests=2, num_shared=0, num_own=32, num_tokens=4, seed=0)
    os.dup2(answers, 1)
    os.close(answers)
    serve({"generate": timer.generate})
