"""What the tests of the loops share: a scheduler, requests, and a pipe of plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdcore import KVCacheManager, Limits, LRUBlockPool, Request, SamplingParams, UnifiedScheduler
from pdcore.connector.base import KVConnector
from pdcore.kvcache import KVCacheConfig
from pdcore.loop import BatchQueue
from pdcore.messages import StepResult
from pdcore.testing import FakeKVRunner
from simulated_executors import SimulatedExecutor, Trouble

BLOCK_SIZE, NUM_BLOCKS = 4, 32


def make_scheduler(**kwargs: object) -> UnifiedScheduler:
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=100)
    return UnifiedScheduler(
        KVCacheManager(LRUBlockPool(NUM_BLOCKS, BLOCK_SIZE)), limits=limits, **kwargs
    )


def make_requests(num_requests: int = 3, *, max_tokens: int = 5) -> list[Request]:
    sampling = SamplingParams(max_tokens=max_tokens)
    return [Request(f"r{i}", range(1, 12 + i), sampling=sampling) for i in range(num_requests)]


class QueueRig:
    """A batch queue over an executor that runs a call only when somebody waits for it."""

    def __init__(
        self,
        *,
        depth: int = 2,
        trouble: Trouble = lambda place: None,
        make_executor: Callable[..., SimulatedExecutor] = SimulatedExecutor,
        connector: KVConnector | None = None,
        **kwargs: Any,
    ) -> None:
        self.runner = FakeKVRunner(
            block_size=BLOCK_SIZE,
            connector=None if connector is None else connector.worker_side(),
        )
        spec = self.runner.get_kv_cache_spec()
        self.runner.initialize_from_config(KVCacheConfig(spec=spec, num_blocks=NUM_BLOCKS))
        side = None if connector is None else connector.scheduler_side()
        self.scheduler = make_scheduler(connector=side)
        self.executor = make_executor(self.runner, trouble=trouble)
        self.queue = BatchQueue(self.scheduler, self.executor, depth=depth, **kwargs)
        self.requests: list[Request] = []
        self.tokens: dict[str, list[int]] = {}

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add_request(request)
            self.requests.append(request)
            self.tokens[request.request_id] = []

    def take(self, result: StepResult) -> None:
        self.scheduler.check()
        for output in result.outputs:
            self.tokens[output.request_id].extend(output.new_token_ids)

    def run(self) -> None:
        while self.scheduler.has_requests():
            self.take(self.queue.step())

    def check_solo(self) -> None:
        assert self.tokens == {r.request_id: self.runner.solo_tokens(r) for r in self.requests}
