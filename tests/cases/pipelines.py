"""Engines with several steps under way, whose results come when somebody waits for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt
from harness import Engine

from pdcore.loop import BatchQueue
from pdcore.messages import GrammarBitmask
from pdcore.request import Request
from pdcore.scheduler import GrammarBackend, GrammarMatcher
from simulated_executors import SimulatedExecutor

DEPTHS = [1, 2, 3]
END = 7


class Text(GrammarMatcher):
    """Allows exactly the tokens of a text, one after the other.

    Attributes:
        tokens: what it was told.
        masked_after: how many tokens it had been told when it made each mask.
    """

    def __init__(self, text: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self.masked_after: list[int] = []
        self._text = text

    def accept(self, token_id: int) -> bool:
        self.tokens.append(token_id)
        return self.tokens == list(self._text[: len(self.tokens)])

    def fill_bitmask(self, bits: npt.NDArray[np.int32]) -> None:
        self.masked_after.append(len(self.tokens))
        token = self._text[len(self.tokens)]
        bits[token // 32] = np.array(1 << token % 32, np.uint32).view(np.int32)


class Texts(GrammarBackend):
    """Takes ``structured_output`` as the text."""

    vocab_size = 32_000

    def __init__(self) -> None:
        self.matchers: dict[str, Text] = {}

    def compile(self, request: Request) -> Future[GrammarMatcher]:
        future: Future[GrammarMatcher] = Future()
        matcher = Text(request.sampling.structured_output)
        self.matchers[request.request_id] = matcher
        future.set_result(matcher)
        return future


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
