"""Drives a runner with hand-made plans: the smallest stand-in for a scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from pdcore.kvcache.spec import KVCacheConfig
from pdcore.messages import GrammarBitmask, ModelRunnerOutput, NewRequestData, SchedulerOutput
from pdcore.request import SamplingParams
from pdcore.runner.gpu import GPUModelRunner

GREEDY = SamplingParams(temperature=0)


@attrs.define(eq=False)
class _Row:
    epoch: int
    num_tokens: int
    num_computed: int
    block_ids: list[int]
    output: list[int] = attrs.field(factory=list)


class RunnerDriver:
    """Keeps the rows and blocks of one runner, and checks nothing: the test does."""

    def __init__(self, runner: GPUModelRunner, *, num_blocks: int = 256) -> None:
        self.runner = runner
        spec = runner.get_kv_cache_spec()
        self.block_size = spec.block_size
        if runner._kv_cache is None:
            runner.initialize_from_config(KVCacheConfig(spec=spec, num_blocks=num_blocks))
        self.rows: dict[int, _Row] = {}
        self.errors: dict[int, str] = {}
        self.connector_meta: object = None
        self._free = list(range(runner._kv_cache.shape[0] - 1, 0, -1))
        self._new: list[NewRequestData] = []
        self._finished: list[int] = []
        self._epoch = 0
        self._step_id = 0

    def start(
        self,
        row: int,
        token_ids: Sequence[int],
        *,
        num_computed: int = 0,
        shared_blocks: Sequence[int] = (),
        sampling: SamplingParams = GREEDY,
        uid: int | None = None,
    ) -> None:
        """Give a row to a prompt; ``shared_blocks`` already hold its first ``num_computed``."""
        self._epoch += 1
        ids = np.asarray(token_ids, np.int32)
        blocks = list(shared_blocks)
        self._free = [block for block in self._free if block not in blocks]
        blocks += [self._free.pop() for _ in range(-(-ids.size // self.block_size) - len(blocks))]
        self.rows[row] = _Row(self._epoch, ids.size, num_computed, blocks)
        self._new.append(
            NewRequestData(
                row=row,
                epoch=self._epoch,
                uid=self._epoch if uid is None else uid,
                request_id=f"request-{self._epoch}",
                token_ids=ids,
                num_prompt_tokens=ids.size,
                num_computed_tokens=num_computed,
                block_ids=np.array(blocks, np.int32),
                sampling=sampling,
            )
        )

    def finish(self, row: int) -> None:
        """Give a row up, with its blocks."""
        self._free.extend(self.rows.pop(row).block_ids)
        self._finished.append(row)

    def plan(self, scheduled: Mapping[int, int]) -> SchedulerOutput:
        """Plan ``scheduled[row]`` tokens for each row, growing block tables where needed."""
        rows = [self.rows[row] for row in scheduled]
        counts = list(scheduled.values())
        deltas = []
        for row, state, count in zip(scheduled, rows, counts, strict=True):
            while len(state.block_ids) * self.block_size < state.num_computed + count:
                state.block_ids.append(self._free.pop())
                deltas.append((row, len(state.block_ids) - 1, state.block_ids[-1]))
        changes = np.array(deltas, np.int32).reshape(-1, 3)
        samples = [s.num_computed + c == s.num_tokens for s, c in zip(rows, counts, strict=True)]
        self._step_id += 1
        output = SchedulerOutput(
            step_id=self._step_id,
            rows=np.array(list(scheduled), np.int32),
            epochs=np.array([state.epoch for state in rows], np.int32),
            num_scheduled_tokens=np.array(counts, np.int32),
            num_computed_tokens=np.array([state.num_computed for state in rows], np.int32),
            samples=np.array(samples, np.bool_),
            scheduled_new_reqs=tuple(self._new),
            block_rows=changes[:, 0],
            block_positions=changes[:, 1],
            block_ids=changes[:, 2],
            finished_rows=np.array(self._finished, np.int32),
            connector_meta=self.connector_meta,
        )
        self._new, self._finished = [], []
        for state, count, is_drawn in zip(rows, counts, samples, strict=True):
            state.num_computed += count
            state.num_tokens += is_drawn
        return output

    def take(self, result: ModelRunnerOutput) -> dict[int, int]:
        """Note a step's tokens; return them by row."""
        tokens = dict(
            zip(result.rows.tolist(), result.sampled_token_ids[:, 0].tolist(), strict=True)
        )
        for row, token in tokens.items():
            self.rows[row].output.append(token)
        self.errors.update({error.row: error.cause for error in result.errors})
        return tokens

    def step(
        self, scheduled: Mapping[int, int], *, bitmask: GrammarBitmask | None = None
    ) -> dict[int, int]:
        """Plan, execute and sample one step; return the drawn tokens by row."""
        self.runner.execute_model(self.plan(scheduled))
        return self.take(self.runner.sample_tokens(bitmask))

    def prefill(self, row: int, *, chunk: int = 10**6) -> None:
        """Compute a row's prompt in chunks, until it draws its first token."""
        while not self.rows[row].output:
            state = self.rows[row]
            self.step({row: min(chunk, state.num_tokens - state.num_computed)})

    def decode(self, num_steps: int) -> None:
        """Decode every row for some steps."""
        for _ in range(num_steps):
            self.step(dict.fromkeys(self.rows, 1))

    def output(self, row: int) -> list[int]:
        """The tokens that a row has drawn."""
        return self.rows[row].output
