"""`NullConnector`: the least that a connector must do."""

from __future__ import annotations

import numpy as np

from pdcore.connector import (
    ConnectorEvents,
    ExternalMatch,
    FinishedBlocks,
    KVCaches,
    KVLoad,
    NullConnector,
)
from pdcore.messages import TransferKey, TransferReport
from pdcore.request import FinishReason, Request


def test_its_scheduler_side_brings_and_keeps_nothing():
    """No match, no orders, no hand-over, no events."""
    half = NullConnector().scheduler_side()
    request = Request("r", [1, 2, 3], kv_transfer_params={"do_remote_decode": True})
    ids = np.array([1], dtype=np.int32)
    key = TransferKey(1, 1)
    load = KVLoad(
        transfer=key,
        request=request,
        num_local_tokens=0,
        num_external_tokens=2,
        block_ids=ids,
        deadline=1.0,
    )
    blocks = FinishedBlocks(
        block_ids=ids,
        generations=np.ones(1, dtype=np.int64),
        num_tokens=3,
        finish_reason=FinishReason.LENGTH,
    )
    half.request_added(request, 1)
    assert half.get_num_new_matched_tokens(request, 0) == ExternalMatch(num_tokens=0)
    half.update_state_after_alloc(request, load)
    half.undo_alloc(request, load)
    half.cancel(key)
    assert half.request_finished(request, 1, blocks) is None
    assert half.take_events() == ConnectorEvents()
    assert (half.next_wakeup(), half.has_pending()) == (None, False)
    half.close()


def test_its_worker_side_reports_nothing():
    """Caches are taken, orders ignored, and every report is empty."""
    half = NullConnector().worker_side()
    buffer = np.zeros((2, 4), dtype=np.uint64)
    half.register_kv_caches(KVCaches(buffer=buffer, bytes_per_block=32, fingerprint="f"))
    half.start_load_kv(None)
    assert half.get_finished() == TransferReport()
    half.close()
