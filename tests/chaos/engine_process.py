"""An engine's process, as the router and the adversary see it."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from typing import Any

import attrs
from chaos_messages import Bye, EngineSettings, Failed, Ready

__all__ = ["EngineProcess"]

# Failed transfers come back as causes; NIXL and UCX need not print them as well.
os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
os.environ.setdefault("UCX_LOG_LEVEL", "fatal")

# A server that has imported the slow libraries, and made no agent, is safe to fork from.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["nixl._api", "pdcore.connector.nixl", "pdcore.scheduler.unified", "pdcore.testing.fake_runner"]
)
_START_LIMIT_S = 60.0
_END_LIMIT_S = 15.0


class EngineProcess:
    """Starts an engine, talks to it through a pipe, and does to it what the adversary wants.

    Args:
        settings: how to build the engine.
    """

    def __init__(self, settings: EngineSettings) -> None:
        from chaos_engine import run_engine

        self.settings = settings
        self.connection, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(
            target=run_engine, args=(settings, theirs), name=f"chaos-{settings.name}", daemon=True
        )
        self._process.start()
        theirs.close()
        self.is_ready = False
        self.is_stopped = False
        self.failure = ""
        self._held_back: list[Any] = []

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def exit_code(self) -> int | None:
        """How the process ended; None while it lives."""
        return self._process.exitcode

    def wait_until_ready(self) -> None:
        """Wait until it serves. Its port stays its own in its next life."""
        if not self.connection.poll(_START_LIMIT_S):
            raise TimeoutError(f"engine {self.name} did not start within {_START_LIMIT_S:g} s")
        for message in self.receive():
            if isinstance(message, Failed):
                raise RuntimeError(f"engine {self.name} did not start:\n{message.cause}")

    def send(self, message: Any) -> None:
        """Send a message; one to a dead engine is lost, which `receive` tells."""
        if self.is_stopped:
            self._held_back.append(message)  # its pipe could fill up, and we with it
            return
        try:
            self.connection.send(message)
        except OSError:
            return

    def receive(self) -> Iterator[Any]:
        """Everything that has arrived. Raises `EOFError` once the process is gone."""
        while self.connection.poll():
            try:
                message = self.connection.recv()
            except ConnectionResetError:
                raise EOFError from None
            if isinstance(message, Ready):
                self.is_ready = True
                self.settings = attrs.evolve(self.settings, port=message.port)
            if isinstance(message, Failed):
                self.failure = message.cause
            yield message

    def stop(self) -> None:
        """Let it hang: it lives, keeps its memory and sockets, and does nothing."""
        self._signal(signal.SIGSTOP)
        self.is_stopped = True

    def go_on(self) -> None:
        """End `stop`."""
        self._signal(signal.SIGCONT)
        self.is_stopped = False
        held_back, self._held_back = self._held_back, []
        for message in held_back:
            self.send(message)

    def kill(self) -> None:
        """End it at once, in the middle of whatever it does."""
        self._signal(signal.SIGKILL)
        self._process.join(_END_LIMIT_S)
        self.connection.close()

    def ask_to_leave(self) -> None:
        """Tell it to end; see `join`."""
        self.go_on()
        self.send(Bye())

    def join(self) -> int | None:
        """Wait until it has ended; return its exit code, or None if it had to be killed."""
        self._process.join(_END_LIMIT_S)
        exit_code = self._process.exitcode
        self.kill()
        return exit_code

    def _signal(self, number: signal.Signals) -> None:
        if self._process.pid is not None and self._process.exitcode is None:
            os.kill(self._process.pid, number)
