"""An engine with a disk behind its pool; as a program, one that runs until somebody kills it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from offload_simulation import SECRET, TappedOffload, make_config
from pdcore import (
    KVCacheManager,
    Limits,
    LRUBlockPool,
    MonotonicClock,
    Request,
    SamplingParams,
    UnifiedScheduler,
)
from pdcore.connector.offload import OffloadConnector
from pdcore.kvcache import KVCacheConfig, PrefixHasher
from pdcore.testing import FakeKVRunner

__all__ = ["PROMPTS", "OffloadEngine"]

BLOCK_SIZE, NUM_BLOCKS = 4, 24
PROMPTS = [np.random.default_rng(seed).integers(1, 9_000, 41) for seed in range(12)]


class OffloadEngine:
    """Serves prompts one at a time, from a pool that holds two of them.

    Args:
        directory: of its disk tier, which outlives it; None has no tiers at all.
    """

    def __init__(self, directory: Path | None) -> None:
        self._connector: TappedOffload | None = None
        if directory is not None:
            config = make_config(
                BLOCK_SIZE,
                num_host_blocks=8,
                num_disk_blocks=160,
                directory=directory,
                persistent=True,
            )
            self._connector = TappedOffload(OffloadConnector(config))
        connector = self._connector
        self._runner = FakeKVRunner(
            block_size=BLOCK_SIZE, connector=None if connector is None else connector.worker
        )
        spec = self._runner.get_kv_cache_spec()
        self._runner.initialize_from_config(KVCacheConfig(spec=spec, num_blocks=NUM_BLOCKS))
        clock = MonotonicClock()
        self.scheduler = UnifiedScheduler(
            KVCacheManager(
                LRUBlockPool(NUM_BLOCKS, BLOCK_SIZE), hasher=PrefixHasher(BLOCK_SIZE, secret=SECRET)
            ),
            limits=Limits(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64),
            connector=None if connector is None else connector.scheduler,
            clock=clock,
        )
        if connector is not None:
            connector.scheduler.start(clock=clock, notify=lambda: None)
            connector.meet()

    def serve(self, prompt: np.ndarray) -> tuple[int, ...]:
        """The tokens of one prompt."""
        self.scheduler.add_request(Request("r", prompt, sampling=SamplingParams(max_tokens=5)))
        tokens: list[int] = []
        while self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self._runner.execute_model(output)
            result = self.scheduler.update_from_output(output, self._runner.sample_tokens(None))
            for event in result.outputs:
                tokens += event.new_token_ids
        return tuple(tokens)

    def close(self) -> None:
        if self._connector is not None:
            self._connector.worker.close()
            self._connector.scheduler.close()


if __name__ == "__main__":
    engine = OffloadEngine(Path(sys.argv[1]))
    while True:
        for one in PROMPTS:
            engine.serve(one)
            print("served", flush=True)
