"""One connection of the side channel: frames of bounded size, each with a deadline."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import hmac
import os
import secrets
import struct
from collections.abc import Callable

from pdcore.connector.nixl.protocol import Challenge, Hello, Message, ProtocolError, decode, encode

__all__ = ["Channel", "client_proof", "is_proof", "new_nonce", "server_proof"]

_LENGTH = struct.Struct(">I")


class Channel(asyncio.Protocol):
    """Sends and receives whole messages. It is the connection's protocol: `asyncio` makes one.

    Its messages are small and somebody waits for each, so it does without the layers of a stream.

    Args:
        max_frame_bytes: larger frames are refused before they are read.
        connected: told when the connection is there.
    """

    def __init__(
        self, *, max_frame_bytes: int, connected: Callable[[Channel], None] | None = None
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._max_frame_bytes = max_frame_bytes
        self._connected = connected
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._is_held_up = False
        self._may_send = True
        self._is_over = False
        self._error: Exception | None = None
        self._waiters: list[asyncio.Future[None]] = []

    async def send(self, message: Message, *, timeout_s: float) -> None:
        """Send a message, and wait until the system has it: it is not lost if `close` comes next.

        Raises:
            TimeoutError: the peer does not take it.
            OSError: the connection is gone.
        """
        text = encode(message)
        if len(text) > self._max_frame_bytes:
            raise ProtocolError(f"a message of {len(text)} bytes is over {self._max_frame_bytes}")
        transport = self._transport
        if self._is_over or transport is None or transport.is_closing():
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        transport.write(_LENGTH.pack(len(text)) + text)
        deadline = self._loop.time() + timeout_s
        while not self._may_send:
            await self._change(deadline)
            if self._is_over:
                raise self._error or ConnectionResetError(
                    errno.ECONNRESET, os.strerror(errno.ECONNRESET)
                )

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
        has_begun = bool(self._received)
        deadline = self._loop.time() + (timeout_s if has_begun or idle_s is None else idle_s)
        while (text := self._take_frame()) is None:
            if self._is_over:
                raise self._error or EOFError("the connection was closed")
            await self._change(deadline)
            if self._received and not has_begun:
                has_begun, deadline = True, self._loop.time() + timeout_s
        return decode(text)

    async def wait_closed(self) -> None:
        """Wait until the connection has ended."""
        while not self._is_over:
            await self._change(None)

    def allow_frames(self, max_frame_bytes: int) -> None:
        """Take frames of another size from now on."""
        self._max_frame_bytes = max_frame_bytes
        self._hold_up_sender()

    def close(self) -> None:
        """Close the connection; what was not sent yet is dropped."""
        if self._transport is not None:
            self._transport.abort()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.set_write_buffer_limits(high=0)
        self._transport = transport
        if self._connected is not None:
            self._connected(self)

    def data_received(self, data: bytes) -> None:
        self._received += data
        self._hold_up_sender()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._is_over, self._error = True, error
        self._wake()

    def pause_writing(self) -> None:
        self._may_send = False

    def resume_writing(self) -> None:
        self._may_send = True
        self._wake()

    # Inner workings.

    def _take_frame(self) -> bytes | None:
        """The next whole frame, or None while it is not there."""
        received = self._received
        if len(received) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(received)
        if size > self._max_frame_bytes:
            raise ProtocolError(f"a frame of {size} bytes is over {self._max_frame_bytes}")
        end = _LENGTH.size + size
        if len(received) < end:
            return None
        text = bytes(received[_LENGTH.size : end])
        del received[:end]
        self._hold_up_sender()
        return text

    def _hold_up_sender(self) -> None:
        """Read no further while more than one whole frame is here: nobody asked for more."""
        is_much = len(self._received) > self._max_frame_bytes + _LENGTH.size
        transport = self._transport
        if is_much is self._is_held_up or transport is None or transport.is_closing():
            return
        self._is_held_up = is_much
        if is_much:
            transport.pause_reading()
        else:
            transport.resume_reading()

    async def _change(self, deadline: float | None) -> None:
        """Wait until something happened to the connection; raise `TimeoutError` at a deadline."""
        waiter = self._loop.create_future()
        timer = None if deadline is None else self._loop.call_at(deadline, _expire, waiter)
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            if timer is not None:
                timer.cancel()
            self._waiters.remove(waiter)

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)


def _expire(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_exception(TimeoutError())


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
