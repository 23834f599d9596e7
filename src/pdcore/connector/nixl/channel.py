"""One connection of the side channel: frames of bounded size, each with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import struct

from pdcore.connector.nixl.protocol import Challenge, Hello, Message, ProtocolError, decode, encode

__all__ = ["Channel", "client_proof", "is_proof", "new_nonce", "server_proof"]

_LENGTH = struct.Struct(">I")


class Channel:
    """Sends and receives whole messages.

    Args:
        reader, writer: the connection.
        max_frame_bytes: larger frames are refused before they are read.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        max_frame_bytes: int,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._max_frame_bytes = max_frame_bytes

    async def send(self, message: Message, *, timeout_s: float) -> None:
        """Send a message.

        Raises:
            TimeoutError: the peer does not take it.
            OSError: the connection is gone.
        """
        text = encode(message)
        if len(text) > self._max_frame_bytes:
            raise ProtocolError(f"a message of {len(text)} bytes is over {self._max_frame_bytes}")
        async with asyncio.timeout(timeout_s):
            self._writer.write(_LENGTH.pack(len(text)) + text)
            await self._writer.drain()

    async def receive(self, *, timeout_s: float, idle_s: float | None = None) -> Message:
        """Return the next message.

        Args:
            timeout_s: how long a message may take, once begun.
            idle_s: how long to wait for it to begin; None means ``timeout_s``.

        Raises:
            TimeoutError: nothing, or only a part, came in time.
            EOFError: the peer closed the connection.
            OSError: the connection broke.
            ProtocolError: what came is no message.
        """
        first = await self._read(1, timeout_s if idle_s is None else idle_s)
        rest = await self._read(_LENGTH.size - 1, timeout_s)
        (size,) = _LENGTH.unpack(first + rest)
        if size > self._max_frame_bytes:
            raise ProtocolError(f"a frame of {size} bytes is over {self._max_frame_bytes}")
        return decode(await self._read(size, timeout_s))

    def close(self) -> None:
        """Close the connection; what was not sent yet is dropped."""
        with contextlib.suppress(Exception):
            self._writer.transport.abort()

    async def _read(self, num_bytes: int, timeout_s: float) -> bytes:
        async with asyncio.timeout(timeout_s):
            return await self._reader.readexactly(num_bytes)


def new_nonce() -> str:
    """Random digits that make a proof good for one connection."""
    return secrets.token_hex(32)


def client_proof(key: bytes | None, challenge: Challenge, hello: Hello) -> str:
    """What a client that knows the key answers to a challenge; empty when there is no key."""
    return _proof(key, "client", challenge, hello)


def server_proof(key: bytes | None, challenge: Challenge, hello: Hello) -> str:
    """What a server that knows the key answers to a hello; empty when there is no key."""
    return _proof(key, "server", challenge, hello)


def is_proof(given: str, expected: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(given.encode(), expected.encode())


def _proof(key: bytes | None, role: str, challenge: Challenge, hello: Hello) -> str:
    # Both nonces and both names are in it, so that a proof serves no other pair, direction or
    # connection.
    if key is None:
        return ""
    parts = (
        "pdcore side channel",
        role,
        challenge.nonce,
        challenge.engine_id,
        challenge.epoch,
        hello.nonce,
        hello.engine_id,
        hello.epoch,
    )
    return hmac.new(key, "\0".join(parts).encode(), hashlib.sha256).hexdigest()
