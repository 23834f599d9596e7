"""Checks of what the engine hands to a runner: those that no single row can answer for."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import numpy as np

from pdcore.checks import check_part
from pdcore.errors import ConfigError, ExecutorError
from pdcore.masks import any_set
from pdcore.messages import GrammarBitmask, SchedulerOutput

__all__ = ["check_mask", "check_plan"]

_INT32, _BOOL = np.dtype(np.int32), np.dtype(np.bool_)
_COLUMNS = (
    "rows",
    "epochs",
    "num_scheduled_tokens",
    "num_computed_tokens",
    "samples",
    "block_rows",
    "block_positions",
    "block_ids",
    "finished_rows",
)
_DTYPES = [_BOOL if name == "samples" else _INT32 for name in _COLUMNS]
_NEW_COLUMNS = ("token_ids", "block_ids")
_columns = operator.attrgetter(*_COLUMNS)


def check_plan(output: SchedulerOutput, *, max_num_seqs: int, max_num_blocks: int) -> None:
    """Raise a named error unless a plan is made of columns that fit, for rows that there are.

    Args:
        output: the plan.
        max_num_seqs: number of rows.
        max_num_blocks: how many blocks a row has at most.
    """
    check_part("output", output, SchedulerOutput)
    what = f"the plan of step {output.step_id}"
    columns = _columns(output)
    shapes = [getattr(column, "shape", ()) for column in columns]
    is_fit = shapes == [shapes[0]] * 5 + [shapes[5]] * 3 + [shapes[8]]
    is_fit = is_fit and len(shapes[0]) == len(shapes[5]) == len(shapes[8]) == 1
    if not is_fit or [column.dtype for column in columns] != _DTYPES:
        raise _misfits(what, _COLUMNS, columns)
    _check_rows(what, output.rows, max_num_seqs)
    if output.finished_rows.size:
        _check_rows(what, output.finished_rows, max_num_seqs)
    for request in output.scheduled_new_reqs:
        ids = (request.token_ids, request.block_ids)
        if any(not isinstance(it, np.ndarray) or it.ndim != 1 or it.dtype != _INT32 for it in ids):
            raise _misfits(f"{what}, where it starts row {request.row},", _NEW_COLUMNS, ids)
        if not 0 <= request.row < max_num_seqs:
            raise _no_row(what, request.row, max_num_seqs)
    if output.block_rows.size:
        _check_rows(what, output.block_rows, max_num_seqs)
        if any_set(output.block_positions.view(np.uint32) >= max_num_blocks):
            raise ConfigError(
                f"{what} changes positions {output.block_positions.min()}.."
                f"{output.block_positions.max()} of block tables, which have {max_num_blocks} on "
                "this worker: give scheduler and runner the same limits"
            )


def check_mask(bitmask: GrammarBitmask | None, *, max_num_seqs: int) -> None:
    """Raise a named error unless a mask is None, or int32 words for rows that there are."""
    if bitmask is None:
        return
    check_part("bitmask", bitmask, GrammarBitmask)
    what = "the grammars' mask"
    columns = (bitmask.rows, bitmask.epochs, bitmask.bits)
    shapes = [getattr(column, "shape", ()) for column in columns]
    is_fit = len(shapes[0]) == 1 and len(shapes[2]) == 2 and shapes[0] == shapes[1] == shapes[2][:1]
    if not is_fit or any(column.dtype != _INT32 for column in columns):
        raise _misfits(what, ("rows", "epochs", "bits"), columns)
    _check_rows(what, bitmask.rows, max_num_seqs)


def _misfits(what: str, names: tuple[str, ...], columns: Iterable[Any]) -> ExecutorError:
    found = ", ".join(
        f"{name} {getattr(column, 'dtype', type(column).__name__)}{getattr(column, 'shape', '')}"
        for name, column in zip(names, columns, strict=True)
    )
    return ExecutorError(
        f"{what} has columns that do not fit: {found}. Pass arrays of int32 (bool for samples) "
        "with one axis (two for bits), and those that go together of one length."
    )


def _check_rows(what: str, rows: Any, max_num_seqs: int) -> None:
    if any_set(rows.view(np.uint32) >= max_num_seqs):
        wrong = rows[rows.view(np.uint32) >= max_num_seqs]
        raise _no_row(what, wrong[0], max_num_seqs)


def _no_row(what: str, row: int, max_num_seqs: int) -> ConfigError:
    return ConfigError(
        f"{what} names row {row}, but this worker has max_num_seqs={max_num_seqs} rows, from 0: "
        "give scheduler and runner the same limits"
    )
