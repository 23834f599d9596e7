"""One step's result, which comes back from the workers."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from pdcore import wire
from pdcore.messages.transfers import TransferReport

__all__ = ["GrammarBitmask", "ModelRunnerOutput", "RowError"]

Int32Array = npt.NDArray[np.int32]

_NO_NEWS = TransferReport()


@attrs.frozen(kw_only=True, eq=False)
class GrammarBitmask:
    """Which tokens each structured row may draw.

    Args:
        rows: int32 (g,), epochs: int32 (g,): the rows that are constrained; others are free.
        bits: int32 (g, ceil(vocab / 32)); bit ``t % 32`` of word ``t // 32`` allows token ``t``.
    """

    rows: Int32Array
    epochs: Int32Array
    bits: Int32Array


@attrs.frozen(kw_only=True)
class RowError:
    """A row that the worker could not run, though it ran the others."""

    row: int
    epoch: int
    cause: str


@attrs.frozen(kw_only=True, eq=False, slots=False)
class ModelRunnerOutput:
    """One step's result. Its arrays are the reader's from then on: nobody writes to them.

    Args:
        rows: int32 (n,), the rows that drew a token, in the plan's order; epochs: int32 (n,).
        sampled_token_ids: int32 (n, 1), the token each drew. The second axis is for speculative
            steps; -1 pads it.
        errors: rows that failed on their own.
        transfer_report: what the worker's connector has to say.
    """

    rows: Int32Array
    epochs: Int32Array
    sampled_token_ids: Int32Array
    errors: tuple[RowError, ...] = ()
    transfer_report: TransferReport = _NO_NEWS

    def __reduce__(self) -> tuple[Any, ...]:
        width = self.sampled_token_ids.shape[1]
        columns = wire.pack([self.rows, self.epochs, self.sampled_token_ids.ravel()])
        return _read_result, (columns, width, self.errors, self.transfer_report)


def _read_result(
    columns: wire.Columns, width: int, errors: tuple[RowError, ...], report: TransferReport
) -> ModelRunnerOutput:
    rows, epochs, tokens = wire.unpack(columns)
    return ModelRunnerOutput(
        rows=rows,
        epochs=epochs,
        sampled_token_ids=tokens.reshape(rows.size, width),
        errors=errors,
        transfer_report=report,
    )
