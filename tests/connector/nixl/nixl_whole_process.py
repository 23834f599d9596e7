"""A whole engine in a process of its own, which a test may stop, continue and kill."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")

# A server that has imported the slow libraries, and made no agent, is safe to fork from.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["nixl._api", "pdcore.connector.nixl", "pdcore.connector.tickets"])
_START_S = 40.0
_ANSWER_S = 20.0


def serve_engine(
    connection: Connection, config: dict[str, Any], environment: dict[str, str]
) -> None:
    """Main function of the process: step an engine, and answer ``(command, arguments)``."""
    os.environ.update(environment)
    from test_nixl_engines import WholeEngine

    from pdcore.loop import wait

    engine = WholeEngine(**config)
    connection.send(engine.connector.address)
    while True:
        if connection.poll(0.002):
            command, arguments = connection.recv()
            if command == "stop":
                break
            connection.send(_answer(engine, command, arguments))
        wait(engine.scheduler, engine.waker, clock=engine.clock, max_wait_s=0.002)
        engine.step()
    engine.close()


def _answer(engine: Any, command: str, arguments: Any) -> Any:
    if command == "prefill":
        return engine.prefill(*arguments)
    if command == "add":
        name, prompt, max_tokens, params = arguments
        engine.add(name, prompt, max_tokens=max_tokens, params=params)
        return None
    if command == "end":
        end = engine.ends.get(*arguments)
        return None if end is None else (engine.tokens[arguments[0]], end)
    if command in ("pause", "resume"):
        return getattr(engine.scheduler, command)()
    if command == "num_free":
        return engine.num_free
    raise ValueError(f"unknown command {command!r}")


class WholeProcess:
    """The handle that a test has."""

    def __init__(self, config: dict[str, Any], environment: dict[str, str]) -> None:
        self._connection, child = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(
            target=serve_engine, args=(child, config, environment), daemon=True
        )
        self._process.start()
        child.close()
        self.address: tuple[str, int] = self._receive(_START_S)

    def ask(self, command: str, *arguments: Any) -> Any:
        """Give a command between two steps, and return its answer."""
        self._connection.send((command, arguments))
        return self._receive(_ANSWER_S)

    def stop(self) -> None:
        """Hang, as a process does that has lost its machine's attention."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.join(10)

    def close(self) -> None:
        if self._process.is_alive():
            self.go_on()
            self._connection.send(("stop", ()))
            self._process.join(10)
        if self._process.is_alive():
            self.kill()
        self._connection.close()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def _receive(self, limit_s: float) -> Any:
        assert self._connection.poll(limit_s), "the engine's process does not answer"
        return self._connection.recv()


@contextmanager
def whole_process(
    environment: dict[str, str] | None = None, **config: Any
) -> Iterator[WholeProcess]:
    """Run an engine for the length of a block."""
    process = WholeProcess(config, environment or {})
    try:
        yield process
    finally:
        process.close()
