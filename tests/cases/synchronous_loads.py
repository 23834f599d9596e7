"""Loads that are done when their step begins, so that nobody waits for them."""

from __future__ import annotations

from typing import Any

import attrs
from harness import Engine
from pd_pair import BLOCK_SIZE, Pair

from pdcore.connector.base import (
    ExternalMatch,
    KVConnector,
    SchedulerConnector,
    WorkerConnector,
)
from pdcore.connector.loopback import LoopbackConnector
from pdcore.messages import TransferReport


class SynchronousWorker(WorkerConnector):
    """Has each load done when `start_load_kv` returns; some it cannot do."""

    def __init__(self, inner: WorkerConnector, num_broken: int) -> None:
        self._inner = inner
        self._num_broken = num_broken
        self._report = TransferReport()

    def register_kv_caches(self, caches: Any) -> None:
        self._inner.register_kv_caches(caches)

    def start_load_kv(self, meta: Any) -> None:
        if meta.loads and self._num_broken:
            self._num_broken -= 1
            raise OSError("the store is gone")
        self._inner.start_load_kv(meta)
        self._report = self._inner.get_finished()

    def get_finished(self) -> TransferReport:
        report, self._report = self._report, TransferReport()
        return report


class Synchronous(KVConnector):
    """A loopback connector for whose loads nobody waits."""

    def __init__(self, inner: LoopbackConnector, num_broken: int = 0) -> None:
        self._inner = inner
        self._num_broken = num_broken

    def scheduler_side(self) -> SchedulerConnector:
        side = self._inner.scheduler_side()
        find = side.get_num_new_matched_tokens

        def find_at_once(request: Any, num_local_tokens: int) -> ExternalMatch:
            return attrs.evolve(find(request, num_local_tokens), is_async=False)

        side.get_num_new_matched_tokens = find_at_once  # type: ignore[method-assign]
        return side

    def worker_side(self, rank: int = 0) -> SynchronousWorker:
        return SynchronousWorker(self._inner.worker_side(rank), self._num_broken)


def synchronous_pair(num_broken: int = 0, **options: Any) -> tuple[Pair, Engine]:
    """A pair, and a second decode engine that loads at once."""
    pair = Pair()
    loopback = LoopbackConnector(pair.fabric, engine_id="sync", block_size=BLOCK_SIZE)
    connector = Synchronous(loopback, num_broken)
    return pair, Engine(connector=connector, clock=pair.clock, block_size=BLOCK_SIZE, **options)


def run_through_failures(engine: Engine) -> int:
    """Run as a loop does that takes back what failed; return how many steps did."""
    num_failed = 0
    while engine.scheduler.has_requests():
        output = engine.schedule()
        try:
            engine.execute(output)
        except OSError:
            engine.scheduler.abandon(output, dispatched=True)
            engine.scheduler.check()
            num_failed += 1
            assert num_failed < 50, "the same step fails for ever"
            continue
        engine.land()
        engine._sleep()
    return num_failed
