"""Random lives driven by `BatchQueue`, on an executor that lags and fails at any place."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from engine_simulation import Simulation
from pd_simulation import PDEngine
from pdcore import RequestOutput
from pdcore.errors import ExecutorError
from pdcore.loop import BatchQueue
from simulated_executors import SimulatedExecutor

__all__ = ["PipelinedPDEngine", "PipelinedSimulation"]


class _Pipeline:
    """A batch queue and its executor, shaken at random."""

    def __init__(self, random: Random, engine: Any, *, depth: int, probability: float) -> None:
        self._random = random
        self._scheduler = engine.scheduler
        self._probability = probability
        self.executor = SimulatedExecutor(engine.runner, trouble=self._trouble)
        self.queue = BatchQueue(
            engine.scheduler, self.executor, depth=depth, aborts=lambda: engine.aborts()
        )

    def step(self) -> list[RequestOutput]:
        """One step, or what is left of it when something goes wrong."""
        while self.executor.num_queued and self._random.random() > 0.5:
            self.executor.run_next()
        results = []
        try:
            if self._random.random() > 0.95:
                results.extend(self.queue.drain())
                assert not self.queue
                self._scheduler.reset_prefix_cache(preempt_running=self._random.random() > 0.5)
            else:
                results.append(self.queue.step())
        except (ExecutorError, KeyboardInterrupt) as error:
            # A wait that is interrupted while the pipe is emptied leaves the rest to the next call.
            if isinstance(error, ExecutorError):
                assert not self.queue
                assert not self.executor.num_queued
        self._scheduler.check()
        assert self._scheduler.stats().num_in_flight == len(self.queue)
        return [output for result in results for output in result.outputs]

    def _trouble(self, place: str) -> BaseException | None:
        if self._random.random() < 1 - self._probability:
            return None
        return KeyboardInterrupt() if place == "wait" else ExecutorError(f"{place} failed")


class PipelinedSimulation(Simulation):
    """One engine whose loop is a batch queue."""

    def __init__(self, random: Random, *, depth: int) -> None:
        super().__init__(random, depth=depth)
        probability = random.choice((0.0, 0.02, 0.1))
        self.pipeline = _Pipeline(random, self, depth=depth, probability=probability)

    def aborts(self) -> list[str]:
        names = list(self.ledger.requests)
        return [self.random.choice(names)] if names and self.rarely(0.05) else []

    def step(self) -> None:
        for output in self.pipeline.step():
            self.ledger.take(output)


class PipelinedPDEngine(PDEngine):
    """One side of a pair whose loop is a batch queue."""

    def __init__(self, random: Random, *args: Any, depth: int, **kwargs: Any) -> None:
        super().__init__(random, *args, depth=depth, **kwargs)
        probability = random.choice((0.0, 0.02, 0.05))
        self.pipeline = _Pipeline(random, self, depth=depth, probability=probability)

    def aborts(self) -> list[str]:
        return []

    def step(self) -> Iterator[RequestOutput]:
        for output in self.pipeline.step():
            self.ledger.take(output)
            if output.finish_reason is not None:
                yield output
