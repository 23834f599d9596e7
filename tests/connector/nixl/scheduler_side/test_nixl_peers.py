"""Which peers and tickets are refused, and in which words."""

from __future__ import annotations

from typing import Any

import pytest
from nixl_engines import until
from nixl_halves import PROMPT, Half, a_handshake, decode_request, half

from pdcore.connector.nixl.protocol import Refusal
from pdcore.errors import InvalidTransferParams


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


def test_an_engine_that_does_not_know_its_own_memory_says_so() -> None:
    """What is missing is on this side, and the words say which call."""
    with half() as prefill, half(handshakes=[]) as decode:
        request = decode_request(prefill.ticket())
        decode.load(request, decode.add(request))
        decode.until_event()
        assert "pass set_xfer_handshake_metadata what" in decode.failed[0].cause


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


def test_a_reason_in_many_lines_is_told_in_one() -> None:
    """Words from elsewhere are made fit for a message rather than breaking it."""
    refusal = Refusal(reason="first\nsecond\0" + "x" * 1000)
    assert refusal.reason.startswith("first second x")
    assert len(refusal.reason) == 512
