"""The running requests as columns: one row each, kept until the request ends or is preempted."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

import attrs
import numpy as np
import numpy.typing as npt

from pdcore.kvcache.sequence import TokenSequence
from pdcore.masks import all_set
from pdcore.rows import index_of
from pdcore.scheduler.state import RequestState

__all__ = ["RequestTable", "RunningBatch"]

Rows = npt.NDArray[np.intp]
Int32Array = npt.NDArray[np.int32]


@attrs.frozen(kw_only=True, eq=False, slots=False)
class RunningBatch:
    """All running rows, as the messages of a step name them.

    One object serves every step until a row is given out or taken back, so that a step of decodes
    makes none of these arrays anew. A step that starts requests makes two of them, and asks the
    first for little: epochs and ids are read when they are asked for, which must be while these
    are the rows that run.

    Args:
        table: whose rows they are.
        rows: int32 (n,), in running order.
        at: the same as indices; numpy reads columns several times faster by these.
        index: selects the rows from a column: a slice where they lie side by side, else ``at``.
        ones: one token for each; ``num_scheduled``: the same as int32.
        all_sample: bool (n,), each draws.
    """

    table: RequestTable = attrs.field(repr=False)
    rows: Int32Array
    at: Rows
    index: slice | Rows
    ones: Rows
    num_scheduled: Int32Array
    all_sample: npt.NDArray[np.bool_]

    @cached_property
    def epochs(self) -> Int32Array:
        """int32 (n,), one for each row."""
        return _frozen(self.table.epoch[self.at])

    @cached_property
    def request_ids(self) -> list[str]:
        """One for each row."""
        ids: list[str] = self.table.request_ids[self.at].tolist()
        return ids


_Array = TypeVar("_Array", bound=npt.NDArray[Any])


def _frozen(array: _Array) -> _Array:
    """An array that goes into many messages, so that nobody may write to it."""
    array.flags.writeable = False
    return array


class RequestTable:
    """Per-request counters of all rows, side by side in arrays.

    Rows are given out again, so a row's number says nothing about its age; ``running`` lists the
    rows in running order. A row's ``epoch`` goes up each time it is given out.

    Columns, one entry for each row: ``epoch``, 0 for a row that nobody has; ``since_step``, the
    step that gave the row out; ``num_tokens``, known tokens; ``num_computed``, tokens whose KV is
    computed or planned; ``num_in_flight``, planned draws whose token is not in; ``limit``, the most
    tokens it can come to; ``min_tokens``, before so many it does not stop; ``eos``,
    ``has_stop_ids``, ``has_matcher``; ``needs_refresh``, workers must be told of it afresh;
    ``priority``. ``tail`` (rows, block_size) holds the tokens of the last block,
    partial or just full: token ``p`` of a row at ``tail[row, p % block_size]``.

    While ``is_level``, every row lacks exactly one token: the last plan took them all as far as
    they were known. Then the next ``num_calm_steps`` steps of a token each need no block, fill none
    and reach no limit, nor do the results before them.

    Args:
        num_rows: how many there are.
        block_size: tokens in a block.
    """

    def __init__(self, num_rows: int, block_size: int) -> None:
        self.num_rows = num_rows
        self.block_size = block_size
        # Arrays, since numpy computes faster with them than with Python's integers.
        self.block_size_array = np.array(block_size)
        self.last_slot_array = np.array(block_size - 1)
        self.epoch = np.zeros(num_rows, np.int32)
        numbers = np.zeros((8, num_rows), np.int64)
        (
            self.num_tokens,
            self.num_computed,
            self.since_step,
            self.num_in_flight,
            self.limit,
            self.min_tokens,
            self.eos,
            self.priority,
        ) = numbers
        # Of rows that nobody has, all False.
        self._needs = np.zeros((4, num_rows), np.bool_)
        self.has_eos, self.has_stop_ids, self.has_matcher, self.needs_refresh = self._needs
        self.tail = np.zeros((num_rows, block_size), np.int32)
        self._columns: tuple[npt.NDArray[Any], ...] = (
            self.epoch,
            *numbers,
            *self._needs,
            self.tail,
        )
        self.request_ids = np.full(num_rows, None, np.object_)
        self.states: list[RequestState | None] = [None] * num_rows
        self.num_with_eos = 0
        self.num_with_stop_ids = 0
        self.num_with_matcher = 0
        self.num_to_refresh = 0
        # Epochs never go back, though a plan that is taken back restores a row's former tenant.
        self._last_epochs = [0] * num_rows
        self._order = np.zeros(num_rows, np.intp)
        self._num_running = 0
        self._free = list(range(num_rows - 1, -1, -1))
        self._batch: RunningBatch | None = None
        # What every batch has a part of.
        self._ones = _frozen(np.ones(num_rows, np.intp))
        self._num_scheduled = _frozen(np.ones(num_rows, np.int32))
        self._all_sample = _frozen(np.ones(num_rows, np.bool_))
        self.is_level = False
        self.num_calm_steps = 0

    def __len__(self) -> int:
        return self._num_running

    @property
    def running(self) -> Rows:
        """The rows in use, in running order, as indices. A view, valid until the next change."""
        return self._order[: self._num_running]

    @property
    def batch(self) -> RunningBatch:
        """All running rows; the same object as long as nobody joins or leaves."""
        batch = self._batch
        if batch is None:
            at = self.running.copy()
            start, end = (at.item(0), at.item(-1) + 1) if at.size else (0, 0)
            in_order = end - start == at.size and (at.size == 1 or all_set(at[1:] > at[:-1]))
            batch = self._batch = RunningBatch(
                table=self,
                rows=_frozen(at.astype(np.int32)),
                at=_frozen(at),
                index=slice(start, end) if in_order else at,
                ones=self._ones[: at.size],
                num_scheduled=self._num_scheduled[: at.size],
                all_sample=self._all_sample[: at.size],
            )
        return batch

    def batch_of(self, rows: Rows | Int32Array) -> RunningBatch | None:
        """The batch whose ``rows`` or ``at`` these are, if they still are all that run."""
        batch = self._batch
        return batch if batch is not None and (batch.rows is rows or batch.at is rows) else None

    @property
    def num_free_rows(self) -> int:
        return len(self._free)

    def state(self, row: int) -> RequestState:
        """The request that has a row."""
        state = self.states[row]
        assert state is not None
        return state

    def sequences(self, rows: Rows) -> list[TokenSequence]:
        """The tokens of the requests that have some rows."""
        states = self.states
        return [states[row].sequence for row in rows.tolist()]

    def assign(
        self, states: list[RequestState], num_computed: list[int], *, step: int
    ) -> list[int]:
        """Give each request a free row, in this order the last in running order; return them.

        There must be so many free rows. Costs a constant number of writes for each request.
        """
        rows = self._free[: -len(states) - 1 : -1]
        del self._free[-len(states) :]
        start, self._num_running = self._num_running, self._num_running + len(rows)
        self._order[start : self._num_running] = rows
        needs_more = [
            self._begin(row, state, computed, step)
            for row, state, computed in zip(rows, states, num_computed, strict=True)
        ]
        if True in needs_more:
            self._count_needs()
        self._attach(rows, states)
        return rows

    def _begin(self, row: int, state: RequestState, num_computed: int, step: int) -> bool:
        """Write a row's columns; return whether the request needs what most do not.

        One number at a time, since an array of a few takes longer to make than to do without.
        """
        request, sequence = state.request, state.sequence
        sampling, eos = request.sampling, request.eos_token_id
        self._last_epochs[row] += 1
        self.epoch[row] = self._last_epochs[row]
        self.num_tokens[row] = len(sequence)
        self.num_computed[row] = num_computed
        self.since_step[row] = step
        self.num_in_flight[row] = 0
        self.limit[row] = state.limit
        self.min_tokens[row] = state.num_prompt_tokens + sampling.min_tokens
        self.priority[row] = request.priority
        self.request_ids[row] = state.request_id
        block = sequence.last_block(self.block_size)
        self.tail[row, : block.size] = block
        if eos is None or sampling.ignore_eos:
            self.eos[row] = -1
            if not sampling.stop_token_ids and state.matcher is None:
                return False
        else:
            self.eos[row] = eos
            self.has_eos[row] = True
        self.has_stop_ids[row] = bool(sampling.stop_token_ids)
        self.has_matcher[row] = state.matcher is not None
        return True

    def release(self, row: int) -> int:
        """Take a row back; return its place in running order. Its tokens must be flushed first."""
        order, end = self._order, self._num_running
        place = int((order[:end] == row).argmax())
        order[place : end - 1] = order[place + 1 : end]
        self._num_running -= 1
        self._detach([row])
        self._free.append(row)
        return place

    def release_rows(self, rows: list[int]) -> None:
        """Take rows back, one after the other, without their tokens."""
        self._detach(rows)
        running = self.running
        kept = running[self.epoch[running] != 0]
        self._order[: kept.size] = kept
        self._num_running = kept.size
        self._free += rows

    def release_undoably(self, row: int) -> Callable[[], None]:
        """`release` a row; return what undoes it."""
        state = self.state(row)
        columns = [(column, column[row].copy()) for column in self._columns]
        place = self.release(row)

        def undo() -> None:
            self._free.remove(row)
            self._order[place + 1 : self._num_running + 1] = self._order[place : self._num_running]
            self._order[place] = row
            self._num_running += 1
            for column, value in columns:
                column[row] = value
            self.request_ids[row] = state.request_id
            self._attach([row], [state])
            self._count_needs()

        return undo

    def take_back(self, rows: list[int]) -> None:
        """Undo `assign`, the epochs excepted, given that the rows are the last in running order."""
        for row in reversed(rows):
            self.release(row)

    def look_ahead(self, batch: RunningBatch, computed: Rows) -> None:
        """Count the calm steps that follow the one being planned, and set `num_calm_steps`.

        Args:
            batch: all running rows, which are level; no step is in flight.
            computed: int64, for each the tokens computed before the step.
        """
        # The i-th step that follows computes token ``computed + i``, and its result appends the
        # next. Neither may be the last of its block, and the sequence must stay below its limit.
        places = computed % self.block_size_array
        to_full = self.block_size - 2 - places.max().item()
        to_limit = (self.limit[batch.index] - computed).min().item() - 2
        self.num_calm_steps = max(min(to_full, to_limit), 0)

    def unsettle(self) -> None:
        """Something else than a step of a token each: no longer is it known what rows lack."""
        self.is_level = False
        self.num_calm_steps = 0

    def flush(self, row: int) -> None:
        """Move the tokens that are only in the tail buffer into the request's sequence."""
        sequence, end = self.state(row).sequence, self.num_tokens.item(row)
        start = len(sequence)
        if start < end:
            offset = start % self.block_size
            sequence.append(self.tail[row, offset : offset + end - start])

    def flush_full(self, rows: Rows) -> None:
        """`flush` for rows whose last token has just filled their block. Costs little a row."""
        blocks = self.tail[rows].view(f"V{4 * self.block_size}").ravel().tolist()
        for sequence, block in zip(self.sequences(rows), blocks, strict=True):
            sequence.fill_block(block)

    def refresh(self, rows: Rows, *, needed: bool) -> None:
        """Mark rows that the workers must be told of afresh, or that they were told of."""
        self.needs_refresh[rows] = needed
        self._count_needs()

    def fingerprint(self) -> bytes:
        """The columns of the rows in use and the order in which rows are given out."""
        rows = self.running
        columns = (rows, self.num_tokens[rows], self.num_computed[rows], self.num_in_flight[rows])
        tails = [
            self.tail[row, : self.num_tokens[row] % self.block_size].tobytes()
            for row in rows.tolist()
        ]
        refresh = self.needs_refresh[rows].tobytes()
        free = np.array(self._free, np.int32).tobytes()
        return b"".join([*(column.tobytes() for column in columns), *tails, refresh, free])

    def _forget_batch(self) -> None:
        self._batch = None
        self.num_calm_steps = 0

    def _attach(self, rows: list[int], states: list[RequestState]) -> None:
        self._forget_batch()
        for row, state in zip(rows, states, strict=True):
            self.states[row] = state
            state.row = row

    def _detach(self, rows: list[int]) -> None:
        self._forget_batch()
        for row in rows:
            self.state(row).row = -1
            self.states[row] = None
        at = index_of(rows)
        # Matches no epoch that was ever given out, so whatever still comes for the row is late.
        self.epoch[at] = 0
        self.request_ids[at] = None
        if (
            self.num_with_eos
            or self.num_with_stop_ids
            or self.num_with_matcher
            or self.num_to_refresh
        ):
            self._needs[:, at] = False
            self._count_needs()

    def _count_needs(self) -> None:
        """Count those that need what most do not."""
        self.num_with_eos, self.num_with_stop_ids, self.num_with_matcher, self.num_to_refresh = (
            np.count_nonzero(self._needs, axis=1).tolist()
        )
