"""One request between two engines of a loopback connector: what its protocol costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from kv_engine import BLOCK_SIZE, EMPTY_PLAN, prompt_of

from pdcore.clock import MonotonicClock
from pdcore.connector.base import FinishedBlocks, KVCaches, KVLoad
from pdcore.connector.loopback import LoopbackConnector, LoopbackFabric
from pdcore.messages import TransferKey
from pdcore.request import FinishReason, Request, SamplingParams

__all__ = ["loopback_request"]

_WORDS = 512


def loopback_request() -> Callable[[], dict[str, float]]:
    """Make two engines; return what runs one request of one block and says what it took."""
    fabric = LoopbackFabric(clock=MonotonicClock())
    ids = np.array([1], np.int32)
    halves = []
    for name in ("P", "D"):
        connector = LoopbackConnector(fabric, engine_id=name, block_size=BLOCK_SIZE)
        scheduler, worker = connector.scheduler_side(), connector.worker_side()
        buffer = np.ones((4, _WORDS), np.uint64)
        worker.register_kv_caches(
            KVCaches(buffer=buffer, bytes_per_block=8 * _WORDS, fingerprint="f")
        )
        scheduler.start(clock=fabric.clock, notify=lambda: None)
        halves.append((scheduler, worker))
    (giver, _), (taker, reader) = halves
    num_requests = 0

    def run() -> dict[str, float]:
        nonlocal num_requests
        num_requests += 1
        began = time.perf_counter()
        request = _request(num_requests, {"do_remote_decode": True})
        giver.request_added(request, num_requests)
        handed = giver.request_finished(request, num_requests, _blocks(ids, 1))
        assert handed is not None
        request = _request(num_requests, handed.kv_transfer_params)
        taker.request_added(request, num_requests)
        match = taker.get_num_new_matched_tokens(request, 0)
        assert match is not None
        load = KVLoad(
            transfer=TransferKey(num_requests, 0),
            request=request,
            num_local_tokens=0,
            num_external_tokens=match.num_tokens,
            block_ids=ids,
            deadline=fabric.clock.now() + 60.0,
        )
        taker.update_state_after_alloc(request, load)
        reader.start_load_kv(taker.build_connector_meta(EMPTY_PLAN))
        taker.update_connector_output(reader.get_finished())
        if taker.take_events().finished_recving != (load.transfer,):
            raise RuntimeError("the load did not end at once")
        taker.request_finished(request, num_requests, _blocks(ids[:0], 0))
        giver.take_events()
        return {"request": 1e3 * (time.perf_counter() - began)}

    return run


def _request(number: int, params: dict[str, Any] | None) -> Request:
    return Request(
        f"r{number}",
        prompt_of(1),
        sampling=SamplingParams(max_tokens=1),
        kv_transfer_params=params,
    )


def _blocks(ids: Any, num_blocks: int) -> FinishedBlocks:
    return FinishedBlocks(
        block_ids=ids,
        generations=np.ones(num_blocks, np.int64),
        num_tokens=num_blocks * BLOCK_SIZE,
        finish_reason=FinishReason.LENGTH,
    )
