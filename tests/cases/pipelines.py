"""Engines with several steps under way, whose results come when somebody waits for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness import Engine

from pdcore.loop import BatchQueue
from pdcore.messages import GrammarBitmask
from simulated_executors import SimulatedExecutor

DEPTHS = [1, 2, 3]
END = 7


class Pipeline:
    """A batch queue over a harness's engine, whose plans run only when somebody waits."""

    def __init__(
        self,
        engine: Engine,
        *,
        depth: int = 2,
        make_executor: Callable[[Any], SimulatedExecutor] = SimulatedExecutor,
    ) -> None:
        self.engine = engine
        self.executor = make_executor(engine.runner)
        self.queue = BatchQueue(engine.scheduler, self.executor, depth=depth)
        self.produced: list[list[str]] = []

    def step(self) -> None:
        result = self.queue.step()
        self.engine.scheduler.check()
        self.produced.append(result.request_ids[: result.token_ids.size])
        for event in result.outputs:
            self.engine._take(event)

    def run(self) -> None:
        while self.engine.scheduler.has_requests():
            self.step()
            assert len(self.produced) < 1000, self.engine.scheduler


class MaskBlind(SimulatedExecutor):
    """Loses the masks on the way to the runner."""

    def sample_tokens(self, bitmask: GrammarBitmask | None, *, non_block: bool = False) -> Any:
        return super().sample_tokens(None, non_block=non_block)
