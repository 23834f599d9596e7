"""What the tests of the scheduler share: a scheduler, and a runner that checks all it reads."""

from __future__ import annotations

from typing import Any

import numpy as np

from pdcore import (
    FinishReason,
    KVCacheManager,
    Limits,
    LRUBlockPool,
    Request,
    SamplingParams,
    UnifiedScheduler,
    VirtualClock,
)
from pdcore.kvcache import KVCacheConfig
from pdcore.messages import ModelRunnerOutput, SchedulerOutput
from pdcore.testing import FakeKVRunner
from pdcore.testing.drive import Driver

VOCAB_SIZE = 64


class Rig:
    """A scheduler with everything that a test may want to look at."""

    def __init__(self, *, num_blocks: int = 33, block_size: int = 4, **kwargs: Any) -> None:
        self.clock = VirtualClock()
        self.runner = FakeKVRunner(
            block_size=block_size, num_blocks=num_blocks, vocab_size=VOCAB_SIZE
        )
        spec = self.runner.get_kv_cache_spec()
        self.runner.initialize_from_config(KVCacheConfig(spec=spec, num_blocks=num_blocks))
        self.pool = LRUBlockPool(num_blocks, block_size)
        limits = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64}
        limits |= kwargs.pop("limits", {})
        self.scheduler = UnifiedScheduler(
            KVCacheManager(self.pool), limits=Limits(**limits), clock=self.clock, **kwargs
        )
        self.driver = Driver(self.scheduler, self.runner, clock=self.clock)

    def add(self, name: str, num_tokens: int = 5, *, max_tokens: int = 3, **kwargs: Any) -> None:
        sampling = SamplingParams(
            max_tokens=max_tokens, structured_output=kwargs.pop("structured_output", None)
        )
        prompt = kwargs.pop("prompt", range(4, 4 + num_tokens))
        self.driver.add(Request(name, prompt, sampling=sampling, **kwargs))

    def ends(self) -> dict[str, FinishReason | None]:
        return {name: got.finish_reason for name, got in self.driver.run().items()}


def draw(output: SchedulerOutput) -> ModelRunnerOutput:
    """A token for every row that draws one, from nobody's KV; two of them are all there are."""
    rows = output.rows[output.samples]
    return ModelRunnerOutput(
        rows=rows,
        epochs=output.epochs[output.samples],
        sampled_token_ids=((rows + output.step_id) % 2).astype(np.int32)[:, None],
    )
