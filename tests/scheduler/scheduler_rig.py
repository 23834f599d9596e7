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
from pdcore.connector.base import ConnectorEvents, ExternalMatch, KVLoad
from pdcore.connector.null import NullSchedulerConnector
from pdcore.kvcache import KVCacheConfig
from pdcore.messages import ModelRunnerOutput, SchedulerOutput, TransferKey
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


class RemoteConnector(NullSchedulerConnector):
    """Has two blocks of 4 tokens of every request that asks for a load, "async" or "sync".

    Attributes:
        loads: asynchronous ones under way.
        events: what it says next.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[TransferKey] = []
        self.events = ConnectorEvents()

    def get_num_new_matched_tokens(
        self, request: Request, num_local_tokens: int
    ) -> ExternalMatch | None:
        wanted = (request.kv_transfer_params or {}).get("load")
        num_tokens = 0 if wanted is None else max(8 - num_local_tokens, 0)
        return ExternalMatch(num_tokens=num_tokens, is_async=wanted == "async")

    def update_state_after_alloc(self, request: Request, load: KVLoad) -> None:
        if (request.kv_transfer_params or {}).get("load") == "async":
            self.loads.append(load.transfer)

    def undo_alloc(self, request: Request, load: KVLoad) -> None:
        self.loads = [transfer for transfer in self.loads if transfer != load.transfer]

    def end_loads(self) -> None:
        """Say that all loads under way are there."""
        self.events, self.loads = ConnectorEvents(finished_recving=tuple(self.loads)), []

    def take_events(self) -> ConnectorEvents:
        events, self.events = self.events, ConnectorEvents()
        return events


def draw(output: SchedulerOutput, *, lowest: int = 0) -> ModelRunnerOutput:
    """A token for every row that draws one, from nobody's KV; two of them are all there are."""
    rows = output.rows[output.samples]
    return ModelRunnerOutput(
        rows=rows,
        epochs=output.epochs[output.samples],
        sampled_token_ids=(lowest + (rows + output.step_id) % 2).astype(np.int32)[:, None],
    )
