"""The fake runner as a real model would be: what it reads from foreign KV shows in its tokens."""

from __future__ import annotations

import random
import time
from typing import Any

from pdcore.kvcache.spec import KVCacheConfig
from pdcore.messages import GrammarBitmask, SchedulerOutput
from pdcore.testing.errors import StaleKV
from pdcore.testing.fake_rows import FakeRow, Span
from pdcore.testing.fake_runner import FakeKVRunner

__all__ = ["MisreadingRunner"]

_NUM_SPECIAL_TOKENS = 4


class MisreadingRunner(FakeKVRunner):
    """Draws wrong tokens from wrong KV, where `FakeKVRunner` would raise.

    No engine notices foreign KV by itself. So a protection that fails has to show where it shows in
    the field: in what the client is told.

    Args:
        device_s: how long a forward pass takes.
        num_steps_per_fault: one step in so many fails, before anything of it is applied.
        rng: draws these.
        options: of `FakeKVRunner`.

    Attributes:
        misreads: what was read that was not the row's own, in words.
    """

    def __init__(
        self, *, device_s: float, num_steps_per_fault: int, rng: random.Random, **options: Any
    ) -> None:
        super().__init__(step_fault=self._draw_fault, **options)
        self._device_s = device_s
        self._num_steps_per_fault = num_steps_per_fault
        self._rng = rng
        self._spoiled: set[FakeRow] = set()
        self.misreads: list[str] = []

    def initialize_from_config(self, config: KVCacheConfig) -> None:
        super().initialize_from_config(config)
        memory = self._initialized().memory
        attend = memory.attend

        def attend_to_anything(step_id: int, span: Span) -> None:
            try:
                attend(step_id, span)
            except StaleKV as error:
                self._spoiled.add(span.row)
                self.misreads.append(str(error))

        memory.attend = attend_to_anything  # type: ignore[method-assign]

    def execute_model(self, output: SchedulerOutput) -> None:
        super().execute_model(output)
        if output.rows.size:
            time.sleep(self._device_s)

    def _run_row(self, span: Span, bitmask: GrammarBitmask | None) -> int | str | None:
        token = super()._run_row(span, bitmask)
        if span.row not in self._spoiled or not isinstance(token, int):
            return token
        num_ordinary = self.model.vocab_size - _NUM_SPECIAL_TOKENS
        return _NUM_SPECIAL_TOKENS + (token - _NUM_SPECIAL_TOKENS + 1) % num_ordinary

    def _draw_fault(self, output: SchedulerOutput) -> Exception | None:
        if not self._num_steps_per_fault or self._rng.randrange(self._num_steps_per_fault):
            return None
        return RuntimeError("the worker failed this step, as the adversary wanted")
