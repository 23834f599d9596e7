"""A decode engine's loads: ordered, vouched for, called off, reported."""

from __future__ import annotations

import pickle

import pytest
from nixl_engines import until
from nixl_halves import Half, decode_request, sent_by

from pdcore.connector.nixl import NixlConfig, NixlConnector
from pdcore.request import FinishReason


def test_a_load_is_reported_only_after_the_peer_vouched(
    prefill: Half, decode: Half, notices: list[str]
) -> None:
    """Data that arrived is not enough: the load is finished once P accepted, and P is free."""
    ticket = prefill.ticket()
    request = decode_request(ticket)
    uid = decode.add(request)
    load = decode.load(request, uid)
    meta = decode.plan_with_read()
    assert decode.received == []
    decode.workers_say(finished=load)
    decode.until_event()
    assert (decode.received, decode.failed) == ([load.transfer], [])
    until(lambda: sent_by(prefill) == [ticket["transfer_id"]])
    (task,) = meta.reads
    assert task.remote_block_ids.tolist() == [10, 11, 12, 13]
    assert task.local_block_ids.tolist() == [1, 2, 3, 4]
    assert decode.match(request) == 0
    decode.end(request, uid, FinishReason.LENGTH)
    assert decode.num_notices > 0
    assert notices == []
    assert not decode.connector.has_pending()


@pytest.mark.parametrize(("num_local", "expected"), [(0, 13), (4, 9), (12, 1)])
def test_the_last_prompt_token_is_computed_here(
    prefill: Half, decode: Half, num_local: int, expected: int
) -> None:
    """A ticket for all 14 tokens brings those up to the 13th, and only what is not here."""
    request = decode_request(prefill.ticket())
    uid = decode.add(request)
    assert decode.match(request, num_local) == expected
    assert decode.match(request, num_local) == expected
    decode.load(request, uid, num_local=num_local)
    (task,) = decode.plan_with_read().reads
    first = num_local // 4
    assert task.remote_block_ids.tolist() == [10, 11, 12, 13][first:]
    assert task.local_block_ids.tolist() == [1, 2, 3, 4][: 4 - first]


def test_a_worker_failure_may_be_tried_again(prefill: Half, decode: Half) -> None:
    """A read that broke leaves the ticket good: a second attempt can use it."""
    request = decode_request(prefill.ticket())
    uid = decode.add(request)
    load = decode.load(request, uid)
    decode.plan_with_read()
    decode.workers_say(failed=load)
    decode.until_event()
    assert [failure.cause for failure in decode.failed] == ["the wire broke"]
    again = decode.load(request, uid, attempt=1)
    decode.plan_with_read()
    decode.workers_say(finished=load)
    decode.workers_say(finished=again)
    until(lambda: decode.take_events() or decode.received)
    assert decode.received == [again.transfer]


def test_a_cancelled_load_ends_when_the_worker_says_so(
    prefill: Half, decode: Half, notices: list[str]
) -> None:
    """After an abort while reading, the load is reported when it is quiet, and P is told then."""
    ticket = prefill.ticket()
    request = decode_request(ticket)
    uid = decode.add(request)
    load = decode.load(request, uid)
    decode.plan_with_read()
    decode.connector.cancel(load.transfer)
    decode.end(request, uid)
    meta = decode.plan()
    assert meta is not None
    assert meta.cancels == (load.transfer,)
    assert decode.connector.has_pending()
    assert (decode.received, decode.failed, sent_by(prefill)) == ([], [], [])
    decode.workers_say(finished=load)
    decode.take_events()
    assert decode.received == [load.transfer]
    until(lambda: sent_by(prefill) == [ticket["transfer_id"]])
    assert not decode.connector.has_pending()
    decode.connector.close()
    assert notices == [ticket["transfer_id"]]


def test_a_load_cancelled_before_it_began_ends_at_once(prefill: Half, decode: Half) -> None:
    """A load that no worker knows of is reported without one."""
    request = decode_request(prefill.ticket())
    uid = decode.add(request)
    load = decode.load(request, uid)
    decode.connector.cancel(load.transfer)
    decode.take_events()
    assert [failure.transfer for failure in decode.failed] == [load.transfer]
    assert decode.plan() is None


def test_cut_off_names_the_peer(prefill: Half, decode: Half) -> None:
    """Cutting off a load that does not end orders the workers to drop its peer."""
    request = decode_request(prefill.ticket())
    load = decode.load(request, decode.add(request))
    (task,) = decode.plan_with_read().reads
    decode.connector.cancel(load.transfer)
    decode.connector.cut_off(load.transfer)
    meta = decode.plan()
    assert meta is not None
    assert [order.peer_id for order in meta.cut_offs] == [task.peer.peer_id]


def test_workers_are_asked_while_they_read(prefill: Half, decode: Half) -> None:
    """While a read runs every plan asks the workers, and the connector wants to be woken."""
    request = decode_request(prefill.ticket())
    load = decode.load(request, decode.add(request))
    assert decode.plan_with_read() is not None
    assert decode.plan() is not None
    assert decode.connector.next_wakeup() is not None
    decode.workers_say(finished=load)
    decode.until_event()
    assert decode.plan() is None
    assert decode.connector.next_wakeup() is None


def test_an_abandoned_plan_gives_its_read_again(prefill: Half, decode: Half) -> None:
    """A read whose plan was lost rides in the next one; an undone one does not."""
    request = decode_request(prefill.ticket())
    uid = decode.add(request)
    load = decode.load(request, uid)
    meta = decode.plan_with_read()
    decode.connector.rebuild_connector_meta(meta)
    again = decode.plan_with_read()
    assert [task.transfer for task in again.reads] == [load.transfer]
    decode.connector.undo_alloc(request, load)
    decode.connector.rebuild_connector_meta(again)
    assert decode.plan() is None
    assert decode.match(request) == 13
    decode.load(request, uid, attempt=1)
    assert decode.plan_with_read().reads[0].transfer == (uid, 1)


def test_ends_that_may_be_lost_are_said_again(prefill: Half, decode: Half) -> None:
    """After a step that failed, until the workers have answered: a read to cancel, a peer to cut
    off. The read itself is not begun again."""
    request = decode_request(prefill.ticket())
    load = decode.load(request, decode.add(request))
    reading = decode.plan_with_read()
    decode.connector.cancel(load.transfer)
    decode.connector.cut_off(load.transfer)
    decode.connector.step_failed(reading)
    meta = decode.plan()
    assert meta is not None
    decode.connector.step_failed(meta)
    again = decode.plan()
    assert again is not None
    assert again.reads == ()
    assert set(again.cancels) == {load.transfer}
    assert again.cut_offs == meta.cut_offs
    decode.workers_say(finished=load)
    decode.until_event()
    decode.connector.step_failed(again)
    assert decode.plan() is None


def test_a_read_whose_step_failed_ends_and_is_not_begun_twice(prefill: Half, decode: Half) -> None:
    """The workers may have missed it, though its request has waited since an earlier step."""
    request = decode_request(prefill.ticket())
    load = decode.load(request, decode.add(request))
    reading = decode.plan_with_read()
    decode.connector.step_failed(reading)
    meta = decode.plan()
    assert meta is not None
    assert (meta.reads, set(meta.cancels)) == ((), {load.transfer})
    decode.workers_say(failed=load)
    decode.until_event()
    assert [failure.transfer for failure in decode.failed] == [load.transfer]
    decode.connector.step_failed(reading)
    assert decode.plan() is None


def test_orders_are_picklable(prefill: Half, decode: Half) -> None:
    """What the workers hear can travel to another process, and so can the factory."""
    request = decode_request(prefill.ticket())
    decode.load(request, decode.add(request))
    meta = decode.plan_with_read()
    (task,) = pickle.loads(pickle.dumps(meta)).reads
    assert task.peer == meta.reads[0].peer
    connector = NixlConnector(NixlConfig(block_size=4))
    assert pickle.loads(pickle.dumps(connector)).config == connector.config


def test_explain_names_the_peer(prefill: Half, decode: Half) -> None:
    """A parked request can say what it waits for and from whom."""
    ticket = prefill.ticket()
    request = decode_request(ticket)
    uid = decode.add(request)
    assert decode.connector.explain(request) is None
    decode.load(request, uid)
    decode.plan_with_read()
    assert decode.connector.explain(request) == (
        f"KV of 13 tokens from engine {ticket['engine_id'][:16]} at "
        f"127.0.0.1:{ticket['port']}, which is being read"
    )


def test_late_and_repeated_reports_are_ignored(prefill: Half, decode: Half) -> None:
    """A report that comes again, or about nothing known, changes nothing."""
    request = decode_request(prefill.ticket())
    load = decode.load(request, decode.add(request))
    decode.plan_with_read()
    for _ in range(3):
        decode.workers_say(finished=load)
    decode.until_event()
    decode.workers_say(finished=load)
    decode.workers_say(failed=load)
    decode.take_events()
    assert (decode.received, decode.failed) == ([load.transfer], [])
