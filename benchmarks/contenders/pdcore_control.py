"""pdcore's control plane, for the benchmarks."""

from __future__ import annotations

import pickle
import time
import tracemalloc
from typing import Any

import numpy as np
from control_tasks import BLOCK_SIZE, VOCABULARY, control_tasks, prompts, take
from serving import StepTimes, serve, timed

from pdcore import KVCacheManager, Limits, LRUBlockPool, Request, SamplingParams, UnifiedScheduler
from pdcore.messages import ModelRunnerOutput, SchedulerOutput


class PdcoreEngine:
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

    def step(self) -> None:
        """One step, untimed."""
        output = self.scheduler.schedule()
        self.scheduler.update_from_output(output, sampled(output))

    def timed_step(self, times: StepTimes) -> None:
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

    def has_requests(self) -> bool:
        """Whether anything is unfinished."""
        return self.scheduler.has_requests()

    def totals(self) -> dict[str, float]:
        """What all steps did."""
        stats = self.scheduler.stats()
        return {
            "num_preemptions": stats.num_preemptions,
            "num_scheduled_tokens": stats.num_scheduled_tokens,
        }


def sampled(output: SchedulerOutput) -> ModelRunnerOutput:
    """A token for every row that draws one; none is a stop token."""
    rows = output.rows[output.samples]
    tokens = (rows + output.step_id) % VOCABULARY
    return ModelRunnerOutput(
        rows=rows,
        epochs=output.epochs[output.samples],
        sampled_token_ids=tokens.astype(np.int32)[:, None],
    )


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
    engine = PdcoreEngine(
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


if __name__ == "__main__":
    serve({**control_tasks(PdcoreEngine), "blocks": blocks, "pool": pool, "wire": wire})
