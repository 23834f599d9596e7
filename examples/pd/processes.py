"""An engine in a process of its own, as the router sees it."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pd.engine import run_engine
from pd.messages import EngineSettings

__all__ = ["EngineProcess"]

_CLOSE_TIMEOUT_S = 15.0


class EngineProcess:
    """Starts an engine in a fresh interpreter and talks to it through a pipe.

    Fork would not do: NIXL's threads and sockets do not survive it. A context manager: leaving it
    ends the process.

    Args:
        settings: how to build the engine.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(
            target=run_engine, args=(settings, theirs), name=f"pd-{settings.role}", daemon=True
        )
        with _interrupts_held_back():
            self._process.start()
        theirs.close()

    @property
    def role(self) -> str:
        return self.settings.role

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.exitcode

    def send(self, message: Any) -> bool:
        """Send a message; False when the process is gone."""
        try:
            self.connection.send(message)
        except (BrokenPipeError, ConnectionResetError, OSError):
            return False
        return True

    def receive(self) -> Iterator[Any]:
        """Everything that has arrived. Raises `EOFError` once the process is gone."""
        while self.connection.poll():
            try:
                yield self.connection.recv()
            except ConnectionResetError:
                raise EOFError from None

    def kill(self) -> None:
        """End the process at once, in the middle of whatever it does."""
        self._process.kill()

    def close(self) -> None:
        """Wait for the process to end, and end it if it does not. May be called twice."""
        self.connection.close()
        self._process.join(_CLOSE_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if error is not None:
            self.kill()  # something went wrong, or somebody pressed Ctrl-C: do not wait
        self.close()


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """A child started meanwhile never sees Ctrl-C: we end it. Here, it comes through later."""
    caught: list[int] = []
    handler = signal.getsignal(signal.SIGINT)
    # The mask is what the child inherits. Here it is not enough, since another thread may get the
    # signal, and Python raises it in this one.
    holds = callable(handler) and threading.current_thread() is threading.main_thread()
    if holds:
        signal.signal(signal.SIGINT, lambda number, frame: caught.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if holds:
            signal.signal(signal.SIGINT, handler)
    if caught:
        raise KeyboardInterrupt
