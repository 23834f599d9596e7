"""Two runners side by side, one with graphs: the same random steps for both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from graph_emulation import RecordedGraphs
from runner_driver import RunnerDriver

from pdcore.request import SamplingParams
from pdcore.runner.gpu import GPUModelRunner
from pdcore.scheduler.base import Limits

__all__ = ["LIMITS", "RunnerPair", "make_runner"]

LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=48)


def make_runner(model: Path, **settings: Any) -> GPUModelRunner:
    """A runner on the CPU over small blocks."""
    defaults = {
        "limits": LIMITS,
        "device": "cpu",
        "block_size": 4,
        "kv_cache_memory_bytes": 1 << 20,
        "num_threads": 1,
        "seed": 0,
        "keep_logits": True,
    }
    return GPUModelRunner(model, **{**defaults, **settings})


class RunnerPair:
    """Runs every step twice, and asserts that nothing but the null block differs.

    Slots that hold no token are NaN, the null block included.

    Args:
        model: a checkpoint.
        graphs: what captures the one runner's decodes.
        measure: whether the trial step is run first.
        settings: of both runners.
    """

    def __init__(
        self,
        model: Path,
        *,
        graphs: RecordedGraphs | None = None,
        measure: bool = False,
        **settings: Any,
    ) -> None:
        self.graphs = RecordedGraphs() if graphs is None else graphs
        self.num_eager_decodes = 0
        runners = [
            make_runner(model, graph_capture=capture, **settings) for capture in (self.graphs, None)
        ]
        if measure:
            for runner in runners:
                runner.determine_available_memory()
        self._drivers = [RunnerDriver(runner, num_blocks=130) for runner in runners]
        self.driver = self._drivers[0]
        self._prompts: dict[int, list[int]] = {}
        for driver in self._drivers:
            driver.runner._kv_cache.fill_(torch.nan)

    def run_at_random(self, seed: int, *, num_steps: int) -> None:
        """Start, chunk, decode and end rows for some steps."""
        rng = np.random.default_rng(seed)
        for _ in range(num_steps):
            for row in list(self.driver.rows):
                is_full = self.driver.rows[row].num_tokens == LIMITS.max_model_len
                if is_full or rng.random() < 0.04:
                    self._finish(row)
            for row in sorted(set(range(8)) - set(self.driver.rows)):
                if rng.random() < 0.15 or not self.driver.rows:
                    self._start(row, rng)
            self._step(self._choose(rng))

    def _start(self, row: int, rng: np.random.Generator) -> None:
        prompt = rng.integers(0, 128, rng.integers(1, 21)).tolist()
        shared: list[int] = []
        if self._prompts and rng.random() < 0.4:
            source = int(rng.choice(list(self._prompts)))
            state = self.driver.rows[source]
            num_written = min(state.num_computed, len(self._prompts[source])) // 4
            shared = state.block_ids[:num_written]
            prompt = self._prompts[source][: 4 * num_written] + prompt
        sampling = SamplingParams(temperature=float(rng.choice([0, 0.9])), top_k=20, seed=row)
        for driver in self._drivers:
            driver.start(
                row,
                prompt,
                num_computed=4 * len(shared),
                shared_blocks=shared,
                sampling=sampling,
                uid=row,
            )
        self._prompts[row] = prompt

    def _finish(self, row: int) -> None:
        del self._prompts[row]
        for driver in self._drivers:
            blocks = driver.rows[row].block_ids
            driver.finish(row)
            used = {block for state in driver.rows.values() for block in state.block_ids}
            driver._free = [b for b in dict.fromkeys(driver._free) if b not in used]
            driver.runner._kv_cache[[b for b in blocks if b not in used]] = torch.nan

    def _choose(self, rng: np.random.Generator) -> dict[int, int]:
        # Any of the rows, in any order, so that batches of every size come up.
        rows = rng.permutation(list(self.driver.rows)).tolist()[: rng.integers(1, 9)]
        behind = [
            self.driver.rows[row].num_tokens - self.driver.rows[row].num_computed for row in rows
        ]
        if rng.random() < 0.3 or max(behind) > 1:
            room = LIMITS.max_num_batched_tokens
            # Whole prompts, all but their last token, or a token alone.
            counts = [int(rng.choice([n, max(n - 1, 1), 1])) for n in behind]
            fits = np.cumsum(counts) <= room
            return {row: n for row, n, fit in zip(rows, counts, fits, strict=True) if fit}
        return dict.fromkeys(rows, 1)

    def _step(self, scheduled: dict[int, int]) -> None:
        before = sum(self.graphs.num_replays)
        mine, theirs = (driver.step(scheduled) for driver in self._drivers)
        if set(scheduled.values()) == {1} and before == sum(self.graphs.num_replays):
            self.num_eager_decodes += 1
        assert mine == theirs
        assert self._drivers[0].errors == self._drivers[1].errors == {}
        ours, other = (driver.runner for driver in self._drivers)
        if mine:
            torch.testing.assert_close(ours.logits, other.logits, rtol=0, atol=1e-3)
        caches = [runner._kv_cache for runner in (ours, other)]
        torch.testing.assert_close(*(c[1:] for c in caches), rtol=0, atol=1e-4, equal_nan=True)
        for cache in caches:
            cache[0] = torch.nan
