"""Proof that a process has died: nobody listens any more where it did."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import threading
import time

__all__ = ["LifeSign", "is_refused"]

logger = logging.getLogger(__name__)

_NO_ROOM_S = 1.0


class LifeSign:
    """A port that is open as long as its process lives, stopped or not.

    The system keeps a listening socket until the process ends, so a refused connection where one
    was taken before proves that it has ended. The opposite proves nothing. A thread takes every
    connection and ends it at once: left alone they fill the socket's queue, and then nobody more
    could see it alive.

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
        self._thread = threading.Thread(target=self._run, name="pdcore-nixl-life", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the port, and join the thread. May be called twice."""
        with contextlib.suppress(OSError):
            # Wakes the thread, which to close alone would not.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except ConnectionAbortedError:
                continue
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    time.sleep(_NO_ROOM_S)
                    continue
                return
            connection.close()


async def is_refused(host: str, port: int, *, timeout_s: float) -> bool | None:
    """Whether a connection is refused; None if neither that nor the opposite is known in time."""
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError, UnicodeError) as error:  # the last: a host that is no name
        return True if getattr(error, "errno", None) == errno.ECONNREFUSED else None
    writer.transport.abort()
    return False
