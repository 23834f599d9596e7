"""How much Python runs in a step: counted in calls, not in time."""

from __future__ import annotations

import gc
import sys
from typing import Any

import numpy as np
import pytest
from scheduler_rig import draw

from pdcore import KVCacheManager, Limits, LRUBlockPool, Request, SamplingParams, UnifiedScheduler

BLOCK_SIZE = 16


class Counted:
    """A scheduler with ``n`` requests that decode, and the number of calls that a step makes."""

    def __init__(self, n: int, *, prompt: int = 17, spread: int = 1, caching: bool = True) -> None:
        manager = KVCacheManager(LRUBlockPool(8 * n + 1, BLOCK_SIZE), enable_prefix_caching=caching)
        limits = Limits(
            max_num_seqs=n, max_num_batched_tokens=n * (prompt + spread), max_model_len=256
        )
        self.scheduler = UnifiedScheduler(manager, limits=limits)
        for index in range(n):
            self.add(f"r{index}", np.arange(prompt + index % spread) + 100 * index)
        self.step()

    def add(self, name: str, prompt: Any, *, max_tokens: int = 64) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        self.scheduler.add_request(Request(name, prompt, sampling=sampling, eos_token_id=1))

    def step(self) -> int:
        """Run a step; return how many calls, of Python and of C, schedule and update made."""
        calls = 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        # Whoever watches collections, as hypothesis does, would be counted too.
        gc.disable()
        sys.setprofile(count)
        try:
            output = self.scheduler.schedule()
            sys.setprofile(None)
            result = draw(output, lowest=10)
            sys.setprofile(count)
            self.scheduler.update_from_output(output, result)
        finally:
            sys.setprofile(None)
            gc.enable()
        return calls


@pytest.mark.parametrize("caching", [True, False])
def test_a_step_in_which_no_row_changes_state_costs_the_same_calls_for_any_number(
    caching: bool,
) -> None:
    """4 requests or 200: the same calls, and few, fewer still once the steps ahead are known."""
    few, many = Counted(4, caching=caching), Counted(200, caching=caching)
    few_calls = [few.step() for _ in range(5)]
    assert few_calls == [many.step() for _ in range(5)]
    assert max(few_calls) <= 98
    assert max(few_calls[2:]) <= 80


def test_rows_of_all_lengths_cost_no_look_ahead() -> None:
    """With 16 of them one fills a block, and one needs a new one, in every step."""
    mixed = Counted(16, spread=16)
    calls = [mixed.step() for _ in range(2 * BLOCK_SIZE)]
    assert max(calls) <= 175
    assert mixed.scheduler._core.table.num_calm_steps == 0


def test_a_step_in_which_rows_fill_a_block_costs_a_constant_for_each() -> None:
    """All rows fill a block at once: at most 4 calls for each beyond a constant."""
    engines = {n: Counted(n) for n in (4, 200)}
    dearest = {n: max(engine.step() for _ in range(BLOCK_SIZE)) for n, engine in engines.items()}
    cheapest = {n: engine.step() for n, engine in engines.items()}
    assert cheapest[4] == cheapest[200]
    assert (dearest[200] - dearest[4]) / 196 <= 4
    assert dearest[4] - cheapest[4] <= 4 * 4 + 60


def test_what_waits_without_room_costs_no_calls() -> None:
    """With 1 or 2000 requests in the queue and no free row, a step makes the same calls."""
    few, many = Counted(4), Counted(4)
    few.add("waiting", np.arange(9))
    for index in range(2000):
        many.add(f"waiting {index}", np.arange(9))
    assert [few.step() for _ in range(4)] == [many.step() for _ in range(4)]


def test_an_arrival_costs_what_it_changes_however_many_run() -> None:
    """One admission beside 4 or 200 others: at most a few calls more."""
    costs = []
    for n in (4, 200):
        engine = Counted(n)
        engine.scheduler.abort_requests("r1")
        engine.step()
        engine.add("new", np.arange(90_000, 90_040))
        costs.append(engine.step())
    assert costs[1] - costs[0] <= 10


def test_arrivals_cost_less_together_than_one_by_one() -> None:
    """16 admissions in a step: a constant, and for each a third of what one costs alone."""
    costs = {}
    for num_new in (0, 1, 2, 16):
        engine = Counted(32)
        engine.scheduler.abort_requests([f"r{index}" for index in range(num_new)])
        engine.step()
        for index in range(num_new):
            engine.add(f"new {index}", np.arange(17) + 90_000 + 100 * index)
        costs[num_new] = engine.step()
    alone, each = costs[1] - costs[0], (costs[16] - costs[2]) / 14
    assert each <= 0.35 * alone
    assert each <= 75
