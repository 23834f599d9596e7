"""Starting the requests that a step admits: rows, blocks and keys for all of them at once."""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt

from pdcore.kvcache.manager import PrefixHit
from pdcore.request import RequestStatus
from pdcore.scheduler.core import Core
from pdcore.scheduler.plan import Plan
from pdcore.scheduler.state import RequestState, move

__all__ = ["Start", "Starting"]


@attrs.frozen(kw_only=True, eq=False)
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
        core, manager, plan = self._core, self._core.manager, self._plan
        self.num_blocks = 0
        self._first_keys.clear()
        states = [start.state for start in starts]
        self._count(starts)
        blocks = self._allocate(starts)
        rows = core.table.assign(
            states, [start.num_computed for start in starts], step=plan.step_id
        )
        manager.bind(rows, blocks, num_published=[start.num_published for start in starts])
        core.record(lambda: core.table.take_back(rows))
        for state in states:
            self._move(state)
        plan.admitted_rows += rows.tolist()
        plan.admitted_tokens += [start.num_tokens for start in starts]
        ends = [start.num_computed + start.num_tokens for start in starts]
        manager.publish_starts(rows, [state.sequence for state in states], ends, step=plan.step_id)

    def _count(self, starts: list[Start]) -> None:
        """Count what the prefix cache was asked for and what it had."""
        counters = self._core.counters
        before = counters.num_prefix_queried_tokens, counters.num_prefix_hit_tokens
        if self._core.manager.enable_prefix_caching:
            for start in starts:
                counters.num_prefix_queried_tokens += len(start.state.sequence)
                counters.num_prefix_hit_tokens += start.num_hit_tokens
        firsts = [start for start in starts if not start.state.was_admitted]
        for start in firsts:
            start.state.num_cached_tokens = start.num_hit_tokens
            start.state.was_admitted = True

        def undo() -> None:
            counters.num_prefix_queried_tokens, counters.num_prefix_hit_tokens = before
            for start in firsts:
                start.state.num_cached_tokens = 0
                start.state.was_admitted = False

        self._core.record(undo)

    def _allocate(self, starts: list[Start]) -> list[npt.NDArray[np.int32]]:
        """The blocks of each, those that it has first."""
        total = sum(start.num_fresh_blocks for start in starts)
        fresh = self._core.manager.pool.allocate(total)
        blocks, end = [], 0
        for start in starts:
            begin, end = end, end + start.num_fresh_blocks
            ids = fresh[begin:end]
            blocks.append(ids if start.blocks is None else np.concatenate((start.blocks, ids)))
        return blocks

    def _move(self, state: RequestState) -> None:
        before = state.block_ids, state.num_computed_tokens
        state.block_ids = None
        state.num_computed_tokens = 0
        move(state, RequestStatus.RUNNING)

        def undo() -> None:
            state.status = state.history.pop()
            state.block_ids, state.num_computed_tokens = before

        self._core.record(undo)
