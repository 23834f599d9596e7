"""pdcore's control plane, for the benchmarks."""

from __future__ import annotations

import pickle
import random
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
from serving import StepTimes, serve, timed

from pdcore import KVCacheManager, Limits, LRUBlockPool, Request, SamplingParams, UnifiedScheduler
from pdcore.messages import ModelRunnerOutput, SchedulerOutput, StepResult

BLOCK_SIZE = 16
VOCABULARY = 32_000


class Engine:
    """A scheduler and, instead of a model, a source of tokens that costs next to nothing."""

    def __init__(self, *, num_seqs: int, num_blocks: int, caching: bool, budget: int, max_len: int):
        self.manager = KVCacheManager(
            LRUBlockPool(num_blocks, BLOCK_SIZE), enable_prefix_caching=caching
        )
        limits = Limits(max_num_seqs=num_seqs, max_num_batched_tokens=budget, max_model_len=max_len)
        self.scheduler = UnifiedScheduler(self.manager, limits=limits)
        self.num_added = 0

    def add(self, prompt: list[int], max_tokens: int) -> None:
        """A new request for exactly so many tokens."""
        self.num_added += 1
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.scheduler.add_request(
            Request(f"chatcmpl-{self.num_added:032x}", prompt, sampling=sampling)
        )

    def step(self) -> StepResult:
        """One step, untimed."""
        output = self.scheduler.schedule()
        return self.scheduler.update_from_output(output, sampled(output))

    def timed_step(self, times: StepTimes) -> tuple[SchedulerOutput, StepResult]:
        """One step; what the model would do is left out, reading every result is counted."""
        clock = time.perf_counter_ns
        begin = clock()
        output = self.scheduler.schedule()
        planned = clock()
        model_output = sampled(output)
        resume = clock()
        result = self.scheduler.update_from_output(output, model_output)
        for request_id, token, reason in zip(
            result.request_ids,
            result.token_ids.tolist(),
            result.finish_reasons.tolist(),
            strict=True,
        ):
            take(request_id, token, reason)
        times.add(begin, clock() - (resume - planned))
        return output, result


def take(request_id: str, token: int, reason: int) -> None:
    """Where an application would go on with a token."""


def sampled(output: SchedulerOutput) -> ModelRunnerOutput:
    """A token for every row that draws one; none is a stop token."""
    rows = output.rows[output.samples]
    tokens = (rows + output.step_id) % VOCABULARY
    return ModelRunnerOutput(
        rows=rows,
        epochs=output.epochs[output.samples],
        sampled_token_ids=tokens.astype(np.int32)[:, None],
    )


def prompts(num_tokens: int, seed: int) -> Iterator[list[int]]:
    """Random prompts that share nothing."""
    rng = random.Random(seed)
    while True:
        yield [rng.randrange(VOCABULARY) for _ in range(num_tokens)]


def decode(*, n: int, caching: bool, prompt: int, steps: int, seed: int) -> dict[str, float]:
    """Steady decode: everybody draws a token, nobody comes or goes."""
    total = prompt + steps + 32
    engine = Engine(
        num_seqs=n,
        num_blocks=n * (total // BLOCK_SIZE + 2) + 1,
        caching=caching,
        budget=max(n * prompt, 8192),
        max_len=total + 16,
    )
    for tokens, _ in zip(prompts(prompt, seed), range(n), strict=False):
        engine.add(tokens, steps + 32)
    for _ in range(BLOCK_SIZE + 1):
        engine.step()
    times = StepTimes()
    for _ in range(steps):
        engine.timed_step(times)
    return times.report()


def churn(*, n: int, caching: bool, prompt: int, steps: int, seed: int) -> dict[str, float]:
    """Decode in which one request in 64 ends in each step and another takes its place."""
    lifetime, arrivals = 64, max(n // 64, 1)
    engine = Engine(
        num_seqs=n,
        num_blocks=4 * n * ((prompt + lifetime) // BLOCK_SIZE + 2) + 1,
        caching=caching,
        budget=n + arrivals * prompt + 8192,
        max_len=prompt + lifetime + 16,
    )
    source = prompts(prompt, seed)
    for _ in range(2 * lifetime):
        for _ in range(arrivals):
            engine.add(next(source), lifetime)
        engine.step()
    times = StepTimes()
    for _ in range(steps):
        new = [next(source) for _ in range(arrivals)]
        start = time.perf_counter_ns()
        for tokens in new:
            engine.add(tokens, lifetime)
        added = time.perf_counter_ns() - start
        engine.timed_step(times)
        times.samples[-1] += added / 1e3
    return times.report()


def admission(*, num_tokens: int, cached: bool, count: int, seed: int) -> dict[str, float]:
    """From `add_request` to the first token, one request at a time, the key hashing included."""
    engine = Engine(
        num_seqs=8,
        num_blocks=(count + 2) * (num_tokens // BLOCK_SIZE + 2),
        caching=True,
        budget=num_tokens + 8,
        max_len=num_tokens + 8,
    )
    source = prompts(num_tokens, seed)
    shared = next(source)
    engine.add(shared, 1)
    engine.step()
    times = StepTimes()
    for _ in range(count):
        tokens = list(shared) if cached else next(source)
        start = time.perf_counter_ns()
        engine.add(tokens, 1)
        added = time.perf_counter_ns() - start
        _, result = engine.timed_step(times)
        times.samples[-1] += added / 1e3
        assert result.finished, "the request ends with its first token"
    return times.report()


def pressure(*, n: int, prompt: int, output: int, pool_share: float, seed: int) -> dict[str, float]:
    """A whole run in a pool that holds only part of what all requests need at their end."""
    total = prompt + output
    engine = Engine(
        num_seqs=n,
        num_blocks=int(n * -(-total // BLOCK_SIZE) * pool_share) + 1,
        caching=True,
        budget=8192,
        max_len=total + 16,
    )
    for tokens, _ in zip(prompts(prompt, seed), range(n), strict=False):
        engine.add(tokens, output)
    times = StepTimes()
    while engine.scheduler.has_requests():
        engine.timed_step(times)
    stats = engine.scheduler.stats()
    return {
        "total": sum(times.samples),
        "num_steps": stats.num_steps,
        "num_preemptions": stats.num_preemptions,
        "num_scheduled_tokens": stats.num_scheduled_tokens,
    }


def queue(*, n: int, num_waiting: int, steps: int, seed: int) -> dict[str, float]:
    """Steady decode while many requests wait and none finds room."""
    prompt, total = 32, 32 + steps + 32
    engine = Engine(
        num_seqs=n,
        num_blocks=n * (total // BLOCK_SIZE + 2) + 1,
        caching=True,
        budget=max(n * prompt, 8192),
        max_len=total + 16,
    )
    source = prompts(prompt, seed)
    for _ in range(n):
        engine.add(next(source), steps + 32)
    for _ in range(BLOCK_SIZE + 1):
        engine.step()
    waiting = next(source)
    for _ in range(num_waiting):
        engine.add(waiting, 4)
    times = StepTimes()
    for _ in range(steps):
        engine.timed_step(times)
    return times.report()


def blocks(*, size: int, rounds: int) -> dict[str, float]:
    """Nanoseconds a block for each operation of the pool, all checks on."""
    num_blocks = max(2 * size, 64) + 1
    plain, hashed = LRUBlockPool(num_blocks, BLOCK_SIZE), LRUBlockPool(num_blocks, BLOCK_SIZE)
    count = rounds * size
    spent: dict[str, float] = {}

    def note(name: str, start: int) -> None:
        spent[name] = spent.get(name, 0.0) + (time.perf_counter_ns() - start) / count

    clock = time.perf_counter_ns
    for _ in range(rounds):
        start = clock()
        ids = plain.allocate(size)
        note("allocate plain", start)
        start = clock()
        plain.release(ids[::-1])
        note("release plain", start)
    for turn in range(rounds + 4):
        keys = [(turn * size + place).to_bytes(32, "little") for place in range(size)]
        if turn < 4:  # until every block that is free has a key
            ids = hashed.allocate(size)
            hashed.publish(ids, keys, turn)
            hashed.commit(turn)
            hashed.release(ids[::-1])
            continue
        start = clock()
        ids = hashed.allocate(size)
        note("allocate hashed", start)
        start = clock()
        hashed.publish(ids, keys, turn)
        hashed.commit(turn)
        note("publish", start)
        start = clock()
        found = hashed.lookup(keys)
        note("lookup", start)
        assert found.size == size
        start = clock()
        hashed.release(ids[::-1])
        note("release hashed", start)
    return spent


def pool(*, num_blocks: int) -> dict[str, float]:
    """Building a big pool: nanoseconds and bytes a block."""
    built: list[LRUBlockPool] = []
    duration = timed(lambda: built.append(LRUBlockPool(num_blocks, BLOCK_SIZE)))
    built.clear()
    tracemalloc.start()
    built.append(LRUBlockPool(num_blocks, BLOCK_SIZE))
    num_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return {"build": duration * 1e3 / num_blocks, "num_bytes": num_bytes / num_blocks}


def wire(*, n: int, new: bool, prompt: int, repeats: int, seed: int) -> dict[str, float]:
    """A step of decodes that all take a block, or of new prompts, written and read."""
    engine = Engine(
        num_seqs=n,
        num_blocks=n * (prompt // BLOCK_SIZE + 4) + 1,
        caching=True,
        budget=n * prompt + 1,
        max_len=prompt + 64,
    )
    for tokens, _ in zip(prompts(prompt, seed), range(n), strict=False):
        engine.add(tokens, 48)
    output = engine.scheduler.schedule()
    while not new and not output.block_ids.size:
        engine.scheduler.update_from_output(output, sampled(output))
        output = engine.scheduler.schedule()
    data = pickle.dumps(output, protocol=5)

    def write() -> Any:
        for _ in range(repeats):
            pickle.dumps(output, protocol=5)

    def read() -> Any:
        for _ in range(repeats):
            pickle.loads(data)

    return {
        "num_bytes": len(data),
        "write": timed(write) / repeats,
        "read": timed(read) / repeats,
    }


def memory(*, num_tokens: int, count: int, seed: int) -> dict[str, float]:
    """KiB that a running request takes, on average."""
    engine = Engine(
        num_seqs=count,
        num_blocks=count * (num_tokens // BLOCK_SIZE + 2) + 1,
        caching=True,
        budget=count * num_tokens,
        max_len=num_tokens + 64,
    )
    source = prompts(num_tokens, seed)
    tracemalloc.start()
    for _ in range(count):
        engine.add(next(source), 32)
    waiting = tracemalloc.get_traced_memory()[0]
    engine.step()
    engine.step()
    running = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return {"waiting": waiting / count / 1024, "running": running / count / 1024}


if __name__ == "__main__":
    serve(
        {
            "decode": decode,
            "churn": churn,
            "admission": admission,
            "pressure": pressure,
            "queue": queue,
            "blocks": blocks,
            "pool": pool,
            "wire": wire,
            "memory": memory,
        }
    )
