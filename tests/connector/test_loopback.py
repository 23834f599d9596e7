"""`LoopbackConnector` over a good wire: what is copied, what is not, and how long it is kept."""

from __future__ import annotations

import pytest
from loopback_engines import (
    LEASE_S,
    PROMPT,
    Engine,
    Halves,
    make_pair,
    solo,
)

from pdcore.connector.loopback import LoopbackFaults
from pdcore.connector.ticket_contents import prompt_digest
from pdcore.messages import TransferKey
from pdcore.request import Request, SamplingParams

# A good wire.


def test_a_handed_over_prompt_is_not_computed_again():
    """All but the last prompt token come from the peer, and the peer's blocks are let go."""
    prefill, decode, _ = make_pair()
    params = prefill.prefill()
    assert prefill.num_held == 1
    assert decode.decode(params) == solo(decode)
    assert decode.num_external_tokens == len(PROMPT) - 1
    prefill.step()
    assert prefill.num_held == 0
    assert not prefill.scheduler.has_requests()


def test_only_what_is_missing_is_loaded():
    """Blocks that the decode engine has are not asked for; the rest goes by position."""
    prefill, decode, _ = make_pair()
    first, second = PROMPT[:9], PROMPT
    decode.decode(prefill.prefill(first), first)
    before = decode.num_external_tokens
    assert decode.decode(prefill.prefill(second), second) == solo(decode)
    assert decode.num_external_tokens - before == len(second) - 1 - 8


def test_a_prompt_that_is_all_here_costs_one_notice():
    """Nothing is loaded, and the peer hears at once that its blocks may go."""
    prefill, decode, _ = make_pair()
    short = PROMPT[:9]
    decode.decode(prefill.prefill(short), short)
    before = decode.num_external_tokens
    params = prefill.prefill(short, name="again")
    decode.add(params, short)
    decode.step()
    prefill.step()
    assert decode.num_external_tokens == before
    assert prefill.num_held == 0


def test_the_blocks_are_copied_bit_by_bit():
    """The decode engine's blocks hold what the prefill engine computed."""
    prefill, decode, _ = make_pair()
    params = prefill.prefill()
    decode.add(params)
    decode.step(2)
    source = prefill.runner.kv_caches.buffer[list(params["block_ids"])]
    target = decode.runner.kv_caches.buffer
    assert all(block.tolist() in target.tolist() for block in source[:4])


def test_torch_tensors_are_copied_as_well():
    """A KV memory may be a tensor."""
    torch = pytest.importorskip("torch")
    source, target = torch.arange(24.0).reshape(6, 2, 2), torch.zeros(6, 2, 2)
    halves = Halves([source, target])
    halves.allocate(1)
    halves.worker.start_load_kv(halves.build())
    assert halves.worker.get_finished().finished_recving == (TransferKey(1, 1),)
    assert torch.equal(target[[1, 5]], source[[4, 2]])


def test_reordered_reports_come_newest_first():
    """Loads that end with the same poll are reported the other way round."""
    halves = Halves(faults=LoopbackFaults(delay_polls=1, reorder=True))
    for uid in (1, 2, 3):
        halves.allocate(uid)
    halves.worker.start_load_kv(halves.build())
    assert not halves.worker.get_finished()
    assert [key.uid for key in halves.worker.get_finished().finished_recving] == [3, 2, 1]


def test_the_last_prompt_token_is_never_brought():
    """A peer may have the whole prompt; one token is left to compute. Asking changes nothing."""
    halves = Halves()
    request, _ = halves.allocate(1)
    assert request.kv_transfer_params is not None
    params = request.kv_transfer_params | {
        "prompt_digest": prompt_digest(Request("s", [1, 2, 3, 4]))
    }
    short = Request("s", [1, 2, 3, 4], kv_transfer_params=params)
    halves.scheduler.request_added(short, 2)
    for _ in range(2):
        assert halves.scheduler.get_num_new_matched_tokens(short, 0).num_tokens == 3
        assert halves.scheduler.get_num_new_matched_tokens(short, 2).num_tokens == 1
        assert halves.scheduler.get_num_new_matched_tokens(short, 4).num_tokens == 0


@pytest.mark.parametrize("was_built", [False, True])
def test_an_undone_load_is_never_ordered(was_built: bool):
    """Before the metadata was made or after, an undone load is forgotten; others are not."""
    halves = Halves()
    request, undone = halves.allocate(1)
    halves.allocate(2)
    meta = halves.build() if was_built else None
    halves.scheduler.undo_alloc(request, undone)
    if meta is not None:
        halves.scheduler.rebuild_connector_meta(meta)
    again = halves.build()
    assert again is not None
    assert [order.load.transfer.uid for order in again.loads] == [2]


def test_a_load_that_never_left_is_cancelled_at_once():
    """It is reported as failed without the worker's help."""
    halves = Halves()
    _, load = halves.allocate(1)
    halves.scheduler.cancel(load.transfer)
    assert [failure.transfer for failure in halves.scheduler.take_events().failed] == [
        load.transfer
    ]
    assert halves.build() is None


def test_an_order_is_due_until_a_plan_carries_it():
    """The loop makes the next step at once, also after a plan was lost; then it may sleep."""
    halves = Halves()
    _, load = halves.allocate(1)
    for order in (lambda: None, lambda: halves.scheduler.cancel(load.transfer)):
        order()
        assert halves.scheduler.next_wakeup() == 0.0
        meta = halves.build()
        assert meta is not None
        assert halves.scheduler.next_wakeup() == 4.5  # Half a lease: the next renewal.
        halves.scheduler.rebuild_connector_meta(meta)
        assert halves.scheduler.next_wakeup() == 0.0
        assert halves.build() is not None


def test_a_load_and_its_cancellation_may_both_be_lost() -> None:
    """Each with a step that failed: the load is called off again, and its blocks come back."""
    prefill, decode, _ = make_pair()
    decode.add(prefill.prefill())
    scheduler = decode.scheduler
    loading = scheduler.schedule()
    scheduler.abort_requests(["r"])
    scheduler.abandon(loading, dispatched=True)
    for _ in range(2):
        scheduler.abandon(scheduler.schedule(), dispatched=True)
    decode.step()
    decode.step()
    assert scheduler.stats().num_quarantined_blocks == 0
    assert not scheduler.has_requests()


def test_a_prefill_without_a_hand_over_keeps_nothing():
    """A request that asked for nothing, or was aborted, leaves no hold."""
    prefill, _, _ = make_pair()
    prefill.driver.add(Request("plain", PROMPT, sampling=SamplingParams(max_tokens=1)))
    params = {"do_remote_decode": True}
    prefill.driver.add(Request("gone", PROMPT, kv_transfer_params=params))
    prefill.step()
    prefill.driver.abort(["gone"])
    ends = prefill.driver.run()
    assert [end.end.kv_transfer_params for end in ends.values() if end.end] == [None, None]
    assert prefill.num_held == 0


# Leases.


def test_an_unread_hand_over_ends_with_its_lease():
    """A peer that never comes costs the lease and no more; the engine knows when to look."""
    prefill, _, fabric = make_pair()
    prefill.prefill()
    assert prefill.scheduler.next_wakeup() == LEASE_S
    fabric.clock.advance(LEASE_S)  # type: ignore[attr-defined]
    prefill.step()
    assert prefill.num_held == 0


def test_a_waiting_decode_engine_renews_the_lease():
    """A load that takes longer than the lease is accepted all the same."""
    prefill, decode, _ = make_pair(LoopbackFaults(delay_s=50.0))
    params = prefill.prefill()
    assert decode.decode(params) == solo(decode)
    assert decode.num_external_tokens == len(PROMPT) - 1


def test_data_from_a_lapsed_lease_is_not_used():
    """A ticket that ran out before anybody read is refused, and the prompt is computed."""
    prefill, decode, fabric = make_pair()
    params = prefill.prefill()
    fabric.clock.advance(LEASE_S)  # type: ignore[attr-defined]
    assert decode.decode(params) == solo(decode)
    assert decode.num_external_tokens == 0


def test_a_hand_over_is_read_once():
    """Who comes second gets nothing, and computes."""
    prefill, decode, fabric = make_pair()
    other = Engine(fabric, "d2")
    params = prefill.prefill()
    assert decode.decode(params) == solo(decode)
    assert other.decode(params) == solo(decode)
    assert other.num_external_tokens == 0
