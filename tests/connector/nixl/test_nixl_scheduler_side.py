"""The scheduler halves of a prefill and a decode engine, talking over a real side channel."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import pytest
from nixl_engines import an_empty_plan, until
from nixl_halves import PROMPT, Half, a_handshake, half

from pdcore.clock import VirtualClock
from pdcore.connector.nixl import NixlConfig, NixlConnector
from pdcore.connector.nixl.link import PeerLink
from pdcore.connector.nixl.protocol import Refusal
from pdcore.errors import AddressInUse, ConfigError, InvalidTransferParams
from pdcore.messages import NewRequestData
from pdcore.request import FinishReason, Request, SamplingParams


@pytest.fixture
def prefill() -> Iterator[Half]:
    """A prefill engine."""
    with half() as made:
        yield made


@pytest.fixture
def decode() -> Iterator[Half]:
    """A decode engine that loses patience soon."""
    with half(request_timeout_s=1.0) as made:
        yield made


def decode_request(params: dict[str, Any], prompt: list[int] = PROMPT) -> Request:
    """A request that brings a ticket."""
    return Request("d", prompt, kv_transfer_params=params)


def sent_by(prefill: Half) -> list[str]:
    """What the prefill engine was told may go, so far."""
    prefill.take_events()
    return prefill.sent


# The prefill engine.


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_stop_and_length_hand_over(prefill: Half, reason: FinishReason) -> None:
    """A prompt whose one token ended it either way leaves a ticket for all its tokens."""
    hand_over = prefill.hand_over(reason=reason)
    assert hand_over is not None
    assert hand_over.kv_transfer_params is not None
    assert hand_over.kv_transfer_params["num_tokens"] == len(PROMPT)
    assert hand_over.kv_transfer_params["block_ids"] == [10, 11, 12, 13]
    assert hand_over.kv_transfer_params["transfer_id"] == hand_over.transfer_id
    assert prefill.connector.has_pending()


@pytest.mark.parametrize(
    "reason",
    [FinishReason.ABORT, FinishReason.ERROR, FinishReason.TIMEOUT, FinishReason.CAPACITY],
)
def test_other_ends_hand_nothing_over(prefill: Half, reason: FinishReason) -> None:
    """A prompt that failed leaves no ticket."""
    assert prefill.hand_over(reason=reason) is None
    assert not prefill.connector.has_pending()


def test_nothing_computed_hands_nothing_over(prefill: Half) -> None:
    """A prompt without computed tokens leaves no ticket rather than an empty one."""
    assert prefill.hand_over(num_tokens=0) is None


def test_a_partly_computed_prompt_hands_over_its_part(prefill: Half) -> None:
    """A ticket covers the tokens whose KV exists, and names only their blocks."""
    hand_over = prefill.hand_over(num_tokens=5)
    assert hand_over is not None
    assert hand_over.kv_transfer_params is not None
    assert hand_over.kv_transfer_params["num_tokens"] == 5
    assert hand_over.kv_transfer_params["block_ids"] == [10, 11]


def test_a_request_without_the_wish_hands_nothing_over(prefill: Half) -> None:
    """An ordinary request leaves nothing behind."""
    request = Request("r", PROMPT, sampling=SamplingParams(max_tokens=1))
    prefill.end(request, prefill.add(request), FinishReason.LENGTH)
    assert not prefill.connector.has_pending()


def test_a_lapsed_lease_frees_the_blocks_on_time() -> None:
    """The connector says when the lease ends, and lets the blocks go then."""
    clock = VirtualClock()
    with half(clock=clock, lease_s=30) as prefill:
        ticket = prefill.ticket()
        assert prefill.connector.next_wakeup() == 30
        clock.advance(29)
        assert sent_by(prefill) == []
        clock.advance(1)
        assert sent_by(prefill) == [ticket["transfer_id"]]
        assert prefill.connector.next_wakeup() is None
        assert not prefill.connector.has_pending()


def test_a_wrong_block_size_is_noticed() -> None:
    """A block size that is not the pool's is an error that names the setting."""
    with half(block_size=2) as prefill, pytest.raises(ConfigError, match=r"NixlConfig\.block_size"):
        prefill.hand_over()


# The decode engine.


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


def new_request_data(uid: int) -> NewRequestData:
    """What a plan says of a request that starts."""
    return NewRequestData(
        row=0,
        epoch=0,
        uid=uid,
        request_id="d",
        token_ids=np.array(PROMPT, dtype=np.int32),
        num_prompt_tokens=len(PROMPT),
        num_computed_tokens=12,
        block_ids=np.zeros(4, dtype=np.int32),
        sampling=SamplingParams(),
    )


@pytest.fixture
def notices(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The release notices that go out, by transfer id."""
    sent: list[str] = []
    release = PeerLink.release

    async def counted(link: PeerLink, transfer_id: str, reason: str) -> None:
        sent.append(transfer_id)
        await release(link, transfer_id, reason)

    monkeypatch.setattr(PeerLink, "release", counted)
    return sent


def test_nothing_to_read_gives_the_ticket_back_once(
    prefill: Half, decode: Half, notices: list[str]
) -> None:
    """With the whole prefix here the ticket goes back when the request is admitted, one time."""
    prompt = PROMPT[:13]
    ticket = prefill.ticket(prompt)
    request = decode_request(ticket, prompt)
    uid = decode.add(request)
    assert decode.match(request, 12) == 0
    assert sent_by(prefill) == []
    plan = attrs.evolve(an_empty_plan(), scheduled_new_reqs=(new_request_data(uid),))
    decode.connector.build_connector_meta(plan)
    until(lambda: sent_by(prefill) == [ticket["transfer_id"]])
    decode.connector.build_connector_meta(plan)
    decode.end(request, uid)
    decode.connector.close()
    assert notices == [ticket["transfer_id"]]
    assert sent_by(prefill) == [ticket["transfer_id"]]
    assert decode.match(request, 0) == 0


def test_an_abort_in_the_queue_gives_the_ticket_back(prefill: Half, decode: Half) -> None:
    """A request that ends before it is admitted frees P's blocks at once."""
    ticket = prefill.ticket()
    request = decode_request(ticket)
    uid = decode.add(request)
    decode.end(request, uid)
    until(lambda: sent_by(prefill) == [ticket["transfer_id"]])
    assert not decode.connector.has_pending()


def test_a_closing_engine_gives_its_tickets_back(prefill: Half, decode: Half) -> None:
    """Tickets of requests that never ran go back when the engine closes."""
    ticket = prefill.ticket()
    decode.add(decode_request(ticket))
    decode.connector.close()
    assert sent_by(prefill) == [ticket["transfer_id"]]


def test_a_lapsed_ticket_fails_its_load() -> None:
    """Data read after the lease ended is refused, with the cause, however good it looks."""
    clock = VirtualClock()
    with half(clock=clock, lease_s=30) as prefill, half() as decode:
        request = decode_request(prefill.ticket())
        uid = decode.add(request)
        load = decode.load(request, uid, num_local=4)
        decode.plan_with_read()
        clock.advance(31)
        decode.workers_say(finished=load)
        decode.until_event()
        (failure,) = decode.failed
        assert decode.received == []
        assert failure.num_valid_tokens == 4
        assert "its lease of 30 s ended without a renewal" in failure.cause
        assert decode.match(request) == 0


def test_a_ticket_that_lapsed_in_the_queue_fails_its_load() -> None:
    """A ticket that is found dead before its load is offered once, so that the failure shows."""
    clock = VirtualClock()
    with half(clock=clock, lease_s=30) as prefill, half() as decode:
        ticket = prefill.ticket()
        clock.advance(31)
        request = decode_request(ticket)
        uid = decode.add(request)
        until(lambda: decode.num_notices >= 2)
        decode.take_events()
        load = decode.load(request, uid, num_local=8)
        decode.take_events()
        (failure,) = decode.failed
        assert (failure.transfer, failure.num_valid_tokens) == (load.transfer, 8)
        assert "its lease of 30 s ended" in failure.cause
        assert decode.match(request) == 0
        assert decode.plan() is None


def test_a_queued_request_renews_its_lease(prefill: Half, decode: Half) -> None:
    """A ticket outlives its lease many times while its request waits, and not once it ended."""
    with half(lease_s=0.3) as prefill:
        ticket = prefill.ticket()
        request = decode_request(ticket)
        uid = decode.add(request)
        start = prefill.connector.next_wakeup()
        assert start is not None
        until(lambda: (prefill.connector.next_wakeup() or 0) > start + 1.0)
        assert sent_by(prefill) == []
        decode.end(request, uid)
        until(lambda: sent_by(prefill) == [ticket["transfer_id"]])


def test_a_dead_peer_fails_the_load_in_words(decode: Half) -> None:
    """When nobody listens at the ticket's address the load fails and says who is missing."""
    with half() as prefill:
        ticket = prefill.ticket()
    request = decode_request(ticket)
    uid = decode.add(request)
    decode.load(request, uid)
    decode.until_event()
    (failure,) = decode.failed
    assert f"127.0.0.1:{ticket['port']} cannot be reached" in failure.cause
    decode.end(request, uid)
    assert not decode.connector.has_pending()


def test_a_restarted_peer_is_found_out(decode: Half) -> None:
    """Another life of the engine at the same address does not redeem the old one's tickets."""
    with half(engine_id="p") as prefill:
        ticket = prefill.ticket()
    with half(engine_id="p", port=ticket["port"]) as again:
        request = decode_request(ticket)
        uid = decode.add(request)
        decode.load(request, uid)
        decode.until_event()
        assert "restarted since it made the ticket" in decode.failed[0].cause
        assert decode.match(request) == 0
        fresh = decode_request(again.ticket())
        decode.load(fresh, decode.add(fresh))
        assert decode.plan_with_read().reads


def test_another_engine_at_the_address_is_found_out(decode: Half) -> None:
    """An engine with another id at the ticket's address is named as such."""
    with half(engine_id="p") as prefill:
        ticket = prefill.ticket()
    with half(engine_id="q", port=ticket["port"]):
        request = decode_request(ticket)
        decode.load(request, decode.add(request))
        decode.until_event()
        assert "another engine (q) answers" in decode.failed[0].cause


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


def test_orders_are_picklable(prefill: Half, decode: Half) -> None:
    """What the workers hear can travel to another process, and so can the factory."""
    request = decode_request(prefill.ticket())
    decode.load(request, decode.add(request))
    meta = decode.plan_with_read()
    (task,) = pickle.loads(pickle.dumps(meta)).reads
    assert task.peer == meta.reads[0].peer
    connector = NixlConnector(NixlConfig(block_size=4))
    assert pickle.loads(pickle.dumps(connector)).config == connector.config


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ([a_handshake(fingerprint="other")], "different KV caches: 'other' there, 'model' here"),
        ([a_handshake(bytes_per_block=128)], "different bytes in a block: 128 there, 64 here"),
        ([a_handshake(), a_handshake()], "different numbers of ranks: 2 there, 1 here"),
    ],
)
def test_unlike_engines_are_refused_in_words(decode: Half, theirs: Any, words: str) -> None:
    """A peer whose blocks are different fails the load with what each side has."""
    with half(handshakes=theirs) as prefill:
        request = decode_request(prefill.ticket())
        decode.load(request, decode.add(request))
        decode.until_event()
        assert words in decode.failed[0].cause


def test_unlike_block_sizes_are_refused(decode: Half) -> None:
    """A peer with another block size fails the load with both sizes."""
    with half(block_size=8) as prefill:
        request = decode_request(prefill.ticket())
        uid = decode.add(request)
        until(lambda: decode.take_events() or decode.match(request))
        load = decode.load(request, uid)
        decode.until_event()
        assert decode.failed[0].transfer == load.transfer
        assert "different block sizes: 8 there, 4 here" in decode.failed[0].cause


def test_unlike_keys_are_refused_in_words() -> None:
    """Engines that do not share a key fail the load and say so."""
    with half(key=b"a" * 16) as prefill, half() as decode:
        request = decode_request(prefill.ticket())
        decode.load(request, decode.add(request))
        decode.until_event()
        assert "do not have the same key" in decode.failed[0].cause


def test_a_ticket_of_another_key_is_refused() -> None:
    """A ticket that was signed with another key is refused before anyone is called."""
    with half(key=b"a" * 16) as prefill, half(key=b"b" * 16) as decode:
        request = decode_request(prefill.ticket())
        with pytest.raises(InvalidTransferParams, match="not signed with this engine's key"):
            decode.add(request)


def test_a_shared_key_works() -> None:
    """Engines that share a key trust each other's tickets and connections."""
    with half(key=b"a" * 16) as prefill, half(key=b"a" * 16) as decode:
        request = decode_request(prefill.ticket())
        load = decode.load(request, decode.add(request))
        decode.plan_with_read()
        decode.workers_say(finished=load)
        decode.until_event()
        assert decode.received == [load.transfer]


def test_a_ticket_for_another_prompt_is_refused(prefill: Half, decode: Half) -> None:
    """A ticket serves the prompt that it was made for, and no other."""
    with pytest.raises(InvalidTransferParams, match="another prompt"):
        decode.add(decode_request(prefill.ticket(), prompt=PROMPT[::-1]))


def test_bad_tickets_harm_no_other_request(prefill: Half, decode: Half) -> None:
    """A refused ticket raises for its request alone."""
    with pytest.raises(InvalidTransferParams):
        decode.add(decode_request({"nonsense": 1}))
    request = decode_request(prefill.ticket())
    assert decode.add(request)
    assert decode.match(request) == 13


def test_two_consumers_cannot_share_a_ticket(prefill: Half, decode: Half) -> None:
    """Of two engines that read with one ticket, the second is told no."""
    ticket = prefill.ticket()
    with half() as rival:
        request = decode_request(ticket)
        loads = [engine.load(request, engine.add(request)) for engine in (decode, rival)]
        decode.plan_with_read()
        rival.plan_with_read()
        for engine, load in zip((decode, rival), loads, strict=True):
            engine.workers_say(finished=load)
            engine.until_event()
        assert decode.received
        assert "it was accepted before" in rival.failed[0].cause


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


# Start and end.


def test_a_taken_port_is_named(prefill: Half) -> None:
    """Starting on a port in use is an error that names the address and the way out."""
    port = prefill.connector.address[1]
    with pytest.raises(AddressInUse, match=f"127.0.0.1:{port}: another process does"):
        Half(port=port)


def test_close_twice_joins_the_thread() -> None:
    """Closing leaves no thread behind and may be repeated."""
    made = Half()
    made.connector.close()
    made.connector.close()
    names = [thread.name for thread in threading.enumerate()]
    assert "pdcore-nixl-control" not in names


def test_close_without_start() -> None:
    """A connector that was never started can be closed."""
    NixlConnector(NixlConfig(block_size=4)).scheduler_side().close()


def test_use_before_start_is_an_error_that_says_so() -> None:
    """Calling a connector that was not started names the missing call."""
    connector = NixlConnector(NixlConfig(block_size=4)).scheduler_side()
    with pytest.raises(ConfigError, match="call start"):
        connector.take_events()
    connector.close()


def test_a_key_is_needed_off_loopback() -> None:
    """Listening where others can connect needs a key, and a long one."""
    with pytest.raises(ConfigError, match="so a key is needed"):
        NixlConfig(block_size=4, host="0.0.0.0")
    with pytest.raises(ConfigError, match="at least 16"):
        NixlConfig(block_size=4, key=b"short")
    assert NixlConfig(block_size=4, host="0.0.0.0", key=bytes(16)).host == "0.0.0.0"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", 0),
        ("block_size", 2**20 + 1),
        ("lease_s", 0.0),
        ("lease_s", 86401.0),
        ("port", 70000),
        ("idle_poll_s", float("nan")),
        ("engine_id", "a\nb"),
        ("engine_id", 5),
        ("advertised_host", "h" * 257),
        ("allowed_peers", "10.0.0.1"),
    ],
)
def test_settings_out_of_range_are_named(name: str, value: Any) -> None:
    """A setting that cannot work is named with its value."""
    with pytest.raises(ConfigError, match=name):
        NixlConfig(**{"block_size": 4} | {name: value})


def test_a_reason_in_many_lines_is_told_in_one() -> None:
    """Words from elsewhere are made fit for a message rather than breaking it."""
    refusal = Refusal(reason="first\nsecond\0" + "x" * 1000)
    assert refusal.reason.startswith("first second x")
    assert len(refusal.reason) == 512
