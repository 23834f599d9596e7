"""Puts the library's parts together into one engine."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from pd.messages import EngineSettings
from pd.tracing import TracedRunner, TracedScheduler
from pdcore.clock import MonotonicClock
from pdcore.connector.base import SchedulerConnector
from pdcore.connector.nixl import NixlConfig, NixlConnector
from pdcore.connector.nixl.worker_side import NixlWorkerConnector
from pdcore.kvcache.manager import KVCacheManager
from pdcore.kvcache.pool import LRUBlockPool
from pdcore.runner.executor.inprocess import InProcessExecutor
from pdcore.scheduler.base import Limits
from pdcore.trace import Tracer

__all__ = ["Parts", "assemble"]

_BLOCK_SIZE = 16


@attrs.frozen(kw_only=True, eq=False)
class Parts:
    """An engine without its loop.

    Args:
        scheduler, executor: what the loop drives.
        runner: the executor's runner, for what it recorded.
        connector: the scheduler's half, or None.
        dtype, num_blocks, bytes_per_block: of the KV cache.
    """

    scheduler: TracedScheduler
    executor: InProcessExecutor
    runner: TracedRunner
    connector: SchedulerConnector | None
    dtype: str
    num_blocks: int
    bytes_per_block: int

    def close(self) -> None:
        """Stop every thread and free the model."""
        if self.connector is not None:
            self.connector.close()
        self.executor.close()


def assemble(settings: EngineSettings, tracer: Tracer, notify: Callable[[], None]) -> Parts:
    """Build and start the parts of an engine.

    Args:
        settings: what to build.
        tracer: records what they do.
        notify: wakes the loop; called from the connector's threads.
    """
    limits = Limits(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len,
        load_timeout_s=settings.load_timeout_s,
        on_load_failure="recompute",
    )
    connector = _make_connector(settings)
    worker_half = None if connector is None else connector.worker_side()
    runners: list[TracedRunner] = []
    executor = InProcessExecutor(
        lambda: _make_runner(settings, limits, tracer, worker_half, runners),
        num_blocks=settings.num_blocks,
    )
    executor.start()
    try:
        spec = executor.kv_cache_config.spec
        pool = LRUBlockPool(settings.num_blocks, spec.block_size)
        scheduler_half = None if connector is None else connector.scheduler_side()
        if scheduler_half is not None and worker_half is not None:
            scheduler_half.start(clock=MonotonicClock(), notify=notify)
            scheduler_half.set_xfer_handshake_metadata([worker_half.get_handshake_metadata()])
        return Parts(
            scheduler=TracedScheduler(
                tracer, pool, KVCacheManager(pool), limits=limits, connector=scheduler_half
            ),
            executor=executor,
            runner=runners[0],
            connector=scheduler_half,
            dtype=spec.dtype,
            num_blocks=settings.num_blocks,
            bytes_per_block=spec.bytes_per_block,
        )
    except BaseException:
        executor.close()
        raise


def _make_connector(settings: EngineSettings) -> NixlConnector | None:
    if not settings.has_connector:
        return None
    return NixlConnector(
        NixlConfig(block_size=_BLOCK_SIZE, key=settings.key, lease_s=settings.lease_s)
    )


def _make_runner(
    settings: EngineSettings,
    limits: Limits,
    tracer: Tracer,
    connector: NixlWorkerConnector | None,
    runners: list[TracedRunner],
) -> TracedRunner:
    runner = TracedRunner(
        tracer,
        settings.model,
        limits=limits,
        device=settings.device,
        dtype=settings.dtype,
        block_size=_BLOCK_SIZE,
        num_threads=settings.num_threads,
        keep_logits=settings.keeps_candidates,
        connector=connector,
    )
    runners.append(runner)
    return runner
