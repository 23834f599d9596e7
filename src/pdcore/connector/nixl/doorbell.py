"""Waking a worker's serving thread: a datagram that says "somebody reads, look often"."""

from __future__ import annotations

import hmac
import logging
import secrets
import select
import socket
import struct

from pdcore.connector.nixl.meta import Doorbell

__all__ = ["DoorbellListener", "ring"]

logger = logging.getLogger(__name__)

_TOKEN_BYTES = 16
_SECONDS = struct.Struct(">d")
_MAX_RING_S = 5.0


class DoorbellListener:
    """The worker's end. A lost datagram costs latency, a forged one some polling; never data.

    Args:
        host: the address to listen on; the engine's scheduler half must reach it.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.bind((host, 0))
        self._socket.setblocking(False)
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self.address = Doorbell(host=host, port=self._socket.getsockname()[1], token=self._token)

    def wait(self, timeout_s: float) -> float | None:
        """Sleep until a ring or the time is up; return for how long to look often, or None.

        Takes every ring that is there. A ring of 0 seconds says that nobody reads any more.
        """
        ready, _, _ = select.select([self._socket], [], [], timeout_s)
        seconds: float | None = None
        while ready:
            try:
                data = self._socket.recv(64)
            except BlockingIOError:
                break
            if len(data) == _TOKEN_BYTES + _SECONDS.size and hmac.compare_digest(
                data[:_TOKEN_BYTES], self._token
            ):
                (asked,) = _SECONDS.unpack(data[_TOKEN_BYTES:])
                seconds = min(asked, _MAX_RING_S) if asked > 0 else 0.0
        return seconds

    def close(self) -> None:
        self._socket.close()


def ring(doorbell: Doorbell, seconds: float) -> None:
    """Ask a worker to look often for some seconds; 0 tells it to rest. Never blocks or raises."""
    family = socket.AF_INET6 if ":" in doorbell.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto(doorbell.token + _SECONDS.pack(seconds), (doorbell.host, doorbell.port))
    except OSError as error:
        logger.debug("a worker's doorbell at %s:%d: %s", doorbell.host, doorbell.port, error)
