"""What an engine's workers tell its scheduler half between two reports, in one datagram each."""

from __future__ import annotations

import enum
import hmac
import logging
import secrets
import socket
import struct

import attrs

from pdcore.connector.nixl.doorbell import MAX_AT_ONCE, datagram_socket, listening_socket
from pdcore.connector.nixl.meta import Doorbell
from pdcore.messages import TransferKey

__all__ = ["NO_TRANSFER", "Notice", "NoticeKind", "NoticeListener", "NoticeSender"]

logger = logging.getLogger(__name__)

_KEY_BYTES = 32
_MAC_BYTES = 16
_FIELDS = struct.Struct(">BqqI")
NO_TRANSFER = TransferKey(0, 0)


class NoticeKind(enum.IntEnum):
    """What happened on a worker."""

    REPORT = 0
    """There is something to report."""
    ARRIVED = 1
    """All that a rank reads for a load is there, nothing writes to its blocks any more, and the
    next report says so."""
    NEEDS_PEER = 2
    """A read will not end unless the peer's workers look for it often."""


@attrs.frozen
class Notice:
    """One notice. ``transfer`` means nothing in a `NoticeKind.REPORT`."""

    kind: NoticeKind
    rank: int
    transfer: TransferKey = NO_TRANSFER


class NoticeListener:
    """The scheduler half's end.

    Each notice carries a code that only this engine's workers can make, for its very words. So
    a stranger can neither forge one nor change it; one that comes twice, or late, still says what
    was true of its load, and names of loads are never used again. A lost one costs latency.

    Args:
        host: the address to listen on; the workers must reach it.

    Raises:
        ConfigError: it is not an address of this machine.
    """

    def __init__(self, host: str) -> None:
        self._socket = listening_socket(host)
        self._key = secrets.token_bytes(_KEY_BYTES)
        self.address = Doorbell(host=host, port=self._socket.getsockname()[1], token=self._key)

    def take(self) -> list[Notice]:
        """Take the notices that are there, without waiting. After `MAX_AT_ONCE` datagrams the rest
        is left for the next call."""
        notices: list[Notice] = []
        for _ in range(MAX_AT_ONCE):
            try:
                data = self._socket.recv(_MAC_BYTES + _FIELDS.size + 1)
            except BlockingIOError:
                break
            text = data[_MAC_BYTES:]
            if len(text) == _FIELDS.size and hmac.compare_digest(
                data[:_MAC_BYTES], _mac(self._key, text)
            ):
                kind, uid, attempt, rank = _FIELDS.unpack(text)
                notices.append(Notice(NoticeKind(kind), rank, TransferKey(uid, attempt)))
        return notices

    def fileno(self) -> int:
        """For event loops."""
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()


class NoticeSender:
    """A worker's end. Its threads may share it.

    Args:
        address: where the scheduler half listens.
        rank: whose notices they are.
    """

    def __init__(self, address: Doorbell, *, rank: int) -> None:
        self.address = address
        self._rank = rank
        self._socket: socket.socket | None = None
        try:
            self._socket = datagram_socket(address.host)
            self._socket.connect((address.host, address.port))
        except OSError as error:
            logger.debug("no notices to %s:%d: %s", address.host, address.port, error)

    def send(self, kind: NoticeKind, transfer: TransferKey = NO_TRANSFER) -> None:
        """Send a notice. Never blocks or raises."""
        text = _FIELDS.pack(kind, transfer.uid, transfer.attempt, self._rank)
        try:
            if self._socket is not None:
                self._socket.send(_mac(self.address.token, text) + text)
        except OSError as error:
            logger.debug(
                "a notice to %s:%d was lost: %s", self.address.host, self.address.port, error
            )

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


def _mac(key: bytes, text: bytes) -> bytes:
    return hmac.digest(key, text, "sha256")[:_MAC_BYTES]
