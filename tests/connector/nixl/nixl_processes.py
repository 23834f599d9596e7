"""Engines in processes of their own, obeying commands."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")

# A server that has imported the slow libraries, and made no agent, is safe to fork from.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["nixl._api", "pdcore.connector.nixl", "pdcore.connector.tickets"])


def serve_commands(
    connection: Connection, config: dict[str, Any], environment: dict[str, str]
) -> None:
    """Main function of the process: step an engine, and answer ``(method, args)``."""
    os.environ.update(environment)
    from nixl_engines import Engine

    engine = Engine(content=True, **config)
    connection.send(engine.scheduler.address)
    while True:
        if connection.poll(0.005):
            command, arguments = connection.recv()
            if command == "stop":
                break
            if command == "sent":
                connection.send(list(engine.sent))
            else:
                connection.send(getattr(engine, command)(*arguments))
        engine.step()
    engine.close()


class EngineProcess:
    """The handle that a test has of an engine: it takes ``(command, arguments)``, and "stop".

    Args:
        main: the process's main function; it sends its address first.
        config, environment: handed to it.
        answer_s: how long it may take to answer.
    """

    def __init__(
        self,
        main: Callable[[Connection, dict[str, Any], dict[str, str]], None],
        config: dict[str, Any],
        environment: dict[str, str],
        *,
        answer_s: float = 10.0,
    ) -> None:
        self._answer_s = answer_s
        self._connection, child = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(
            target=main, args=(child, config, environment), daemon=True
        )
        self._process.start()
        child.close()
        self.address: tuple[str, int] = self._receive(40.0)

    def ask(self, command: str, *arguments: Any) -> Any:
        """Give a command, and return its answer."""
        self.begin(command, *arguments)
        return self.end()

    def begin(self, command: str, *arguments: Any) -> None:
        """Send a command without waiting for its answer; see `end`."""
        self._connection.send((command, arguments))

    def end(self) -> Any:
        """The answer to the command that was begun."""
        return self._receive(self._answer_s)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; after `SIGSTOP`, return once it has stopped. On a busy machine its threads
        go on until the first of them has had its turn."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)
        end = time.monotonic() + self._answer_s
        while number is signal.SIGSTOP and not self.has_stopped:
            assert time.monotonic() < end, "the engine's process does not stop"
            time.sleep(0.0005)

    @property
    def has_stopped(self) -> bool:
        """Whether it was stopped, by whomever."""
        status = Path(f"/proc/{self._process.pid}/stat").read_text()
        return status.rpartition(")")[2].split()[0] == "T"

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.join(10)

    def close(self) -> int | None:
        """Stop it; return its exit code."""
        if self._process.is_alive():
            self.signal(signal.SIGCONT)
            self._connection.send(("stop", ()))
            self._process.join(10)
        if self._process.is_alive():
            self.kill()
        self._connection.close()
        return self._process.exitcode

    def _receive(self, limit_s: float) -> Any:
        assert self._connection.poll(limit_s), "the engine's process does not answer"
        return self._connection.recv()


class PrefillProcess(EngineProcess):
    """A process that prefills."""

    def prefill(self, prompt: list[int], block_ids: list[int]) -> dict[str, Any]:
        params: dict[str, Any] = self.ask("prefill", prompt, block_ids)
        return params

    @property
    def sent(self) -> list[str]:
        return list(self.ask("sent"))


@contextmanager
def prefill_process(
    environment: dict[str, str] | None = None, **config: Any
) -> Iterator[PrefillProcess]:
    """Run a prefill engine for the length of a block."""
    process = PrefillProcess(serve_commands, config, environment or {})
    try:
        yield process
    finally:
        process.close()
