"""A decode engine whose model takes a fixed time a step, and whose KV is real."""

from __future__ import annotations

import time
from typing import Any

import attrs
import numpy as np
from kv_engine import BLOCK_SIZE, KVShape, expected_words

from pdcore.clock import MonotonicClock
from pdcore.connector.base import KVCaches, WorkerConnector
from pdcore.connector.nixl import NixlConfig, NixlConnector
from pdcore.kvcache import KVCacheConfig, KVCacheManager, KVCacheSpec, LRUBlockPool
from pdcore.loop import Waker, step, wait
from pdcore.messages import GrammarBitmask, ModelRunnerOutput, NewRequestData, SchedulerOutput
from pdcore.request import Request
from pdcore.runner.base import ModelRunner, poll_connector
from pdcore.runner.executor import InProcessExecutor
from pdcore.scheduler import Limits, SkipCode, UnifiedScheduler

__all__ = ["Device", "PacedEngine", "Tick"]


@attrs.frozen(kw_only=True)
class Device:
    """What a step costs.

    Args:
        step_s: seconds that it takes while this processor has nothing to do with it, as when the
            model runs on an accelerator.
        weights: read once in every step by this processor, as when the model runs on it; or None.
    """

    step_s: float = 0.0
    weights: np.ndarray[Any, np.dtype[np.float32]] | None = None

    def run(self) -> None:
        """One step."""
        if self.weights is not None:
            self.weights.sum()
        if self.step_s:
            time.sleep(self.step_s)


class _PacedRunner(ModelRunner):
    """Draws the same token for every row, and checks the words of every block that was loaded."""

    def __init__(self, device: Device, connector: WorkerConnector, num_blocks: int) -> None:
        shape = KVShape(itemsize=4)
        self._device = device
        self._connector = connector
        self._buffer = np.ones((num_blocks, shape.bytes_per_block // 8), np.uint64)
        self._spec = KVCacheSpec(
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=BLOCK_SIZE,
            dtype="float32",
        )
        self._plan: SchedulerOutput | None = None
        self.sources: dict[str, list[int]] = {}
        self.busy: list[tuple[float, float]] = []

    def get_kv_cache_spec(self) -> KVCacheSpec:
        return self._spec

    def determine_available_memory(self) -> int:
        return self._buffer.nbytes

    def initialize_from_config(self, config: KVCacheConfig) -> None:
        self._connector.register_kv_caches(
            KVCaches(
                buffer=self._buffer,
                bytes_per_block=self._spec.bytes_per_block,
                fingerprint="smollm2",
            )
        )

    def execute_model(self, output: SchedulerOutput) -> None:
        self._plan = output
        if output.connector_meta is not None:
            self._connector.start_load_kv(output.connector_meta)
        for new in output.scheduled_new_reqs:
            self._check(new)
        if output.rows.size:
            began = time.monotonic()
            self._device.run()
            self.busy.append((began, time.monotonic()))

    def sample_tokens(self, bitmask: GrammarBitmask | None) -> ModelRunnerOutput:
        assert self._plan is not None
        rows = self._plan.rows[self._plan.samples]
        return ModelRunnerOutput(
            rows=rows,
            epochs=self._plan.epochs[self._plan.samples],
            sampled_token_ids=np.ones((rows.size, 1), np.int32),
            transfer_report=poll_connector(self._connector),
        )

    def close(self) -> None:
        self._connector.close()

    def _check(self, new: NewRequestData) -> None:
        sources = self.sources.get(new.request_id)
        if sources is None:
            return
        num_blocks = new.num_computed_tokens // BLOCK_SIZE
        ends = self._buffer[new.block_ids[:num_blocks, None], [0, -1]]
        wanted = expected_words(np.array(sources[:num_blocks], np.int32))[:, None]
        if num_blocks != len(sources) - 1 or not (ends == wanted).all():
            raise RuntimeError(f"the KV of {new.request_id} is not what its ticket promised")


@attrs.frozen
class Tick:
    """One turn of the loop.

    Args:
        began, ended: seconds on the monotonic clock.
        num_tokens: how many it produced for requests that are watched.
        is_short_of_blocks: whether a request waits because the pool has no room for it.
        num_used_blocks: of the pool, afterwards.
    """

    began: float
    ended: float
    num_tokens: int
    is_short_of_blocks: bool
    num_used_blocks: int


class PacedEngine:
    """Scheduler, pool, connector and runner of a decode engine, and its loop.

    Args:
        device: what a step costs.
        num_blocks: of the pool.
        max_num_seqs: how many requests decode at once.
    """

    def __init__(self, device: Device, *, num_blocks: int, max_num_seqs: int) -> None:
        connector = NixlConnector(NixlConfig(block_size=BLOCK_SIZE))
        worker = connector.worker_side()
        self.runner = _PacedRunner(device, worker, num_blocks)
        self._executor = InProcessExecutor(lambda: self.runner, num_blocks=num_blocks)
        self._executor.start()
        self._connector = connector.scheduler_side()
        self._waker, clock = Waker(), MonotonicClock()
        self._connector.start(clock=clock, notify=self._waker)
        self._connector.set_xfer_handshake_metadata([worker.get_handshake_metadata()])
        self._pool = LRUBlockPool(num_blocks, BLOCK_SIZE)
        self.scheduler = UnifiedScheduler(
            KVCacheManager(self._pool),
            limits=Limits(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=64,
                max_model_len=BLOCK_SIZE * num_blocks,
            ),
            connector=self._connector,
            clock=clock,
        )
        self.waiting: set[str] = set()
        self.ticks: list[Tick] = []

    def add(self, request: Request) -> None:
        """Queue a request."""
        if request.kv_transfer_params is not None:
            sources = request.kv_transfer_params["block_ids"]
            self.runner.sources[request.request_id] = sources
        self.waiting.add(request.request_id)
        self.scheduler.add_request(request)

    def turn(self, *, watched: str = "") -> None:
        """One turn of the loop: sleep if there is nothing to do, then a step."""
        began = time.monotonic()
        wait(self.scheduler, self._waker, clock=self.scheduler.clock, max_wait_s=0.005)
        result = step(self.scheduler, self._executor)
        num_tokens = 0
        for output in result.outputs:
            if output.request_id.startswith(watched):
                num_tokens += len(output.new_token_ids)
            if output.finish_reason is not None:
                self.waiting.discard(output.request_id)
        is_short = any(
            self.scheduler.explain(name).code is SkipCode.NO_BLOCKS for name in self.waiting
        )
        num_used = self._pool.num_usable_blocks - self._pool.num_free_blocks
        self.ticks.append(Tick(began, time.monotonic(), num_tokens, is_short, num_used))

    def reads(self) -> list[tuple[float, float, int]]:
        """Begin, end and bytes of every load that was read."""
        transfers = self.scheduler.stats().connector.transfers
        return [(t.started_at, t.ended_at, t.num_bytes) for t in transfers]

    def close(self) -> None:
        """Stop every thread."""
        self._executor.close()
        self._connector.close()
