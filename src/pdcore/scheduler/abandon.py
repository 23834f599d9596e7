"""Taking back a plan: exactly when nobody saw it, safely when a worker may have."""

from __future__ import annotations

import numpy as np

from pdcore.messages import SchedulerOutput
from pdcore.scheduler.core import Core
from pdcore.scheduler.ending import fail
from pdcore.scheduler.state import RequestState

__all__ = ["count_lost_load", "take_back", "tell_connector", "undo_exactly"]

_MAX_LOST_LOADS = 2


def take_back(core: Core, output: SchedulerOutput, *, dispatched: bool) -> None:
    """Undo the newest plan, which is no longer in flight.

    Never dispatched, and with nothing changed since: everything is as before it was made.
    Otherwise its rows are computed again, told to the workers in full, and lose the keys of the
    blocks that it was to write; those that it started go back into the queue; its victims stay
    preempted and its evictions stay done.
    """
    if not dispatched and core.undo_is_exact and output.step_id == core.step_id:
        undo_exactly(core, output.step_id)
    else:
        _take_back_safely(core, output, dispatched=dispatched)
    core.undo_is_exact = False


def tell_connector(core: Core, output: SchedulerOutput, *, dispatched: bool) -> None:
    """Let the connector say again what the workers do not know of a plan that was taken back.

    What they reported with it must be taken in before, or that would be said again as well.
    """
    if core.connector is None or output.connector_meta is None:
        return
    name = "step_failed" if dispatched else "rebuild_connector_meta"
    try:
        getattr(core.connector, name)(output.connector_meta)
    except Exception as error:
        core.complain(f"the connector's {name}() raised; what the workers missed is lost", error)


def undo_exactly(core: Core, step_id: int) -> None:
    """Undo all that the plan being made, or just made, has changed."""
    core.recording = False
    while core.undo:
        core.undo.pop()()
    core.manager.rollback(step_id)
    core.is_quiet = False


def _take_back_safely(core: Core, output: SchedulerOutput, *, dispatched: bool) -> None:
    table, manager = core.table, core.manager
    core.touch()
    table.unsettle()
    current = table.epoch[output.rows] == output.epochs
    rows = output.rows[current]
    table.num_computed[rows] -= output.num_scheduled_tokens[current]
    table.num_in_flight[rows] -= output.samples[current]
    table.refresh(rows, needed=True)
    # What started in this step, or began to load, may share blocks that the step was to write.
    for row in rows[table.since_step[rows] == output.step_id][::-1].tolist():
        core.preempt(table.state(row))
    # Those that loaded within the step may have lost their rows since, or have ended.
    for state, transfer in core.synchronous_loads.pop(output.step_id, ()):
        core.call_off(transfer)
        if dispatched and not state.is_finished:
            count_lost_load(core, state)
    for state in list(core.parked.values()):
        if state.load_step == output.step_id:
            core.restart(state)
            if dispatched:
                count_lost_load(core, state)
    manager.pool.withdraw(output.step_id)
    manager.pool.commit(output.step_id)
    manager.tables.recount_published(table.running)
    for index in np.flatnonzero(~current & output.samples).tolist():
        core.take_late(int(output.rows[index]), int(output.epochs[index]))
    # The workers may not have heard that these rows were given up.
    core.finished_rows = output.finished_rows.tolist() + core.finished_rows


def count_lost_load(core: Core, state: RequestState) -> None:
    """Count a load whose step failed: once may be chance, twice it is the load."""
    state.num_lost_loads += 1
    if state.num_lost_loads < _MAX_LOST_LOADS:
        return
    cause = f"{state.num_lost_loads} steps that were to begin it failed"
    core.count_failed_load(state, cause)
    if core.limits.on_load_failure == "fail" and not state.ask_connector:
        fail(core, state, f"remote KV could not be loaded: {cause}")
