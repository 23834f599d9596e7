"""One step's plan while it is being made."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

from pdcore.kvcache.tables import BlockTableDelta

__all__ = ["Plan"]

Rows = npt.NDArray[np.intp]

_NO_ROWS = np.zeros(0, np.intp)


@attrs.define(eq=False)
class Plan:
    """What was decided so far.

    Args:
        step_id: the step.
        token_budget: tokens that may still be planned.
        now: seconds on the scheduler's clock.
        rows, num_tokens: the running rows that run, in running order, and their tokens.
        admitted_rows, admitted_tokens: the same for rows that were given out in this step.
        admitted_blocks: int32, the blocks of each of these.
        deltas: changes to block tables of rows that the workers know.
        preempted: whether a request gave way in this step; then nobody is admitted.
    """

    step_id: int
    token_budget: int
    now: float
    rows: Rows = _NO_ROWS
    num_tokens: Rows = _NO_ROWS
    admitted_rows: list[int] = attrs.field(factory=list)
    admitted_tokens: list[int] = attrs.field(factory=list)
    admitted_blocks: list[npt.NDArray[np.int32]] = attrs.field(factory=list)
    deltas: list[BlockTableDelta] = attrs.field(factory=list)
    preempted: bool = False

    def drop_vacated(self, states: Sequence[object | None]) -> None:
        """Forget the table changes of rows that nobody has any more."""
        for place, delta in enumerate(self.deltas):
            kept = np.array([states[row] is not None for row in delta.rows.tolist()], np.bool_)
            if not kept.all():
                self.deltas[place] = BlockTableDelta(
                    delta.rows[kept], delta.positions[kept], delta.ids[kept]
                )

    @property
    def num_rows(self) -> int:
        """How many rows run."""
        return self.rows.size + len(self.admitted_rows)

    def all_rows(self) -> Rows:
        """Every row that runs, in running order."""
        return _joined(self.rows, self.admitted_rows)

    def all_tokens(self) -> Rows:
        """How many tokens each of `all_rows` computes."""
        return _joined(self.num_tokens, self.admitted_tokens)


def _joined(running: Rows, admitted: list[int]) -> Rows:
    if not admitted:
        return running
    if not running.size:
        return np.array(admitted, np.intp)
    return np.concatenate((running, np.array(admitted, np.intp)))
