"""In what order requests go on whose remote KV has come, or has not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_rig import RemoteConnector, draw

from pdcore import (
    FCFS,
    KVCacheManager,
    Limits,
    LRUBlockPool,
    Priority,
    Request,
    SamplingParams,
    SchedulingPolicy,
    UnifiedScheduler,
    VirtualClock,
)
from pdcore.connector.base import ConnectorEvents
from pdcore.messages import LoadFailure, TransferKey

NAMES = ["a", "b", "c", "d", "e"]


def order_of_starts(scheduler: UnifiedScheduler) -> list[str]:
    """Who gets the only row, one after the other."""
    names = []
    while scheduler.has_requests():
        output = scheduler.schedule()
        names += [new.request_id for new in output.scheduled_new_reqs]
        scheduler.update_from_output(output, draw(output))
    return names


@pytest.mark.parametrize("policy", [FCFS(), Priority()])
@given(st.permutations(NAMES), st.sets(st.sampled_from(NAMES)))
def test_requests_go_on_in_the_order_of_their_queue_not_of_their_loads(
    policy: SchedulingPolicy, order: list[str], lost: set[str]
) -> None:
    """Those whose KV has come hold blocks and go first; those that compute it anew go behind."""
    connector = RemoteConnector()
    scheduler = UnifiedScheduler(
        KVCacheManager(LRUBlockPool(33, 4)),
        policy=policy,
        limits=Limits(max_num_seqs=1, max_num_batched_tokens=16, max_model_len=64),
        connector=connector,
        clock=VirtualClock(),
    )
    transfers = {}
    for place, name in enumerate(NAMES):
        request = Request(
            name,
            range(10 * place, 10 * place + 10),
            sampling=SamplingParams(max_tokens=2),
            priority=-place,
            kv_transfer_params={"load": "async"},
        )
        transfers[name] = TransferKey(scheduler.add_request(request).uid, attempt=1)
    scheduler.update_from_output(output := scheduler.schedule(), draw(output))
    assert scheduler.stats().num_parked == len(NAMES)
    connector.events = ConnectorEvents(
        finished_recving=tuple(transfers[name] for name in order if name not in lost),
        failed=tuple(
            LoadFailure(transfer=transfers[name], num_valid_tokens=0, cause="lost")
            for name in order
            if name in lost
        ),
    )
    queue = NAMES if isinstance(policy, FCFS) else NAMES[::-1]
    expected = [name for name in queue if name not in lost]
    assert order_of_starts(scheduler) == expected + [name for name in queue if name in lost]
