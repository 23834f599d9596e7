"""pdcore as a contender of `bench_generate.py`: its parts, and the loop that a user would write."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from generate_workload import Generate, bind_threads, serve_generation

from pdcore import KVCacheManager, Limits, LRUBlockPool, Request, SamplingParams, UnifiedScheduler
from pdcore.loop import BatchQueue
from pdcore.runner import GPUModelRunner
from pdcore.runner.executor import InProcessExecutor
from pdcore.runner.models import LlamaModel, load_model

__all__ = ["Engine", "floor_ms"]

BLOCK_SIZE = 16


class Engine:
    """One engine on the CPU, prefix caching on.

    Args:
        model: a folder or a GGUF file.
        dtype: of weights and KV.
        num_threads: torch's threads; None leaves its choice.
        depth: steps under way at once.
    """

    def __init__(
        self, model: Path, dtype: str, *, num_threads: int | None = None, depth: int = 1
    ) -> None:
        limits = Limits(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=2048)
        self._executor = InProcessExecutor(
            lambda: GPUModelRunner(
                model,
                limits=limits,
                device="cpu",
                dtype=dtype,
                block_size=BLOCK_SIZE,
                num_threads=num_threads,
            ),
            num_blocks=2560,
        )
        self._executor.start()
        pool = LRUBlockPool(2560, BLOCK_SIZE)
        self._scheduler = UnifiedScheduler(KVCacheManager(pool), limits=limits)
        self._loop = BatchQueue(self._scheduler, self._executor, depth=depth)
        self._num_added = 0

    def generate(self, prompts: Sequence[list[int]], num_tokens: int) -> None:
        """Draw exactly so many tokens for each prompt."""
        self.add(prompts, num_tokens)
        while self._scheduler.has_requests():
            self._loop.step()

    def step_ms(self, num_requests: int, num_context: int, num_steps: int) -> float:
        """Median time of a step in which so many requests decode, in milliseconds."""
        prompts = [[request + 7] * num_context for request in range(num_requests)]
        self.add(prompts, num_steps)
        times = []
        while self._scheduler.has_requests():
            start = time.perf_counter()
            result = self._loop.step()
            if result.token_ids.size == num_requests:
                times.append((time.perf_counter() - start) * 1e3)
        return statistics.median(times)

    def add(self, prompts: Sequence[list[int]], num_tokens: int) -> None:
        """Take in requests for exactly so many tokens each."""
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        for prompt in prompts:
            self._num_added += 1
            name = f"request-{self._num_added}"
            self._scheduler.add_request(Request(name, prompt, sampling=sampling))

    def close(self) -> None:
        """Free the model."""
        self._executor.close()


@torch.inference_mode()
def floor_ms(model: LlamaModel, num_rows: int, repeats: int) -> float:
    """Median time of a step's matrix products alone, as the model has its weights, in ms."""
    config, dtype = model.config, model.activation_dtype
    inner = torch.randn(num_rows, config.intermediate_size).to(dtype)
    hidden = torch.randn(num_rows, config.hidden_size).to(dtype)
    heads = torch.randn(num_rows, config.num_heads * config.head_dim).to(dtype)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for layer in model.layers:
            layer.qkv(hidden)
            layer.output(heads)
            layer.gate_up(hidden)
            layer.down(inner)
        model.lm_head(hidden)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def measure_floor(model: Path, dtype: str, num_threads: int | None) -> Callable[..., Any]:
    """A task that times the products, and a step of the engine, at one batch size."""
    engine = Engine(model, dtype, num_threads=num_threads)
    products = load_model(model, dtype=getattr(torch, dtype))

    def floor(*, num_rows: int, num_context: int, repeats: int) -> dict[str, float]:
        return {
            "products": floor_ms(products, num_rows, repeats),
            "step": engine.step_ms(num_rows, num_context, repeats) if num_rows <= 64 else 0.0,
        }

    return floor


def main() -> None:
    """Serve the task ``generate``."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("model", type=Path)
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--threads", type=int)
    options.add_argument("--depth", type=int, default=1)
    arguments = options.parse_args()
    if arguments.threads is not None:
        bind_threads(arguments.threads)

    def load() -> Generate:
        engine = Engine(
            arguments.model,
            arguments.dtype,
            num_threads=arguments.threads,
            depth=arguments.depth,
        )
        return engine.generate

    serve_generation(load)


if __name__ == "__main__":
    main()
