"""What a control plane is asked to do in the benchmarks; each contender brings its own engine.

Written for the standard library alone, because it runs in every contender's own interpreter.
"""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

from serving import StepTimes

__all__ = ["BLOCK_SIZE", "VOCABULARY", "Engine", "control_tasks", "prompts", "take"]

BLOCK_SIZE = 16
VOCABULARY = 32_000


class Engine(Protocol):
    """A scheduler and, instead of a model, a source of tokens that costs next to nothing."""

    def add(self, prompt: list[int], max_tokens: int) -> None:
        """A new request for exactly so many tokens."""

    def step(self) -> None:
        """One step, untimed."""

    def timed_step(self, times: StepTimes) -> None:
        """One step; what the model would do is left out, reading every result is counted."""

    def has_requests(self) -> bool:
        """Whether anything is unfinished."""

    def totals(self) -> dict[str, float]:
        """``num_preemptions`` and ``num_scheduled_tokens`` of all steps."""


MakeEngine = Callable[..., Engine]
"""Takes num_seqs, num_blocks, caching, budget, max_len, and what only one contender knows."""


def control_tasks(make: MakeEngine) -> dict[str, Callable[..., dict[str, float]]]:
    """The tasks by name, for engines of one kind."""
    tasks = (decode, churn, admission, pressure, queue, memory)
    return {task.__name__: partial(task, make) for task in tasks}


def take(request_id: str, token: object, reason: object) -> None:
    """Where an application would go on with a token."""


def prompts(num_tokens: int, seed: int) -> Iterator[list[int]]:
    """Random prompts that share nothing."""
    rng = random.Random(seed)
    while True:
        yield [rng.randrange(VOCABULARY) for _ in range(num_tokens)]


def decode(
    make: MakeEngine,
    *,
    n: int,
    caching: bool,
    prompt: int,
    spread: int,
    steps: int,
    seed: int,
    **kind: Any,
) -> dict[str, float]:
    """Steady decode: everybody draws a token, nobody comes or goes.

    Prompts have ``spread`` lengths, from ``prompt`` on.
    """
    total = prompt + spread + steps + 32
    engine = make(
        num_seqs=n,
        num_blocks=n * (total // BLOCK_SIZE + 2) + 1,
        caching=caching,
        budget=max(n * (prompt + spread), 8192),
        max_len=total + 16,
        **kind,
    )
    _fill(engine, n, prompt, spread=spread, max_tokens=steps + 32, seed=seed)
    return _time_steps(engine, steps)


def churn(
    make: MakeEngine, *, n: int, caching: bool, prompt: int, steps: int, seed: int, **kind: Any
) -> dict[str, float]:
    """Decode in which one request in 64 ends in each step and another takes its place."""
    lifetime, arrivals = 64, max(n // 64, 1)
    engine = make(
        num_seqs=n,
        num_blocks=4 * n * ((prompt + lifetime) // BLOCK_SIZE + 2) + 1,
        caching=caching,
        budget=n + arrivals * prompt + 8192,
        max_len=prompt + lifetime + 16,
        **kind,
    )
    source = prompts(prompt, seed)
    for _ in range(2 * lifetime):
        for _ in range(arrivals):
            engine.add(next(source), lifetime)
        engine.step()
    times = StepTimes()
    for _ in range(steps):
        _timed_arrival(engine, [next(source) for _ in range(arrivals)], lifetime, times)
    return times.report()


def admission(
    make: MakeEngine, *, num_tokens: int, cached: bool, at_once: int, steps: int, seed: int
) -> dict[str, float]:
    """From a request's making to its first token, the key hashing included, per request.

    ``at_once`` of them arrive in each step, and nothing else runs.
    """
    engine = make(
        num_seqs=max(at_once, 8),
        num_blocks=(steps * at_once + 2) * (num_tokens // BLOCK_SIZE + 2),
        caching=True,
        budget=at_once * num_tokens + 8,
        max_len=num_tokens + 8,
    )
    source = prompts(num_tokens, seed)
    shared = next(source)
    engine.add(shared, 1)
    engine.step()
    times = StepTimes()
    for _ in range(steps):
        arrivals = [list(shared) if cached else next(source) for _ in range(at_once)]
        _timed_arrival(engine, arrivals, 1, times)
        if engine.has_requests():
            raise AssertionError("a request did not end with its first token")
    times.samples = [sample / at_once for sample in times.samples]
    return times.report()


def pressure(
    make: MakeEngine, *, n: int, prompt: int, output: int, pool_share: float, seed: int
) -> dict[str, float]:
    """A whole run in a pool that holds only part of what all requests need at their end."""
    total = prompt + output
    engine = make(
        num_seqs=n,
        num_blocks=int(n * -(-total // BLOCK_SIZE) * pool_share) + 1,
        caching=True,
        budget=8192,
        max_len=total + 16,
    )
    _add(engine, n, prompt, max_tokens=output, seed=seed)
    times = StepTimes()
    while engine.has_requests():
        engine.timed_step(times)
    return {"total": sum(times.samples), "num_steps": len(times.samples), **engine.totals()}


def queue(make: MakeEngine, *, n: int, num_waiting: int, steps: int, seed: int) -> dict[str, float]:
    """Steady decode while many requests wait and none finds room, and while nobody waits.

    Two engines take a block's worth of steps in turn, so that a busy machine slows both alike.
    """
    prompt, total = 32, 32 + steps + 32
    engines = [
        make(
            num_seqs=n,
            num_blocks=n * (total // BLOCK_SIZE + 2) + 1,
            caching=True,
            budget=max(n * prompt, 8192),
            max_len=total + 16,
        )
        for _ in range(2)
    ]
    for engine in engines:
        _fill(engine, n, prompt, max_tokens=steps + 32, seed=seed)
    waiting = next(prompts(prompt, seed + 1))
    for _ in range(num_waiting):
        engines[1].add(waiting, 4)
    times = [StepTimes(), StepTimes()]
    for _ in range(steps // BLOCK_SIZE):
        for engine, of_engine in zip(engines, times, strict=True):
            for _ in range(BLOCK_SIZE):
                engine.timed_step(of_engine)
    empty, full = (of_engine.report() for of_engine in times)
    return {
        "empty": empty["median"],
        "median": full["median"],
        "growth": full["median"] / empty["median"],
        "mean growth": full["mean"] / empty["mean"],
    }


def memory(make: MakeEngine, *, num_tokens: int, count: int, seed: int) -> dict[str, float]:
    """KiB that a waiting and a running request take, on average."""
    engine = make(
        num_seqs=count,
        num_blocks=count * (num_tokens // BLOCK_SIZE + 2) + 1,
        caching=True,
        budget=count * num_tokens,
        max_len=num_tokens + 64,
    )
    tracemalloc.start()
    _add(engine, count, num_tokens, max_tokens=32, seed=seed)
    waiting = tracemalloc.get_traced_memory()[0]
    engine.step()
    engine.step()
    running = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return {"waiting": waiting / count / 1024, "running": running / count / 1024}


def _add(
    engine: Engine, n: int, num_tokens: int, *, spread: int = 1, max_tokens: int, seed: int
) -> None:
    source = prompts(num_tokens + spread - 1, seed)
    for index in range(n):
        engine.add(next(source)[: num_tokens + index % spread], max_tokens)


def _fill(
    engine: Engine, n: int, num_tokens: int, *, spread: int = 1, max_tokens: int, seed: int
) -> None:
    """Let so many requests run until all have filled a block."""
    _add(engine, n, num_tokens, spread=spread, max_tokens=max_tokens, seed=seed)
    for _ in range(BLOCK_SIZE + 1):
        engine.step()


def _time_steps(engine: Engine, steps: int) -> dict[str, float]:
    times = StepTimes()
    for _ in range(steps):
        engine.timed_step(times)
    return times.report()


def _timed_arrival(
    engine: Engine, arrivals: list[list[int]], max_tokens: int, times: StepTimes
) -> None:
    """One step with new requests, whose making is part of its time."""
    start = time.perf_counter_ns()
    for prompt in arrivals:
        engine.add(prompt, max_tokens)
    added = time.perf_counter_ns() - start
    engine.timed_step(times)
    times.samples[-1] += added / 1e3
