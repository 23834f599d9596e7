"""The side channel against strangers: silent, garbled, oversized, forged."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nixl_engines import until
from nixl_halves import Half, decode_request, half
from test_nixl_params import some_params

from pdcore.connector.nixl.channel import Channel, client_proof, new_nonce
from pdcore.connector.nixl.client import PeerClient
from pdcore.connector.nixl.config import NixlConfig
from pdcore.connector.nixl.engine_name import EngineName
from pdcore.connector.nixl.protocol import (
    Accept,
    Answer,
    Challenge,
    Hello,
    ProtocolError,
    Release,
    Renew,
    decode,
    encode,
)
from pdcore.connector.ticket_contents import prompt_digest
from pdcore.errors import PeerLost


@pytest.fixture
def prefill() -> Iterator[Half]:
    """A prefill engine with few connections and little patience."""
    with half(max_num_connections=4, request_timeout_s=1.0) as made:
        yield made


def connect(prefill: Half) -> socket.socket:
    """A stranger's connection."""
    return socket.create_connection(prefill.connector.address, timeout=5)


def framed(text: bytes) -> bytes:
    """A frame around any text."""
    return struct.pack(">I", len(text)) + text


def receive(connection: socket.socket) -> dict[str, Any]:
    """The next frame's JSON."""
    (size,) = struct.unpack(">I", _exactly(connection, 4))
    data: dict[str, Any] = json.loads(_exactly(connection, size))
    return data


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def is_dropped(connection: socket.socket) -> bool:
    """Whether the server hangs up, whatever it says before."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        return True
    return True


def serves(prefill: Half) -> bool:
    """Whether an honest engine still gets a read going."""
    with half(request_timeout_s=2.0) as engine:
        request = decode_request(prefill.ticket())
        engine.load(request, engine.add(request))
        return bool(engine.plan_with_read().reads)


def greet(connection: socket.socket, **changes: Any) -> dict[str, Any]:
    """Say hello, and return the reply."""
    assert receive(connection)["type"] == "challenge"
    hello = Hello(engine_id="d", epoch="1", nonce=new_nonce())
    data = json.loads(encode(hello)) | changes
    connection.sendall(framed(json.dumps(data).encode()))
    return receive(connection)


def test_a_silent_client_delays_nobody(prefill: Half) -> None:
    """While one client says nothing another is served; the silent one is dropped."""
    with closing(connect(prefill)) as silent:
        assert serves(prefill)
        assert is_dropped(silent)


def test_silent_clients_cannot_use_up_the_connections(prefill: Half) -> None:
    """More silent clients than there are places do not keep an honest one out."""
    strangers = [connect(prefill) for _ in range(12)]
    assert serves(prefill)
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack(">I", 1 << 31),
        framed(b"not json"),
        framed(b'{"type":"nonsense"}'),
        framed(b'{"type":"renew","transfer_id":"t"}'),
        framed(b'{"type":"hello"}'),
        framed(b"[" * 100_000),
        framed(b"\xff\xfe"),
        b"\0\0",
    ],
)
def test_garbage_is_dropped_and_harms_nobody(prefill: Half, sent: bytes) -> None:
    """A client that does not speak the protocol is dropped; others are served."""
    with closing(connect(prefill)) as stranger:
        stranger.sendall(sent)
        assert is_dropped(stranger)
    assert serves(prefill)


@settings(max_examples=25, deadline=None)
@given(st.binary(max_size=64))
def test_any_bytes_are_survived(data: bytes) -> None:
    """No bytes after a proper hello stop the server."""
    prefill = _SHARED[0]
    with closing(connect(prefill)) as stranger:
        assert greet(stranger)["type"] == "welcome"
        stranger.sendall(data)
    with closing(connect(prefill)) as honest:
        assert greet(honest)["type"] == "welcome"


_SHARED: list[Half] = []


@pytest.fixture(autouse=True, scope="module")
def shared() -> Iterator[None]:
    """One engine for all examples of the property."""
    with half() as made:
        _SHARED.append(made)
        yield
        _SHARED.clear()


def test_a_malformed_request_ends_only_its_connection(prefill: Half) -> None:
    """An authenticated client that turns to nonsense is dropped; others are served."""
    with closing(connect(prefill)) as stranger:
        assert greet(stranger)["type"] == "welcome"
        stranger.sendall(framed(b'{"type":"renew","transfer_id":7}'))
        assert is_dropped(stranger)
    assert serves(prefill)


def test_requests_about_unknown_tickets_are_answered(prefill: Half) -> None:
    """Asking about a ticket that never was gives a no with a reason."""
    with closing(connect(prefill)) as client:
        greet(client)
        accept = Accept(transfer_id="x", contents_digest="0" * 64, read="1-0")
        for request in (Renew(transfer_id="x"), accept):
            client.sendall(framed(encode(request)))
            assert receive(client) == json.loads(
                encode(Answer(ok=False, reason="the ticket is unknown here"))
            )
        for _ in range(2):
            client.sendall(framed(encode(Release(transfer_id="x"))))
            assert receive(client)["ok"] is True


def test_a_wrong_proof_is_refused() -> None:
    """A client that does not know the key is told so and dropped; nothing is answered."""
    with half(key=b"k" * 16) as prefill, closing(connect(prefill)) as stranger:
        reply = greet(stranger, proof="0" * 64)
        assert reply == {"type": "refusal", "reason": "the two engines do not have the same key"}
        assert is_dropped(stranger)


def test_a_proof_serves_one_connection() -> None:
    """A proof that was overheard is worth nothing on another connection."""
    with half(key=b"k" * 16) as prefill:
        with closing(connect(prefill)) as client:
            challenge = decode(json.dumps(receive(client)).encode())
            assert isinstance(challenge, Challenge)
            hello = Hello(engine_id="d", epoch="1", nonce=new_nonce())
            proof = client_proof(b"k" * 16, challenge, hello)
            data = json.loads(encode(hello)) | {"proof": proof}
            client.sendall(framed(json.dumps(data).encode()))
            assert receive(client)["type"] == "welcome"
        with closing(connect(prefill)) as replay:
            receive(replay)
            replay.sendall(framed(json.dumps(data).encode()))
            assert receive(replay)["type"] == "refusal"


def test_another_version_is_refused_in_words(prefill: Half) -> None:
    """A client of another protocol version learns both versions."""
    with closing(connect(prefill)) as stranger:
        assert greet(stranger, version=99)["reason"].startswith("it speaks version 99")


def test_a_server_without_the_key_is_not_believed() -> None:
    """An engine that cannot prove that it has the key is refused by the one that can."""
    listener = socket.create_server(("127.0.0.1", 0))
    ticket = some_params(
        port=listener.getsockname()[1], prompt_digest=prompt_digest(decode_request({}))
    )
    with half(key=b"k" * 16, request_timeout_s=2.0) as engine, closing(listener):
        request = decode_request(ticket.to_dict(key=b"k" * 16))
        load = engine.load(request, engine.add(request))
        connection, _ = listener.accept()
        with closing(connection):
            challenge = {"type": "challenge", "engine_id": "p", "epoch": "1", "nonce": new_nonce()}
            connection.sendall(framed(json.dumps(challenge).encode()))
            assert receive(connection)["type"] == "hello"
            connection.sendall(framed(b'{"type":"welcome","proof":"' + b"0" * 64 + b'"}'))
            engine.until_event()
        assert engine.failed[0].transfer == load.transfer
        assert "could not prove that it has the same key" in engine.failed[0].cause


def test_a_silent_server_is_given_up(prefill: Half) -> None:
    """A peer that accepts connections and says nothing fails the load within the timeout."""
    listener = socket.create_server(("127.0.0.1", 0))
    with closing(listener), half(request_timeout_s=0.5) as engine:
        ticket = prefill.ticket() | {"port": listener.getsockname()[1]}
        request = decode_request(ticket)
        engine.load(request, engine.add(request))
        engine.until_event()
        assert "did not answer within 0.5 s" in engine.failed[0].cause
        until(lambda: engine.match(request) > 0)


@pytest.mark.parametrize("host", ["a..cluster.local", "a" * 64 + ".cluster.local"])
def test_a_host_that_cannot_be_named_fails_the_load_at_once(prefill: Half, host: str) -> None:
    """A ticket may name what a pattern allows and no resolver takes: its load fails, in words."""
    with half(allowed_peers=["*.cluster.local"], request_timeout_s=60.0) as engine:
        request = decode_request(prefill.ticket() | {"host": host})
        engine.load(request, engine.add(request))
        engine.until_event()
        assert "no host can have this name" in engine.failed[0].cause


def test_a_silent_server_holds_nobody_up_in_turn(prefill: Half) -> None:
    """Requests that queue for the one connection to a silent peer end together, not in turn."""
    listener = socket.create_server(("127.0.0.1", 0))
    options = {"request_timeout_s": 0.5, "max_connections_per_peer": 1}
    with closing(listener), half(**options) as engine:
        began = time.monotonic()
        for _ in range(6):
            ticket = prefill.ticket() | {"port": listener.getsockname()[1]}
            request = decode_request(ticket)
            engine.load(request, engine.add(request))
        until(lambda: engine.take_events() or len(engine.failed) == 6)
        assert time.monotonic() - began < 3.0


def test_the_timeout_counts_waiting_for_a_connection() -> None:
    """A request that waits for others to a silent peer is given up as early as they are."""
    listener = socket.create_server(("127.0.0.1", 0))
    name = EngineName(engine_id="e", epoch="1")
    config = NixlConfig(block_size=4, request_timeout_s=0.4, max_connections_per_peer=1)

    async def ask_at_once() -> list[Any]:
        port = listener.getsockname()[1]
        client = PeerClient("127.0.0.1", port, peer=name, name=name, config=config)
        asks = [client.ask(Renew(transfer_id="t")) for _ in range(6)]
        return await asyncio.gather(*asks, return_exceptions=True)

    began = time.monotonic()
    with closing(listener):
        answers = asyncio.run(ask_at_once())
    assert [type(answer) for answer in answers] == [PeerLost] * 6
    assert time.monotonic() - began < 1.5


def test_strangers_cannot_fill_the_memory(prefill: Half) -> None:
    """Before it has shown the key, nobody can announce more than a greeting takes; after it, all
    that a message may have."""
    with closing(connect(prefill)) as stranger:
        receive(stranger)
        stranger.sendall(struct.pack(">I", 1 << 16))
        assert is_dropped(stranger)
    with closing(connect(prefill)) as known:
        # Each of these takes twelve bytes in JSON.
        greeted = greet(known, engine_id=256 * chr(0x1F600), epoch=256 * chr(0x1F600))
        assert greeted["type"] == "welcome"
        text = encode(Release(transfer_id="t"))
        known.sendall(framed(text + b" " * (1 << 19)))
        assert receive(known)["ok"]


def test_an_oversized_frame_is_refused_unread() -> None:
    """The length alone condemns a frame; nobody waits for its bytes, or makes room for them."""

    async def receive_it() -> None:
        channel = Channel(max_frame_bytes=1000)
        channel.data_received(struct.pack(">I", 1001))
        await channel.receive(timeout_s=5)

    with pytest.raises(ProtocolError, match="a frame of 1001 bytes is over 1000"):
        asyncio.run(receive_it())


@given(st.dictionaries(st.text(), st.none() | st.integers() | st.text() | st.lists(st.integers())))
def test_no_json_crashes_the_decoder(data: dict[str, Any]) -> None:
    """Any JSON object is a message or a `ProtocolError`."""
    for kind in ("accept", "description", "hello", "answer", "no such"):
        with contextlib.suppress(ProtocolError):
            decode(json.dumps(data | {"type": kind}).encode())
