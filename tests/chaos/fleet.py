"""The engines of a run, and what befalls them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import wait
from typing import Any

import attrs
from adversary import EngineFault
from chaos_messages import Counts, Progress, Settled
from engine_process import EngineProcess
from timers import Timers

__all__ = ["Fleet"]


class Fleet:
    """Finds engines, hears them, and kills, stops and restarts them.

    Args:
        engines: by name; a restart puts the new process in the old one's place.
        timers: for what ends later.
        lost: is told of every engine that is gone, and whether it was killed or died by itself.

    Attributes:
        num_kills: how many engines the adversary has killed.
        faults: what befell engines.
    """

    def __init__(
        self,
        engines: dict[str, EngineProcess],
        timers: Timers,
        *,
        lost: Callable[[EngineProcess, bool], None],
    ) -> None:
        self._engines = engines
        self._timers = timers
        self._lost = lost
        self._num_lives: Counter[str] = Counter()
        self._counts: dict[tuple[str, int], Counts] = {}
        self.num_kills = 0
        self.faults: Counter[str] = Counter()

    def __iter__(self) -> Iterator[EngineProcess]:
        return iter(tuple(self._engines.values()))

    def __getitem__(self, name: str) -> EngineProcess:
        return self._engines[name]

    @property
    def is_complete(self) -> bool:
        """Whether every engine serves."""
        return all(engine.is_ready and not engine.is_stopped for engine in self)

    @property
    def counts(self) -> Counts:
        """Totals over all lives of all engines, as far as they were told."""
        totals = [attrs.asdict(counts) for counts in self._counts.values()]
        return Counts(**{name: sum(t[name] for t in totals) for name in attrs.asdict(Counts())})

    def reachable(self, wanted: str, names: tuple[str, ...]) -> EngineProcess | None:
        """The engine that is wanted, or another of ``names`` if that one is not there."""
        for name in (wanted, *names):
            if self._engines[name].is_ready:
                return self._engines[name]
        return None

    def receive(self, timeout_s: float) -> Iterator[tuple[EngineProcess, Any]]:
        """What engines say, waiting for it if need be."""
        alive = [engine for engine in self if not engine.connection.closed]
        ready = wait([engine.connection for engine in alive], timeout=timeout_s)
        for engine in alive:
            if engine.connection not in ready:
                continue
            try:
                for message in engine.receive():
                    if isinstance(message, Progress | Settled):
                        life = self._num_lives[engine.name]
                        self._counts[engine.name, life] = message.counts
                    yield engine, message
            except (EOFError, OSError):
                engine.kill()
                self._gone(engine, restarts_after_s=0.0, was_killed=False)

    def strike(self, fault: EngineFault) -> None:
        """Kill or stop an engine, and undo it later; nothing if it is down already."""
        engine = self._engines[fault.engine]
        if not engine.is_ready or engine.is_stopped:
            return
        self.faults[f"{fault.kind} {fault.engine[0]}"] += 1
        if fault.kind == "stop":
            engine.stop()
            self._timers.after(fault.seconds, partial(self._go_on, engine))
        else:
            self.num_kills += 1
            engine.kill()
            self._gone(engine, restarts_after_s=fault.seconds, was_killed=True)

    def _go_on(self, engine: EngineProcess) -> None:
        if engine.is_stopped:
            engine.go_on()

    def _gone(self, engine: EngineProcess, *, restarts_after_s: float, was_killed: bool) -> None:
        engine.is_ready = False
        self._timers.after(restarts_after_s, partial(self._restart, engine.name))
        self._lost(engine, was_killed)

    def _restart(self, name: str) -> None:
        self._num_lives[name] += 1
        self._engines[name] = EngineProcess(self._engines[name].settings)
