"""The pass over the running rows: who computes how many tokens, and who gives way."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pdcore.kvcache.manager import KVCacheManager
from pdcore.masks import all_set, any_set
from pdcore.rows import ONE
from pdcore.scheduler.core import Core
from pdcore.scheduler.plan import Plan
from pdcore.scheduler.policy import RunningView, SchedulingPolicy
from pdcore.scheduler.publishing import publish_filled, publish_full
from pdcore.scheduler.table import RunningBatch

__all__ = ["RunningPass", "running_view"]

Rows = npt.NDArray[np.intp]


def running_view(core: Core, rows: Rows) -> RunningView:
    """The columns of some rows, for a policy."""
    table = core.table
    states = [table.state(row) for row in rows.tolist()]
    return RunningView(
        requests=tuple(state.request for state in states),
        priority=table.priority[rows],
        arrival_time=np.array([state.arrival_time for state in states], np.float64),
        num_tokens=table.num_tokens[rows],
        num_computed_tokens=table.num_computed[rows],
        num_blocks=core.manager.tables.num_blocks[rows],
    )


class RunningPass:
    """Plans the rows in running order, each as many tokens as it is behind.

    As long as budget and blocks suffice, that is a fixed number of array operations. From the
    first row that finds no block on, rows are visited one by one: each takes the blocks of the
    policy's victims until it fits or is the victim itself. The number of tokens, the victims and
    their order are those of vLLM's scheduler.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._has_chunk_hook = type(core.policy).chunk is not SchedulingPolicy.chunk
        self._was_calm = False

    def run(self, plan: Plan) -> None:
        """Fill in ``plan.rows`` and ``plan.num_tokens`` and advance those rows' counters."""
        core, table, manager = self._core, self._core.table, self._core.manager
        if not len(table) or self._take_a_token_each(plan):
            return
        table.unsettle()
        self._was_calm = False
        rows = table.batch.at
        want = self._wanted(rows)
        if self._has_chunk_hook and any_set(want > 1):
            want = self._chunked(rows, want, plan.token_budget)
        take = want
        if int(want.sum()) > plan.token_budget:
            before = np.cumsum(want) - want
            take = np.clip(plan.token_budget - before, 0, want).astype(np.intp)
        computed = table.num_computed[rows]
        if manager.sliding_window is not None:
            plan.deltas.append(manager.tables.prune(rows, self._processed(rows)))
        needed = manager.tables.needed_blocks(rows, computed + take)
        # A row that runs no token in this step needs no block for it.
        needed[take == 0] = 0
        fits = needed.size
        if int(needed.sum()) > core.manager.pool.num_free_blocks:
            fits = int(
                np.searchsorted(np.cumsum(needed), manager.pool.num_free_blocks, side="right")
            )
        plan.deltas.append(manager.tables.grow(rows[:fits], needed[:fits]))
        if fits < rows.size:
            rows, take = self._one_by_one(plan, rows, want, take, fits)
        if not all_set(take > 0):
            rows, take = rows[take > 0], take[take > 0]
        plan.rows, plan.num_tokens = rows, take
        plan.token_budget -= int(take.sum())
        self._publish(plan)

    def _take_a_token_each(self, plan: Plan) -> bool:
        """Plan a decode step for everybody, if that is all there is to plan: most steps are so."""
        core, table = self._core, self._core.table
        batch = table.batch
        num_rows = batch.at.size
        if (
            not table.is_level
            or num_rows > plan.token_budget
            or core.manager.sliding_window is not None
        ):
            return False
        if table.num_calm_steps and not core.in_flight:
            table.num_calm_steps -= 1
        elif not self._grow_and_publish(plan, batch):
            return False
        plan.rows, plan.num_tokens = batch.at, batch.ones
        plan.token_budget -= num_rows
        return True

    def _grow_and_publish(self, plan: Plan, batch: RunningBatch) -> bool:
        """Give rows the blocks that they need for one more token, and publish those they fill.

        Where no row did either in two such steps, this counts how many more that will be so.

        Returns:
            False, with no block taken and no key published, if there is more to decide than that.
        """
        core, table, manager = self._core, self._core.table, self._core.manager
        table.num_calm_steps = 0
        computed = table.num_computed[batch.index]
        if core.in_flight and (
            table.num_with_matcher or any_set(computed + ONE >= table.limit[batch.index])
        ):
            return False
        is_calm = True
        full = manager.tables.full_rows(batch.index, computed)
        if any_set(full):
            growing = batch.at[full]
            if growing.size > manager.pool.num_free_blocks:
                return False
            plan.deltas.append(manager.tables.add_blocks(growing))
            is_calm = False
        if manager.enable_prefix_caching:
            known = computed + ONE
            if core.in_flight:
                known = np.minimum(known, table.num_tokens[batch.index])
            filling = manager.tables.filling(batch.index, known)
            if any_set(filling):
                publish_full(core, batch.at[filling], known[filling], step=plan.step_id)
                is_calm = False
        if is_calm and self._was_calm and not core.in_flight:
            # Looking ahead costs about what one calm step saves. Where some row fills a block in
            # most steps, two calm ones in a row are rare, so little is lost.
            table.look_ahead(batch, computed)
        self._was_calm = is_calm
        return True

    def _wanted(self, rows: Rows) -> Rows:
        """How many tokens each row is behind, within its cap."""
        table, limits = self._core.table, self._core.limits
        num_in_flight = table.num_in_flight[rows]
        planned = table.num_tokens[rows] + num_in_flight
        want = planned - table.num_computed[rows]
        if self._core.in_flight:
            # With all its tokens on the way, a row has nothing to do but to wait for them; so has
            # one whose tokens the workers must be told before they are all known here, and one
            # whose grammar must see its last token before it can say what is allowed next.
            waits = (
                (planned >= table.limit[rows]) | table.needs_refresh[rows] | table.has_matcher[rows]
            )
            want[waits & (num_in_flight > 0)] = 0
        threshold = limits.long_prefill_token_threshold
        if threshold and len(self._core.requests) > 1:
            np.minimum(want, threshold, out=want)
        return want

    def _chunked(self, rows: Rows, want: Rows, budget: int) -> Rows:
        """Ask the policy about every row that lacks more than one token."""
        core = self._core
        for index in np.flatnonzero(want > 1).tolist():
            state = core.table.state(int(rows[index]))
            wanted = int(want[index])
            try:
                answer = int(core.policy.chunk(state.request, wanted, budget))
                want[index] = max(1, min(answer, wanted))
            except Exception as error:
                core.failing.append((state, f"the policy's chunk() raised {error!r}"))
                want[index] = 0
        return want

    def _one_by_one(
        self, plan: Plan, rows: Rows, want: Rows, take: Rows, start: int
    ) -> tuple[Rows, Rows]:
        """Visit the rows from ``start`` on, in order, preempting where blocks are short.

        Rows before ``start`` have their blocks already, but may still become victims; what was
        planned for them goes back into the budget.
        """
        core, table, manager = self._core, self._core.table, self._core.manager
        order, wanted, taken = rows.tolist(), want.tolist(), take.tolist()
        taken[start:] = [0] * (len(order) - start)
        computed = table.num_computed[rows].tolist()
        num_blocks = manager.tables.num_blocks[rows].tolist()
        budget = plan.token_budget - sum(taken)
        growing = _Growing(plan, manager)
        index = start
        while index < len(order) and budget > 0:
            num_tokens = min(wanted[index], budget)
            if num_tokens == 0:
                index += 1
                continue
            needed = max(manager.blocks_for(computed[index] + num_tokens) - num_blocks[index], 0)
            if needed > growing.num_free_blocks and self._is_pruning():
                index += 1
                continue
            gave_way = False
            while needed > growing.num_free_blocks and not gave_way:
                growing.run()
                victim = self._victim(order)
                budget += taken[victim]
                gave_way = victim == index
                core.preempt(table.state(order[victim]))
                plan.preempted = True
                for column in (order, wanted, taken, computed, num_blocks):
                    del column[victim]
                index -= victim < index
            if gave_way:
                break
            growing.add(order[index], needed)
            taken[index] = num_tokens
            budget -= num_tokens
            index += 1
        growing.run()
        if plan.preempted:
            plan.drop_vacated(table.states)
        return np.array(order, np.intp), np.array(taken, np.intp)

    def _is_pruning(self) -> bool:
        """Whether a row without room had better wait: blocks come free with the steps in flight.

        Behind a sliding window a row gives blocks back, but only once nothing in flight reads them.
        """
        core = self._core
        return core.manager.sliding_window is not None and bool(core.in_flight)

    def _processed(self, rows: Rows) -> Rows:
        """The tokens of each row whose steps are done: no step in flight reads behind them."""
        core = self._core
        processed = core.table.num_computed[rows].copy()
        for output in core.in_flight:
            planned = np.zeros(core.table.num_rows, np.intp)
            current = core.table.epoch[output.rows] == output.epochs
            planned[output.rows[current]] = output.num_scheduled_tokens[current]
            processed -= planned[rows]
        return processed

    def _victim(self, order: list[int]) -> int:
        core = self._core
        if type(core.policy).victim is SchedulingPolicy.victim:
            return len(order) - 1
        try:
            index = int(core.policy.victim(running_view(core, np.array(order, np.intp))))
            if not 0 <= index < len(order):
                raise IndexError(f"victim() returned {index}, of {len(order)} running requests")
        except Exception as error:
            core.complain("the policy's victim() failed; the last to start gives way", error)
            core.counters.num_policy_errors += 1
            return len(order) - 1
        return index

    def _publish(self, plan: Plan) -> None:
        """Publish the blocks that this step fills, so that admissions can share them."""
        table = self._core.table
        known = np.minimum(
            table.num_computed[plan.rows] + plan.num_tokens, table.num_tokens[plan.rows]
        )
        publish_filled(self._core, plan.rows, known, step=plan.step_id)


class _Growing:
    """Rows that were found to fit, one after the other, and get their blocks together."""

    def __init__(self, plan: Plan, manager: KVCacheManager) -> None:
        self._plan = plan
        self._manager = manager
        self._rows: list[int] = []
        self._needed: list[int] = []
        self._num_blocks = 0

    @property
    def num_free_blocks(self) -> int:
        """What the pool has left when all have theirs."""
        return self._manager.pool.num_free_blocks - self._num_blocks

    def add(self, row: int, needed: int) -> None:
        if needed:
            self._rows.append(row)
            self._needed.append(needed)
            self._num_blocks += needed

    def run(self) -> None:
        """Hand out the blocks. Before a row gives way, since it may be one of these."""
        if self._rows:
            rows, needed = np.array(self._rows, np.intp), np.array(self._needed, np.intp)
            self._rows, self._needed, self._num_blocks = [], [], 0
            self._plan.deltas.append(self._manager.tables.grow(rows, needed))
