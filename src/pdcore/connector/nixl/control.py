"""The one thread of the connector's scheduler half: an asyncio loop that talks to peers."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any

__all__ = ["ControlThread"]

logger = logging.getLogger(__name__)

_NUM_CLOSING_ROUNDS = 8
_JOIN_TIMEOUT_S = 10.0
_SHORT = "short"
_LONG = "long"


class ControlThread:
    """Runs coroutines for a thread that must not block.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread. Nothing runs, and nothing needs closing, before, or if this raises."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._run, args=(loop,), name=self._name, daemon=True)
        try:
            thread.start()
        except BaseException:
            loop.close()
            raise
        self._loop, self._thread = loop, thread

    def spawn(self, coroutine: Coroutine[Any, Any, None], *, is_short: bool = False) -> None:
        """Run a coroutine to its end or to `close`; from any thread. Its errors are logged.

        Args:
            coroutine: what to run.
            is_short: whether `wait_idle` should wait for it.
        """
        if self._loop is None:
            coroutine.close()
            return
        name = _SHORT if is_short else _LONG
        self._loop.call_soon_threadsafe(self._begin, self._loop, coroutine, name)

    def spawn_later(self, delay_s: float, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run what ``make`` returns, some seconds from now; from any thread."""
        loop = self._loop
        if loop is not None:
            begin = partial(self._begin_made, loop, make)
            loop.call_soon_threadsafe(loop.call_later, delay_s, begin)

    def repeat(self, function: Callable[[], object], *, every_s: float) -> None:
        """Call a function on the thread now, and again every so many seconds, until `close`; from
        any thread. Its errors are logged, and do not end that."""
        self.spawn(_repeat(function, every_s))

    def begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """`spawn` for callers on the thread itself."""
        self._begin(asyncio.get_running_loop(), coroutine, _LONG)

    def call(self, function: Callable[[], None]) -> None:
        """Call a function on the thread; from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(function)

    def run(self, coroutine: Coroutine[Any, Any, Any], *, timeout_s: float | None = None) -> Any:
        """Run a coroutine and wait for its result; from any other thread.

        Raises:
            TimeoutError: it took longer.
            RuntimeError: the thread does not run.
        """
        if self._loop is None:
            coroutine.close()
            raise RuntimeError(f"{self._name} does not run")
        future: Future[Any] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result(timeout_s)

    async def wait_idle(self, *, timeout_s: float) -> None:
        """Wait until short coroutines are through; those that run for ever are not waited for.

        Call it on the thread itself.
        """
        waiting = [task for task in self._tasks if task.get_name() == _SHORT]
        if waiting:
            await asyncio.wait(waiting, timeout=timeout_s)

    def close(self) -> None:
        """Cancel everything and join the thread. May be called twice."""
        loop, self._loop = self._loop, None
        thread, self._thread = self._thread, None
        if loop is None or thread is None:
            return
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_JOIN_TIMEOUT_S)
        if thread.is_alive():
            logger.error("%s did not stop within %g s", self._name, _JOIN_TIMEOUT_S)

    def _begin(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, None], name: str
    ) -> None:
        task = loop.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _begin_made(
        self, loop: asyncio.AbstractEventLoop, make: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        self._begin(loop, make(), _LONG)

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("an internal error on %s", self._name, exc_info=error)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            _cancel_all(loop)
        finally:
            loop.close()


async def _repeat(function: Callable[[], object], every_s: float) -> None:
    while True:
        try:
            function()
        except Exception:
            logger.exception("an internal error, in what is done every %g s", every_s)
        await asyncio.sleep(every_s)


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel every task and let go of every socket.

    A connection that is being accepted begins a task of its own, and one that was closed needs a
    few rounds of the loop, so this goes on until both have had the time.
    """
    for _ in range(_NUM_CLOSING_ROUNDS):
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(asyncio.sleep(0))
