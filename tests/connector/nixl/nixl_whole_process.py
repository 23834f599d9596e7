"""A whole engine in a process of its own, which a test may stop, continue and kill."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from nixl_processes import EngineProcess

from pdcore.request import Request


def serve_engine(
    connection: Connection, config: dict[str, Any], environment: dict[str, str]
) -> None:
    """Main function of the process: step an engine, and answer ``(command, arguments)``."""
    os.environ.update(environment)
    from nixl_stages import stop_at
    from nixl_whole_engine import WholeEngine

    from pdcore.loop import wait

    stage = config.pop("stop_at", None)
    engine = WholeEngine(**config)
    if stage is not None:
        stop_at(stage)
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
    if command == "step":
        engine.scheduler.resume()
        engine.step()
        return engine.scheduler.pause()
    if command == "num_pushes":
        return engine.scheduler.stats().connector.pushes.num_started
    if command in ("pause", "resume"):
        return getattr(engine.scheduler, command)()
    if command == "num_free":
        return engine.num_free
    if command == "expect_push":
        return engine.connector.expect_push(Request("any", *arguments))
    if command == "landings":
        return engine.scheduler.stats().connector.landings
    raise ValueError(f"unknown command {command!r}")


class WholeProcess(EngineProcess):
    """A process with a whole engine, which takes commands between two steps."""

    def stop(self) -> None:
        """Hang, as a process does that has lost its machine's attention."""
        self.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.signal(signal.SIGCONT)


@contextmanager
def whole_process(
    environment: dict[str, str] | None = None, **config: Any
) -> Iterator[WholeProcess]:
    """Run an engine for the length of a block."""
    process = WholeProcess(serve_engine, config, environment or {}, answer_s=20.0)
    try:
        yield process
    finally:
        process.close()
