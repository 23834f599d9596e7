"""Turning a plan into the message that the workers get."""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt

from pdcore.kvcache.tables import BlockTableDelta
from pdcore.masks import all_set
from pdcore.messages import NewRequestData, SchedulerOutput
from pdcore.rows import ONE, index_of
from pdcore.scheduler.core import Core
from pdcore.scheduler.plan import Plan
from pdcore.scheduler.state import RequestState

__all__ = ["Dispatch"]

Rows = npt.NDArray[np.intp]

_NO_ROWS = np.zeros(0, np.int32)


class OrdersLost(Exception):
    """The connector could not say what the workers are to load, and these rows rely on it."""

    def __init__(self, states: list[RequestState], error: Exception) -> None:
        super().__init__(f"{len(states)} rows of this step need a load that was not ordered")
        self.states = states
        self.error = error


class Dispatch:
    """Advances the counters of the rows that run and describes the step to the workers.

    Rows that the workers know are told by what changed; new ones, and those whose last step
    failed on the way, in full.
    """

    def __init__(self, core: Core) -> None:
        self._core = core

    def run(self, plan: Plan) -> SchedulerOutput:
        """Advance the counters of the rows that run, and put the plan into words."""
        core, table = self._core, self._core.table
        batch = table.batch_of(plan.rows)
        if plan.admitted_rows and plan.num_rows == len(table):
            # Rows run in running order, so that all of them are the table's batch.
            batch = table.batch
        rows = plan.all_rows() if batch is None else batch.at
        index = rows if batch is None else batch.index
        computed = table.num_computed[index]
        before = computed.astype(np.int32)
        if batch is not None and plan.num_tokens is batch.ones:
            after = computed + ONE
            samples, num_draws, num_planned = batch.all_sample, ONE, rows.size
            num_scheduled = batch.num_scheduled
        else:
            num_tokens = plan.all_tokens()
            num_scheduled = num_tokens.astype(np.int32)
            after = computed + num_tokens
            samples = after == table.num_tokens[index] + table.num_in_flight[index]
            # As integers, since numpy adds up a mask by way of a buffer.
            num_draws = samples.astype(np.int64)
            num_planned = core.limits.max_num_batched_tokens - plan.token_budget
            table.is_level = rows.size == len(table) and all_set(samples)
        new_reqs, delta = self._describe_new(plan, before)
        # From here to what undoes it nothing can fail.
        table.num_computed[index] = after
        table.num_in_flight[index] += num_draws
        core.counters.num_steps += 1
        core.counters.num_scheduled_tokens += num_planned
        finished_rows, core.finished_rows = core.finished_rows, []

        def undo() -> None:
            core.finished_rows = finished_rows
            table.unsettle()
            table.num_computed[rows] = before
            table.num_in_flight[rows] -= num_draws
            core.counters.num_steps -= 1
            core.counters.num_scheduled_tokens -= num_planned

        core.record(undo)
        output = SchedulerOutput(
            step_id=plan.step_id,
            rows=rows.astype(np.int32) if batch is None else batch.rows,
            epochs=table.epoch[rows] if batch is None else batch.epochs,
            num_scheduled_tokens=num_scheduled,
            num_computed_tokens=before,
            samples=samples,
            scheduled_new_reqs=new_reqs,
            block_rows=delta.rows.astype(np.int32) if delta.ids.size else _NO_ROWS,
            block_positions=delta.positions.astype(np.int32) if delta.ids.size else _NO_ROWS,
            block_ids=delta.ids,
            finished_rows=np.array(finished_rows, np.int32) if finished_rows else _NO_ROWS,
            num_pool_blocks=core.manager.pool.num_blocks,
            pool_block_size=core.manager.block_size,
        )
        return output if core.connector is None else self._with_meta(output, plan)

    def _with_meta(self, output: SchedulerOutput, plan: Plan) -> SchedulerOutput:
        connector = self._core.connector
        assert connector is not None
        try:
            meta = connector.build_connector_meta(output)
        except Exception as error:
            started = map(self._core.table.state, plan.admitted_rows)
            relying = [state for state in started if state.load_step == output.step_id]
            if relying:
                # Their rows would read blocks that nobody was told to fill.
                raise OrdersLost(relying, error) from error
            told = "the connector's build_connector_meta() raised; its loads time out"
            self._core.complain(told, error)
            return output
        return output if meta is None else attrs.evolve(output, connector_meta=meta)

    def _describe_new(
        self, plan: Plan, computed: npt.NDArray[np.int32]
    ) -> tuple[tuple[NewRequestData, ...], BlockTableDelta]:
        """Rows that the workers must be told of in full, and the table changes of the others."""
        table = self._core.table
        delta = BlockTableDelta.join(plan.deltas)
        if not (plan.admitted_rows or table.num_to_refresh):
            return (), delta
        refreshed: tuple[NewRequestData, ...] = ()
        if table.num_to_refresh:
            refreshed, delta = self._describe_anew(plan, computed, delta)
        # Those admitted in this step come last. Their tail buffers hold nothing but the end of
        # their sequence.
        rows = plan.admitted_rows
        if not rows:
            return refreshed, delta
        started = map(
            _new_request_data,
            rows,
            table.epoch[index_of(rows)].tolist(),
            [table.state(row) for row in rows],
            computed[plan.rows.size :].tolist(),
            plan.admitted_blocks,
        )
        return (*refreshed, *started), delta

    def _describe_anew(
        self, plan: Plan, computed: npt.NDArray[np.int32], delta: BlockTableDelta
    ) -> tuple[tuple[NewRequestData, ...], BlockTableDelta]:
        """The running rows whose last step failed on the way; the table changes of the others."""
        core, table = self._core, self._core.table
        is_stale = table.needs_refresh[plan.rows]
        refreshed = plan.rows[is_stale]
        table.refresh(refreshed, needed=False)
        core.record(lambda: table.refresh(refreshed, needed=True))
        kept = ~np.isin(delta.rows, refreshed)
        delta = BlockTableDelta(delta.rows[kept], delta.positions[kept], delta.ids[kept])
        rows = refreshed.tolist()
        for row in rows:
            table.flush(row)
        told = map(
            _new_request_data,
            rows,
            table.epoch[refreshed].tolist(),
            [table.state(row) for row in rows],
            computed[: plan.rows.size][is_stale].tolist(),
            [core.manager.tables.row_blocks(row) for row in rows],
        )
        return tuple(told), delta


def _new_request_data(
    row: int,
    epoch: int,
    state: RequestState,
    num_computed: int,
    block_ids: npt.NDArray[np.int32],
) -> NewRequestData:
    request = state.request
    return NewRequestData(
        row=row,
        epoch=epoch,
        uid=state.uid,
        request_id=state.request_id,
        token_ids=state.sequence.tokens(),
        num_prompt_tokens=state.num_prompt_tokens,
        num_computed_tokens=num_computed,
        block_ids=block_ids,
        sampling=request.sampling,
        cache_salt=request.cache_salt,
        lora=request.lora,
    )
