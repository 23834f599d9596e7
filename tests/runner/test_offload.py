"""A real model whose working set is three times its pool, served from host memory and disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("nixl")

from pdcore import (
    KVCacheManager,
    Limits,
    LRUBlockPool,
    MonotonicClock,
    Request,
    SamplingParams,
    UnifiedScheduler,
)
from pdcore.connector.offload import OffloadConfig, OffloadConnector
from pdcore.connector.stats import OffloadCounts
from pdcore.kvcache import PrefixHasher
from pdcore.loop import Waker, step, wait
from pdcore.runner import GPUModelRunner
from pdcore.runner.executor import InProcessExecutor

pytestmark = pytest.mark.nixl

BLOCK_SIZE, NUM_USABLE_BLOCKS = 16, 16
NUM_PROMPTS, NUM_PROMPT_TOKENS = 12, 4 * BLOCK_SIZE + 1
LIMITS = Limits(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=128)
HASHER = PrefixHasher(BLOCK_SIZE, secret=b"kept from engine to engine")

Tokens = dict[str, list[int]]


class Engine:
    """One engine, with or without something behind its pool."""

    def __init__(self, model: Path, config: OffloadConfig | None) -> None:
        connector = None if config is None else OffloadConnector(config)
        worker = None if connector is None else connector.worker_side()
        self._executor = InProcessExecutor(
            lambda: GPUModelRunner(
                model,
                limits=LIMITS,
                device="cpu",
                block_size=BLOCK_SIZE,
                num_threads=1,
                connector=worker,
            ),
            num_blocks=NUM_USABLE_BLOCKS + 1,
        )
        self._executor.start()
        self._waker, clock = Waker(), MonotonicClock()
        half = None if connector is None else connector.scheduler_side()
        if half is not None and worker is not None:
            half.start(clock=clock, notify=self._waker)
            half.set_xfer_handshake_metadata([worker.get_handshake_metadata()])
        pool = LRUBlockPool(NUM_USABLE_BLOCKS + 1, BLOCK_SIZE)
        manager = KVCacheManager(pool, hasher=HASHER)
        self.scheduler = UnifiedScheduler(manager, limits=LIMITS, connector=half, clock=clock)

    @property
    def counts(self) -> OffloadCounts:
        return self.scheduler.stats().connector.offload

    def serve(self, order: list[int]) -> Tokens:
        """Generate for the prompts of these numbers, one after the other as rows get free."""
        for number in order:
            sampling = SamplingParams(max_tokens=6, temperature=0)
            self.scheduler.add_request(Request(f"r{number}", prompt(number), sampling=sampling))
        tokens: Tokens = {f"r{number}": [] for number in order}
        while self.scheduler.has_requests():
            wait(self.scheduler, self._waker, clock=self.scheduler.clock)
            for output in step(self.scheduler, self._executor).outputs:
                tokens[output.request_id].extend(output.new_token_ids)
        self.scheduler.check()
        return tokens

    def close(self) -> None:
        self._executor.close()


def prompt(number: int) -> np.ndarray:
    generator = np.random.default_rng(number)
    return generator.integers(3, 128, NUM_PROMPT_TOKENS).astype(np.int32)


def test_three_times_the_pool_comes_back_from_host_memory_and_disk(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """Also in the next engine: what was loaded gives the tokens that computing gives."""
    order = list(range(NUM_PROMPTS))
    plain = Engine(tiny_llama, None)
    expected = plain.serve(order)
    plain.close()
    # A third of the working set in host memory, all of it on disk.
    config = OffloadConfig(
        host_bytes=18 * (1 << 13),
        disk_bytes=80 * (1 << 13),
        directory=tmp_path,
        persistent=True,
    )
    engine = Engine(tiny_llama, config)
    assert engine.serve(order) == expected
    assert engine.counts.num_saved >= 3 * NUM_USABLE_BLOCKS
    assert engine.serve(order[::-1]) == expected
    counts = engine.counts
    assert counts.num_loaded_from_host >= 8
    assert counts.num_loaded_from_disk >= 8
    num_saved_tokens = BLOCK_SIZE * (counts.num_loaded_from_host + counts.num_loaded_from_disk)
    assert engine.scheduler.stats().num_external_tokens == num_saved_tokens
    engine.close()
    after = Engine(tiny_llama, config)
    assert after.serve(order) == expected
    assert after.counts.num_loaded_from_disk >= 3 * NUM_USABLE_BLOCKS - 8
    assert after.counts.num_lost == 0
    after.close()
