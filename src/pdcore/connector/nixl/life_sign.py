"""Proof that a process has died: nobody listens any more where it did."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket

__all__ = ["LifeSign", "is_refused"]

logger = logging.getLogger(__name__)


class LifeSign:
    """A port that is open as long as its process lives, stopped or not.

    Nothing is ever accepted from it. The system keeps a listening socket until the process ends, so
    a refused connection where one was taken before proves that it has ended. The opposite proves
    nothing.

    Args:
        host: where to listen.
    """

    def __init__(self, host: str) -> None:
        self.port = 0
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.bind((host, 0))
            self._socket.listen(16)
            self.port = int(self._socket.getsockname()[1])
        except OSError as error:
            # Without it, slots that this rank writes to stay in quarantine if it dies.
            logger.warning("no sign of life on %s: %s", host, error.strerror)
            self._socket.close()

    def close(self) -> None:
        self._socket.close()


async def is_refused(host: str, port: int, *, timeout_s: float) -> bool | None:
    """Whether a connection is refused; None if neither that nor the opposite is known in time."""
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError) as error:
        return True if getattr(error, "errno", None) == errno.ECONNREFUSED else None
    writer.transport.abort()
    return False
