"""An hour of real traffic through the control plane.

First one request at a time through the block manager: how many blocks of the prompts are found
again, beside an exact LRU cache of the same size. Then through scheduler and pool at the trace's
arrival times, on a virtual clock: a step takes 20 ms and 10 µs a token there. Without a model; with
``--check``, `FakeKVRunner` runs every token and checks every KV slot that is read.
"""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc
from pathlib import Path

import numpy as np

from measuring import cpu_name, progress
from pdcore import (
    KVCacheManager,
    Limits,
    LRUBlockPool,
    Request,
    SamplingParams,
    UnifiedScheduler,
    VirtualClock,
)
from pdcore.kvcache import KVCacheConfig, TokenSequence
from pdcore.messages import ModelRunnerOutput, SchedulerOutput
from pdcore.testing import FakeKVRunner
from traces import BLOCK_SIZE, TraceRequest, exact_lru_hit_rate, load_mooncake

POOL_TOKENS = 3_000_000
STEP_S, TOKEN_S = 0.020, 10e-6


def manager_hit_rate(requests: list[TraceRequest], num_blocks: int) -> float:
    """The share of prompt blocks that the block manager finds, one request at a time."""
    manager = KVCacheManager(LRUBlockPool(num_blocks + 1, BLOCK_SIZE))
    manager.reserve_rows(1, max(len(request.block_ids) + 1 for request in requests) * BLOCK_SIZE)
    num_found = num_asked = 0
    for step, request in enumerate(requests):
        sequence = TokenSequence(request.prompt())
        hit = manager.get_computed_blocks(sequence)
        num_found += hit.block_ids.size
        num_asked += len(request.block_ids)
        num_tokens = len(sequence)
        blocks = manager.allocate_slots(
            hit, num_tokens, must_fit_tokens=num_tokens, chunk=num_tokens
        )
        manager.bind(
            [0],
            [blocks],
            [sequence],
            num_published=[hit.block_ids.size],
            num_tokens=[num_tokens],
            step=step,
        )
        manager.pool.commit(step)
        manager.tables.free(0)
    return num_found / num_asked


class Source:
    """A token for every row that draws one, in place of a model."""

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """The result of a step."""
        rows = output.rows[output.samples]
        return ModelRunnerOutput(
            rows=rows,
            epochs=output.epochs[output.samples],
            sampled_token_ids=np.ones((rows.size, 1), np.int32),
        )


class CheckedSource:
    """`FakeKVRunner`: every KV slot that a step reads must hold what belongs there."""

    def __init__(self, num_blocks: int) -> None:
        self._runner = FakeKVRunner(block_size=BLOCK_SIZE)
        spec = self._runner.get_kv_cache_spec()
        self._runner.initialize_from_config(KVCacheConfig(spec=spec, num_blocks=num_blocks))

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """The result of a step."""
        self._runner.execute_model(output)
        return self._runner.sample_tokens(None)


def replay(requests: list[TraceRequest], *, check: bool) -> dict[str, float]:
    """Serve the trace at its arrival times; return what the control plane took."""
    num_blocks = POOL_TOKENS // BLOCK_SIZE + 1
    clock = VirtualClock()
    scheduler = UnifiedScheduler(
        KVCacheManager(LRUBlockPool(num_blocks, BLOCK_SIZE)),
        limits=Limits(
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            max_model_len=max(
                len(request.block_ids) * BLOCK_SIZE + 1 + request.num_output_tokens
                for request in requests
            ),
        ),
        clock=clock,
    )
    source: Source | CheckedSource = CheckedSource(num_blocks) if check else Source()
    waiting = list(enumerate(requests))[::-1]
    busy_s, num_finished, most_running = 0.0, 0, 0
    while waiting or scheduler.has_requests():
        if not scheduler.has_requests() and waiting[-1][1].arrival_time > clock.now():
            clock.advance(waiting[-1][1].arrival_time - clock.now())
        start = time.perf_counter()
        while waiting and waiting[-1][1].arrival_time <= clock.now():
            number, request = waiting.pop()
            sampling = SamplingParams(
                max_tokens=request.num_output_tokens, temperature=0.0, ignore_eos=True
            )
            scheduler.add_request(Request(f"r{number}", request.prompt(), sampling=sampling))
        output = scheduler.schedule()
        busy_s += time.perf_counter() - start
        result = source.run(output)
        clock.advance(STEP_S + TOKEN_S * output.total_num_scheduled_tokens)
        start = time.perf_counter()
        num_finished += len(scheduler.update_from_output(output, result).finished)
        busy_s += time.perf_counter() - start
        stats = scheduler.stats()
        most_running = max(most_running, stats.num_running)
        if stats.num_steps % 500 == 0:
            progress(f"{clock.now():,.0f} s of the trace, {num_finished:,} requests done")
    progress("")
    stats = scheduler.stats()
    return {
        "num_requests": num_finished,
        "trace_s": clock.now(),
        "num_steps": stats.num_steps,
        "control_plane_s": busy_s,
        "requests_per_s": num_finished / busy_s,
        "us_per_step": busy_s / stats.num_steps * 1e6,
        "num_preemptions": stats.num_preemptions,
        "most_running": most_running,
        "hit_rate": stats.num_prefix_hit_tokens / stats.num_prefix_queried_tokens,
    }


def main() -> None:
    """Replay the trace both ways and print what came of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path, help="a Mooncake trace, one JSON object a line")
    parser.add_argument("--requests", type=int, help="only so many from the start")
    parser.add_argument("--check", action="store_true", help="run FakeKVRunner too: slow")
    parser.add_argument("--memory", action="store_true", help="trace memory: slows the replay")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    arguments = parser.parse_args()
    requests = load_mooncake(arguments.trace)[: arguments.requests]
    print(f"bench_traffic: {arguments.trace.name}, {len(requests):,} requests; {cpu_name()}")
    num_blocks = POOL_TOKENS // BLOCK_SIZE
    unbounded = len({key for request in requests for key in request.block_ids}) + 1000
    figures: dict[str, float] = {}
    for name, size in (("a pool of 3M tokens", num_blocks), ("an unbounded pool", unbounded)):
        exact = exact_lru_hit_rate(requests, size)
        figures[f"hit rate, {name}"] = found = manager_hit_rate(requests, size)
        print(f"blocks found again with {name}: {found:.2%}; by an exact LRU: {exact:.2%}")
    if arguments.memory:
        tracemalloc.start()
    figures |= replay(requests, check=arguments.check)
    for name, value in figures.items():
        print(f"{name:32}{value:>14,.2f}")
    if arguments.memory:
        peak = tracemalloc.get_traced_memory()[1] / 2**20
        figures["peak_mib"] = peak
        print(f"{'peak memory, MiB':32}{peak:>14,.1f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
