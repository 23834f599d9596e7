"""Starting the requests that a step admits: rows, blocks and keys for all of them at once."""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt

from pdcore.kvcache.manager import PrefixHit
from pdcore.request import RequestStatus
from pdcore.scheduler.core import Core
from pdcore.scheduler.plan import Plan
from pdcore.scheduler.state import RequestState, move, move_back

__all__ = ["Start", "Starting"]

# What a start changes of a request: its blocks, computed and cached tokens, whether it had started.
_Before = tuple[npt.NDArray[np.int32] | None, int, int, bool]


@attrs.define(kw_only=True, eq=False)
class Start:
    """A request that was admitted.

    Args:
        state: the request.
        num_fresh_blocks: blocks to allocate behind those it has.
        num_computed: tokens whose KV is there.
        num_tokens: tokens to compute in this step.
        num_hit_tokens: tokens found in the local cache.
        num_published: blocks that have their keys already.
        blocks: int32, those it has, retained.
    """

    state: RequestState
    num_fresh_blocks: int
    num_computed: int
    num_tokens: int
    num_hit_tokens: int = 0
    num_published: int = 0
    blocks: npt.NDArray[np.int32] | None = None


class Starting:
    """What was admitted and has no row yet.

    Admitting one request costs the same array operations as admitting many, so they are collected,
    and started together when the pass ends. Nobody may tell the difference: whoever is to share
    blocks with a request that waits here, or looks at rows or pool, calls `run` before.

    Args:
        core: the scheduler's state.
        plan: where to put those that start.
    """

    def __init__(self, core: Core, plan: Plan) -> None:
        self._core = core
        self._plan = plan
        self._starts: list[Start] = []
        self._first_keys: set[bytes] = set()
        self.num_blocks = 0

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, start: Start) -> None:
        """Admit a request; there must be room for it."""
        self._starts.append(start)
        self.num_blocks += start.num_fresh_blocks
        self._first_keys.update(start.state.sequence.keys[:1])
        self._plan.token_budget -= start.num_tokens

    def may_share(self, state: RequestState, hit: PrefixHit) -> bool:
        """Whether starting these first could change what is cached of a request's prefix."""
        if not self._starts:
            return False
        keys = state.sequence.keys
        return hit.num_tokens > 0 or (bool(keys) and keys[0] in self._first_keys)

    def run(self) -> None:
        """Give rows, blocks and keys to all, in order."""
        starts, self._starts = self._starts, []
        if not starts:
            return
        core, plan = self._core, self._plan
        self.num_blocks = 0
        self._first_keys.clear()
        states = [start.state for start in starts]
        blocks = self._allocate(starts)
        rows = core.table.assign(
            states, [start.num_computed for start in starts], step=plan.step_id
        )
        befores = [self._begin(start) for start in starts]
        core.record(lambda: self._take_back(starts, rows, befores))
        plan.admitted_rows += rows
        plan.admitted_tokens += [start.num_tokens for start in starts]
        core.manager.bind(
            rows,
            blocks,
            [state.sequence for state in states],
            num_published=[start.num_published for start in starts],
            num_tokens=[start.num_computed + start.num_tokens for start in starts],
            step=plan.step_id,
        )

    def _allocate(self, starts: list[Start]) -> list[npt.NDArray[np.int32]]:
        """The blocks of each, those that it has first."""
        pool = self._core.manager.pool
        if len(starts) == 1 and starts[0].blocks is None:
            return [pool.allocate(starts[0].num_fresh_blocks)]
        fresh = pool.allocate(sum(start.num_fresh_blocks for start in starts))
        blocks, end = [], 0
        for start in starts:
            begin, end = end, end + start.num_fresh_blocks
            ids = fresh[begin:end]
            blocks.append(ids if start.blocks is None else np.concatenate((start.blocks, ids)))
        return blocks

    def _begin(self, start: Start) -> _Before:
        """Make a request a running one, and count what the prefix cache had of it."""
        counters, state = self._core.counters, start.state
        before = (
            state.block_ids,
            state.num_computed_tokens,
            state.num_cached_tokens,
            state.was_admitted,
        )
        state.block_ids = None
        state.num_computed_tokens = 0
        if not state.was_admitted:
            state.num_cached_tokens = start.num_hit_tokens
            state.was_admitted = True
        if self._core.manager.enable_prefix_caching:
            counters.num_prefix_queried_tokens += len(state.sequence)
            counters.num_prefix_hit_tokens += start.num_hit_tokens
        move(state, RequestStatus.RUNNING)
        return before

    def _take_back(self, starts: list[Start], rows: list[int], befores: list[_Before]) -> None:
        counters = self._core.counters
        self._core.table.take_back(rows)
        for start, before in zip(starts, befores, strict=True):
            state = start.state
            move_back(state)
            (
                state.block_ids,
                state.num_computed_tokens,
                state.num_cached_tokens,
                state.was_admitted,
            ) = before
            if self._core.manager.enable_prefix_caching:
                counters.num_prefix_queried_tokens -= len(state.sequence)
                counters.num_prefix_hit_tokens -= start.num_hit_tokens
