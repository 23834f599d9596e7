"""How a request ends: what it lets go of, what a peer gets of it, and the event that says so."""

from __future__ import annotations

import logging

import numpy as np

from pdcore.answers import check_answer, check_free
from pdcore.connector.base import FinishedBlocks, HandOver
from pdcore.connector.tickets import asks_for_hand_over
from pdcore.kvcache.holds import HoldReason
from pdcore.messages import RequestOutput
from pdcore.request import FinishReason, RequestStatus
from pdcore.rows import index_of
from pdcore.scheduler.base import Skip, SkipCode
from pdcore.scheduler.core import Core
from pdcore.scheduler.state import RequestState, move

__all__ = ["fail", "fail_later", "finish", "finish_running", "owes_hand_over"]

logger = logging.getLogger(__name__)


def finish(
    core: Core,
    state: RequestState,
    reason: FinishReason,
    *,
    cause: str | None = None,
    new_token_ids: tuple[int, ...] = (),
) -> RequestOutput:
    """End a request wherever it is, let go of all it has, and return its finish event.

    The caller delivers the event, exactly once.
    """
    if state.row < 0:
        return _end(core, state, reason, cause, new_token_ids, len(state.sequence))
    num_tokens = core.table.num_tokens.item(state.row)
    output = _end(core, state, reason, cause, new_token_ids, num_tokens)
    core.vacate(state)
    return output


def finish_running(
    core: Core, ends: list[tuple[RequestState, FinishReason, str | None, int]]
) -> list[RequestOutput]:
    """`finish` for running requests that end with their new token, all at once.

    Args:
        ends: for each the request, why it ends, the cause in words, and the token.
    """
    rows = [state.row for state, *_ in ends]
    num_tokens = core.table.num_tokens[index_of(rows)].tolist()
    outputs = [
        _end(core, state, reason, cause, (token,), total)
        for (state, reason, cause, token), total in zip(ends, num_tokens, strict=True)
    ]
    if core.in_flight:
        for state, *_ in ends:
            core.expect_late(state)
    core.manager.tables.free_rows(rows)
    core.table.release_rows(rows)
    core.finished_rows += rows
    return outputs


def fail(core: Core, state: RequestState, cause: str) -> None:
    """End a request with ``error`` outside of a step's result."""
    core.tell(finish(core, state, FinishReason.ERROR, cause=cause))


def fail_later(core: Core, state: RequestState, hook: str, error: Exception) -> Skip:
    """A hook failed for one request: it ends with the next plan, the others go on."""
    core.failing.append((state, f"{hook}() raised {error!r}"))
    return Skip(code=SkipCode.POLICY, waits_on=f"{hook}(), which raised {error!r}")


def owes_hand_over(core: Core, state: RequestState, reason: FinishReason | None) -> bool:
    """Whether a request that ends so is worth nothing without the KV that it leaves behind."""
    is_complete = reason in (FinishReason.STOP, FinishReason.LENGTH)
    return (
        core.connector is not None
        and is_complete
        and asks_for_hand_over(state.request.kv_transfer_params)
    )


def _end(
    core: Core,
    state: RequestState,
    reason: FinishReason,
    cause: str | None,
    new_token_ids: tuple[int, ...],
    num_tokens: int,
) -> RequestOutput:
    """Finish a request of so many tokens, but leave it its row."""
    core.touch()
    hand_over: HandOver | None = None
    if core.connector is not None:
        hand_over, trouble = _tell_connector(core, state, reason)
        if owes_hand_over(core, state, reason) and not (hand_over and hand_over.kv_transfer_params):
            reason, cause = FinishReason.ERROR, f"its KV could not be handed over: {trouble}"
    if state.row < 0:
        _leave_queues(core, state)
    move(state, RequestStatus.FINISHED)
    del core.requests[state.uid]
    del core.uids[state.request_id]
    if state.request.deadline is not None:
        core.alarms.cancel(("request", state.uid))
    core.counters.num_finished += 1
    num_prompt_tokens = state.num_prompt_tokens
    return RequestOutput(
        request_id=state.request_id,
        new_token_ids=new_token_ids,
        finish_reason=reason,
        cause=cause,
        kv_transfer_params=hand_over.kv_transfer_params if hand_over else None,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_tokens - num_prompt_tokens,
        num_cached_tokens=state.num_cached_tokens,
        num_external_tokens=state.num_external_tokens,
        num_preemptions=state.num_preemptions,
    )


def _leave_queues(core: Core, state: RequestState) -> None:
    """Take a request without a row from wherever it waits, with its blocks."""
    if state.uid in core.parked:
        core.unpark(state, still_written=True)
    for queue in (core.waiting, core.landed):
        if state in queue:
            queue.remove(state)
    core.stop_asking(state)
    future = core.compiling.pop(state.uid, None)
    if future is not None:
        core.alarms.cancel(("grammar", state.uid))
        try:
            future.cancel()
        except Exception as error:
            core.complain("the cancel() of a grammar's future raised", error)
    core.drop_blocks(state)


def _tell_connector(
    core: Core, state: RequestState, reason: FinishReason
) -> tuple[HandOver | None, str]:
    """Tell the connector of a request's end, and keep the blocks it asks for.

    Returns:
        What it hands over, and in words why that may be nothing.
    """
    assert core.connector is not None
    blocks = _finished_blocks(core, state, reason)
    try:
        hand_over = core.connector.request_finished(state.request, state.uid, blocks)
        check_answer(hand_over, HandOver, may_be_none=True)
        if hand_over is not None:
            name = hand_over.transfer_id
            check_free(name, is_open=name in core.handed_over)
    except Exception as error:
        logger.exception("the connector's request_finished(%s) raised", state.request_id)
        return None, f"request_finished() raised {error!r}"
    if hand_over is not None and hand_over.transfer_id is not None and blocks.block_ids.size:
        core.handed_over[hand_over.transfer_id] = core.manager.pool.hold(
            blocks.block_ids, owner=hand_over.transfer_id, reason=HoldReason.SEND
        )
    return hand_over, f"the connector kept nothing of its {blocks.num_tokens} computed tokens"


def _finished_blocks(core: Core, state: RequestState, reason: FinishReason) -> FinishedBlocks:
    num_tokens = 0
    ids = np.zeros(0, np.int32)
    if state.row >= 0:
        # The last known token of a request that drew one has no KV yet; with steps in flight,
        # what they compute does not count either.
        num_tokens = int(
            min(core.table.num_computed[state.row], core.table.num_tokens[state.row] - 1)
        )
        ids = core.manager.tables.row_blocks(state.row)[: core.manager.blocks_for(num_tokens)]
    return FinishedBlocks(
        block_ids=ids,
        generations=core.manager.pool.generation(ids),
        num_tokens=num_tokens,
        finish_reason=reason,
    )
