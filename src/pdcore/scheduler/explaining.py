"""Why a request did not run: what the last step, its state and its connector say."""

from __future__ import annotations

from pdcore.messages import SchedulerOutput
from pdcore.request import RequestStatus
from pdcore.scheduler.asking import ask_what_it_waits_for
from pdcore.scheduler.base import Skip, SkipCode
from pdcore.scheduler.core import Core
from pdcore.scheduler.state import RequestState

__all__ = ["explain"]


def explain(core: Core, request_id: str, *, plan: SchedulerOutput | None, is_paused: bool) -> Skip:
    """Why a request did not run in the newest plan, or that it did."""
    uid = core.uids.get(request_id)
    if uid is None:
        return Skip(code=SkipCode.UNKNOWN)
    state = core.requests[uid]
    if uid in core.skips:
        return core.skips[uid]
    match state.status:
        case RequestStatus.WAITING_FOR_REMOTE_KVS:
            words = ask_what_it_waits_for(core, state.request)
            return Skip(code=SkipCode.WAITING_FOR_REMOTE_KVS, waits_on=words or "its remote KV")
        case RequestStatus.WAITING_FOR_GRAMMAR:
            return Skip(code=SkipCode.WAITING_FOR_GRAMMAR, waits_on="its grammar")
        case RequestStatus.RUNNING:
            return _explain_running(core, state, plan, is_paused=is_paused)
    return Skip(code=core.closed)


def _explain_running(
    core: Core, state: RequestState, plan: SchedulerOutput | None, *, is_paused: bool
) -> Skip:
    table, row = core.table, state.row
    if plan is not None and table.epoch[row] in plan.epochs[plan.rows == row]:
        return Skip(code=SkipCode.RAN)
    if is_paused:
        return Skip(code=SkipCode.PAUSED)
    if table.num_in_flight[row]:
        return Skip(code=SkipCode.WAITING_FOR_OUTPUT, waits_on="the result of an earlier step")
    needed = int(table.num_tokens[row] - table.num_computed[row])
    return Skip(code=SkipCode.NO_TOKEN_BUDGET, needed=needed, available=0)
