"""Datagrams from a scheduler half to its workers: "somebody reads, look often"."""

from __future__ import annotations

import hmac
import logging
import secrets
import select
import socket
import struct
import time

from pdcore.connector.nixl.meta import Doorbell
from pdcore.errors import ConfigError

__all__ = ["MAX_AT_ONCE", "DoorbellListener", "datagram_socket", "listening_socket", "ring"]

logger = logging.getLogger(__name__)

_TOKEN_BYTES = 16
_SECONDS = struct.Struct(">d")
_MAX_RING_S = 5.0
_POLL_STEP_S = 0.001
MAX_AT_ONCE = 256
"""Datagrams that are taken in one call: who sends without end must not keep the thread."""


class DoorbellListener:
    """The end that is woken. A lost datagram costs latency, a forged one some polling; never data.

    Args:
        host: the address to listen on; the engine's other half must reach it.

    Raises:
        ConfigError: it is not an address of this machine.
    """

    def __init__(self, host: str) -> None:
        self._socket = listening_socket(host)
        # Not `select`, which raises once a process has a thousand files open.
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self.address = Doorbell(host=host, port=self._socket.getsockname()[1], token=self._token)

    def wait(self, timeout_s: float) -> float | None:
        """Sleep until a ring or the time is up; return for how long to look often, or None.

        Takes the rings that are there. A ring of 0 seconds says that nobody reads any more.
        """
        if timeout_s < _POLL_STEP_S:
            time.sleep(timeout_s)
            return self.take()
        return self.take() if self._poll.poll(1000 * timeout_s) else None

    def take(self) -> float | None:
        """Take the rings that are there, without waiting; the last one's seconds, or None. After
        `MAX_AT_ONCE` datagrams the rest is left for the next call."""
        seconds: float | None = None
        for _ in range(MAX_AT_ONCE):
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

    def fileno(self) -> int:
        """For event loops."""
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()


def datagram_socket(host: str) -> socket.socket:
    """A socket for datagrams of the kind that a host's address is of. It never blocks."""
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
    made.setblocking(False)
    return made


def listening_socket(host: str) -> socket.socket:
    """A socket that takes datagrams at any free port of an address.

    Raises:
        ConfigError: it is not an address of this machine.
    """
    made = datagram_socket(host)
    try:
        made.bind((host, 0))
    except OSError as error:
        made.close()
        raise ConfigError(
            f"doorbell_host={host!r} cannot be listened on: {error.strerror}. Pass the address of "
            "one of this machine's interfaces"
        ) from error
    return made


def ring(doorbell: Doorbell, seconds: float) -> None:
    """Wake a worker for some seconds, or until 0 is rung. Never blocks or raises."""
    try:
        with datagram_socket(doorbell.host) as sender:
            sender.sendto(doorbell.token + _SECONDS.pack(seconds), (doorbell.host, doorbell.port))
    except OSError as error:
        logger.debug("the doorbell at %s:%d: %s", doorbell.host, doorbell.port, error)
