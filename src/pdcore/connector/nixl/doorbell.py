"""Datagrams between an engine's two halves: "somebody reads, look often", and "a load ended"."""

from __future__ import annotations

import hmac
import logging
import secrets
import select
import socket
import struct

from pdcore.connector.nixl.meta import Doorbell
from pdcore.errors import ConfigError

__all__ = ["DoorbellListener", "ring"]

logger = logging.getLogger(__name__)

_TOKEN_BYTES = 16
_SECONDS = struct.Struct(">d")
_MAX_RING_S = 5.0


class DoorbellListener:
    """The end that is woken. A lost datagram costs latency, a forged one some polling; never data.

    Args:
        host: the address to listen on; the engine's other half must reach it.

    Raises:
        ConfigError: it is not an address of this machine.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        try:
            self._socket.bind((host, 0))
        except OSError as error:
            self._socket.close()
            raise ConfigError(
                f"doorbell_host={host!r} cannot be listened on: {error.strerror}. Pass the address "
                "of one of this machine's interfaces"
            ) from error
        self._socket.setblocking(False)
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self.address = Doorbell(host=host, port=self._socket.getsockname()[1], token=self._token)

    def wait(self, timeout_s: float) -> float | None:
        """Sleep until a ring or the time is up; return for how long to look often, or None.

        Takes every ring that is there. A ring of 0 seconds says that nobody reads any more.
        """
        ready, _, _ = select.select([self._socket], [], [], timeout_s)
        return self.take() if ready else None

    def take(self) -> float | None:
        """Take every ring that is there, without waiting; the last one's seconds, or None."""
        seconds: float | None = None
        while True:
            try:
                data = self._socket.recv(64)
            except BlockingIOError:
                return seconds
            if len(data) == _TOKEN_BYTES + _SECONDS.size and hmac.compare_digest(
                data[:_TOKEN_BYTES], self._token
            ):
                (asked,) = _SECONDS.unpack(data[_TOKEN_BYTES:])
                seconds = min(asked, _MAX_RING_S) if asked > 0 else 0.0

    def fileno(self) -> int:
        """For event loops."""
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()


def ring(doorbell: Doorbell, seconds: float) -> None:
    """Wake the other half: a worker for some seconds, or until 0 is rung; a scheduler half once.

    Never blocks or raises.
    """
    family = socket.AF_INET6 if ":" in doorbell.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto(doorbell.token + _SECONDS.pack(seconds), (doorbell.host, doorbell.port))
    except OSError as error:
        logger.debug("the doorbell at %s:%d: %s", doorbell.host, doorbell.port, error)
