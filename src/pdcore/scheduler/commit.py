"""Taking in a step's result: new tokens, and who ends with them."""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt

from pdcore.masks import all_set, any_set
from pdcore.messages import (
    ModelRunnerOutput,
    RequestOutput,
    RowError,
    SchedulerOutput,
    StepResult,
)
from pdcore.request import FinishReason
from pdcore.rows import ONE
from pdcore.scheduler.core import Core
from pdcore.scheduler.ending import fail, finish, finish_running, owes_hand_over
from pdcore.scheduler.grammar import GrammarMatcher
from pdcore.scheduler.publishing import publish_filled
from pdcore.scheduler.state import RequestState

__all__ = ["Commit"]

logger = logging.getLogger(__name__)

Int32Array = npt.NDArray[np.int32]
Rows = npt.NDArray[np.intp]
Index = Rows | slice

_LENGTH, _CAPACITY = FinishReason.LENGTH.value, FinishReason.CAPACITY.value
_EXPLAINED = (FinishReason.CAPACITY, FinishReason.ERROR)
_NOTHING_LEFT = (0, np.zeros(0, np.int32))
_REASONS = {reason.value: reason for reason in FinishReason}


class Commit:
    """Applies results to the tables.

    A step in which no request ends and no block fills is a fixed number of array operations.
    Tokens of a request that lost its row meanwhile are kept: they are appended when they arrive,
    and the request is not admitted again before. Tokens of a request that ended are dropped.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        # The newest plan when the last result came in: plans up to it were made ahead of results.
        self._newest_step = 0

    def run(
        self, output: SchedulerOutput, model_output: ModelRunnerOutput, *, is_in_order: bool
    ) -> StepResult:
        """Take in the result of the oldest plan in flight.

        Args:
            output: the plan.
            model_output: its result.
            is_in_order: whether it has a token for every row that was to draw, in the plan's order.
        """
        core, table = self._core, self._core.table
        # The result of a plan without rows leaves a quiet scheduler quiet, or its loop would spin.
        was_quiet = core.is_quiet
        core.touch()
        core.is_quiet = was_quiet and not (output.rows.size or model_output.errors)
        if model_output.errors:
            self._row_errors(output, model_output)
        rows, tokens = model_output.rows, model_output.sampled_token_ids[:, 0]
        batch = table.batch_of(output.rows)
        departed: list[tuple[RequestState, int]] = []
        is_calm = False
        if batch is not None and is_in_order and rows.size == batch.rows.size:
            # Every row drew, and still has the tenant that it drew for.
            request_ids, at, index = batch.request_ids.copy(), batch.at, batch.index
            is_calm = table.num_calm_steps > 0
        else:
            at = rows.astype(np.intp)
            current = table.epoch[at] == model_output.epochs
            if not all_set(current):
                departed = self._departed(model_output, ~current)
                at, tokens = at[current], tokens[current]
            request_ids, index = table.request_ids[at].tolist(), at
        num_tokens = self._append(index, at, tokens, is_calm=is_calm)
        if output.step_id <= self._newest_step:
            self._publish(at, output.step_id)
        self._newest_step = core.step_id
        core.manager.pool.commit(output.step_id)
        reasons = self._finish_reasons(index, at, tokens, num_tokens, is_calm=is_calm)
        finished = self._finish_all(at, tokens, reasons) if any_set(reasons != 0) else {}
        result = StepResult(
            step_id=output.step_id,
            request_ids=request_ids,
            token_ids=tokens,
            finish_reasons=reasons,
            finished=finished,
        )
        self._add_departed(result, departed)
        if core.outbox:
            self._add_outbox(result)
        return result

    def _departed(
        self, model_output: ModelRunnerOutput, late: npt.NDArray[np.bool_]
    ) -> list[tuple[RequestState, int]]:
        """The late tokens of requests that lost their row and still live."""
        rows, epochs = model_output.rows[late].tolist(), model_output.epochs[late].tolist()
        tokens = model_output.sampled_token_ids[late, 0].tolist()
        departed = []
        for row, epoch, token in zip(rows, epochs, tokens, strict=True):
            state = self._core.take_late(row, epoch)
            if state is not None and not state.is_finished:
                departed.append((state, token))
        return departed

    def _append(self, index: Index, rows: Rows, tokens: Int32Array, *, is_calm: bool) -> Rows:
        """Add one token to each row; return how many each has now.

        ``is_calm`` says that none of them fills a block.
        """
        table = self._core.table
        before = table.num_tokens[index]
        place = before % table.block_size_array
        table.tail[rows, place] = tokens
        num_tokens: Rows = before + ONE
        table.num_tokens[index] = num_tokens
        table.num_in_flight[index] -= ONE
        if not is_calm:
            filled = place == table.last_slot_array
            if any_set(filled):
                table.flush_full(rows[filled])
        return num_tokens

    def _finish_reasons(
        self, index: Index, rows: Rows, tokens: Int32Array, num_tokens: Rows, *, is_calm: bool
    ) -> npt.NDArray[np.int8]:
        """For each row why it ends with its new token, or 0.

        ``is_calm`` says that none of them reaches its limit.
        """
        table = self._core.table
        reasons = np.zeros(rows.size, np.int8)
        at_limit = None if is_calm else num_tokens >= table.limit[index]
        if at_limit is not None and any_set(at_limit):
            reasons[at_limit] = [
                _CAPACITY if table.state(row).limited_by_pool else _LENGTH
                for row in rows[at_limit].tolist()
            ]
        if table.num_with_eos or table.num_with_stop_ids:
            stops = self._stops(index, rows, tokens)
            if any_set(stops):
                stops &= num_tokens >= table.min_tokens[index]
                reasons[stops] = FinishReason.STOP
        if table.num_with_matcher:
            self._accept(rows, tokens, reasons)
        return reasons

    def _stops(self, index: Index, rows: Rows, tokens: Int32Array) -> npt.NDArray[np.bool_]:
        """Which of the tokens end their request, if it is long enough."""
        table = self._core.table
        stops: npt.NDArray[np.bool_] = tokens == table.eos[index]
        if table.num_with_stop_ids:
            for place in table.has_stop_ids[index].nonzero()[0].tolist():
                state = table.state(int(rows[place]))
                stops[place] |= int(tokens[place]) in state.request.sampling.stop_token_ids
        return stops

    def _accept(self, rows: Rows, tokens: Int32Array, reasons: npt.NDArray[np.int8]) -> None:
        """Move the grammars on; a token that a grammar does not allow ends its request."""
        table = self._core.table
        for index in table.has_matcher[rows].nonzero()[0].tolist():
            matcher = table.state(int(rows[index])).matcher
            assert matcher is not None
            if not _accepts(matcher, int(tokens[index])):
                reasons[index] = FinishReason.ERROR

    def _finish_all(
        self, rows: Rows, tokens: Int32Array, reasons: npt.NDArray[np.int8]
    ) -> dict[int, RequestOutput]:
        """End the requests that have a reason to; return their events by place."""
        table = self._core.table
        places = reasons.nonzero()[0]
        ends = []
        for row, token, code in zip(
            rows[places].tolist(), tokens[places].tolist(), reasons[places].tolist(), strict=True
        ):
            state, reason = table.state(row), _REASONS[code]
            cause = _cause(state, token, reason) if reason in _EXPLAINED else None
            ends.append((state, reason, cause, token))
        outputs = finish_running(self._core, ends)
        if self._core.connector is not None:
            # What could not be handed over ends for another reason.
            reasons[places] = [int(output.finish_reason or 0) for output in outputs]
        return dict(zip(places.tolist(), outputs, strict=True))

    def _publish(self, rows: Rows, step: int) -> None:
        """Publish blocks whose last token was not known yet when their step was planned.

        That is so when the step was planned ahead of an older result; a row that goes on publishes
        them with its next plan as well. What steps in flight write is left to those.
        """
        core, table = self._core, self._core.table
        written = table.num_computed[rows] - table.num_in_flight[rows]
        publish_filled(core, rows, written, step=step)

    def _add_departed(self, result: StepResult, departed: list[tuple[RequestState, int]]) -> None:
        for state, token in departed:
            reason = self._late_end(state, token)
            if owes_hand_over(self._core, state, reason):
                # The blocks to hand over went with its row: it is computed, and drawn, again, as
                # is whatever was drawn after it.
                self._core.drop_late(state)
                continue
            if not self._append_late(state, token):
                reason = FinishReason.ERROR
            index = len(result.request_ids)
            if reason is not None:
                cause = _cause(state, token, reason)
                result.finished[index] = finish(
                    self._core, state, reason, cause=cause, new_token_ids=(token,)
                )
            result.request_ids.append(state.request_id)
            result.token_ids = np.append(result.token_ids, np.int32(token))
            result.finish_reasons = np.append(result.finish_reasons, np.int8(reason or 0))

    def _append_late(self, state: RequestState, token: int) -> bool:
        """Add a token to a preempted request; return whether its grammar allows it."""
        state.sequence.append(np.array([token], np.int32))
        return state.matcher is None or _accepts(state.matcher, token)

    def _late_end(self, state: RequestState, token: int) -> FinishReason | None:
        """Why a preempted request ends with a token that it does not have yet, or None."""
        request, num_tokens = state.request, len(state.sequence) + 1
        sampling = request.sampling
        is_eos = token == request.eos_token_id and not sampling.ignore_eos
        if num_tokens >= request.num_prompt_tokens + sampling.min_tokens and (
            is_eos or token in sampling.stop_token_ids
        ):
            return FinishReason.STOP
        if num_tokens >= state.limit:
            return FinishReason.CAPACITY if state.limited_by_pool else FinishReason.LENGTH
        return None

    def _row_errors(self, output: SchedulerOutput, model_output: ModelRunnerOutput) -> None:
        """End the requests that the workers could not run, before anything of theirs is final."""
        core, table = self._core, self._core.table
        for error in model_output.errors:
            if table.epoch[error.row] != error.epoch:
                # Whoever had the row has left it; what it was to write others may have found.
                newest, ids = core.left_blocks.get((error.row, error.epoch), _NOTHING_LEFT)
                unwritten = self._withdraw(ids, output, newest_step=newest)
                self._late_error(error)
            else:
                planned = output.samples[output.rows == error.row]
                table.num_in_flight[error.row] -= int(planned.sum())
                ids = core.manager.tables.row_blocks(error.row)
                unwritten = self._withdraw(ids, output, newest_step=core.step_id)
                state = table.state(error.row)
                fail(core, state, core.cause_of(state, error.cause))
            if unwritten.size:
                core.distrust(unwritten, since_step=output.step_id)

    def _late_error(self, error: RowError) -> None:
        """A request that lost its row failed in a step that was in flight then."""
        state = self._core.take_late(error.row, error.epoch)
        if state is not None and not state.is_finished:
            fail(self._core, state, self._core.cause_of(state, error.cause))

    def _withdraw(
        self, ids: Int32Array, output: SchedulerOutput, *, newest_step: int
    ) -> Int32Array:
        """Drop the keys of the blocks that a failed row was to write; return those blocks.

        Args:
            ids: all blocks that it had.
            output: the plan in which it failed.
            newest_step: the last step that it was planned for; later ones may write to the same
                blocks on behalf of others.
        """
        core, pool = self._core, self._core.manager.pool
        before = pool.keys(ids)
        for plan in (output, *core.in_flight):
            if plan.step_id <= newest_step:
                pool.withdraw(plan.step_id, ids)
        dropped = [a is not None and b is None for a, b in zip(before, pool.keys(ids), strict=True)]
        return ids[np.array(dropped, np.bool_)]

    def _add_outbox(self, result: StepResult) -> None:
        """Deliver the requests that ended without a new token."""
        outbox, start = self._core.take_outbox(), len(result.request_ids)
        result.finished.update(enumerate(outbox, start))
        result.request_ids.extend(event.request_id for event in outbox)
        codes = [int(event.finish_reason or 0) for event in outbox]
        result.finish_reasons = np.append(result.finish_reasons, np.array(codes, np.int8))


def _accepts(matcher: GrammarMatcher, token: int) -> bool:
    """Whether a grammar allows a token; one that raises does not."""
    try:
        return bool(matcher.accept(token))
    except Exception:
        logger.exception("a grammar raised when it was told of token %d", token)
        return False


def _cause(state: RequestState, token: int, reason: FinishReason) -> str | None:
    if reason is FinishReason.CAPACITY:
        return (
            f"the block pool holds {state.limit - 1} tokens of one request; "
            "give it more blocks to go on"
        )
    if reason is FinishReason.ERROR:
        return f"its grammar does not allow token {token}, which the runner drew nevertheless"
    return None
