"""From a step's logits to its tokens: grammars, draws, and rows that cannot draw."""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdcore.masks import all_set
from pdcore.messages import GrammarBitmask, RowError
from pdcore.runner.batch import BatchState
from pdcore.runner.sampler import allow_only, sample
from pdcore.runner.staging import read, send
from pdcore.runner.step import StepLayout

__all__ = ["DrawnTokens", "ExecutedStep", "draw", "find_broken_kv"]

Int32Array = npt.NDArray[np.int32]
_NO_DRAW = "the logits hold NaN or inf, or allow no token"
_BROKEN_KV = "the keys or values of its tokens hold NaN or inf"


@attrs.frozen(kw_only=True, eq=False)
class ExecutedStep:
    """A step that the model has run, as far as the device is.

    Args:
        layout: the step.
        logits: float32 (k, vocab_size), of ``layout.sample_rows``; `draw` overwrites those of
            forbidden tokens.
        has_broken_kv: bool (num_tokens,), from `find_broken_kv`; None for a step whose logits tell
            as much: it draws from every token.
    """

    layout: StepLayout
    logits: Tensor
    has_broken_kv: Tensor | None


@attrs.frozen(kw_only=True, eq=False)
class DrawnTokens:
    """What came of a step, on the host.

    Args:
        rows, epochs, token_ids: int32 (n,), of the rows that drew, in the plan's order.
        errors: the rows that went wrong.
        has_drawn: bool (k,), for each row of the logits whether it drew.
    """

    rows: Int32Array
    epochs: Int32Array
    token_ids: Int32Array
    errors: tuple[RowError, ...]
    has_drawn: npt.NDArray[np.bool_]


def find_broken_kv(key_value: Tensor) -> Tensor:
    """Which tokens have keys or values of NaN or inf.

    A hidden state that becomes NaN in a layer stays so in those above, so the last one tells for
    all. (An inf that attention gives no weight to is not found.)

    Args:
        key_value: (num_tokens, 2, num_kv_heads, head_dim).

    Returns:
        bool (num_tokens,).
    """
    # 0 times a finite number is 0, so that no sum overflows.
    return (key_value * 0).sum((1, 2, 3)).isnan()


def draw(state: BatchState, step: ExecutedStep, bitmask: GrammarBitmask | None) -> DrawnTokens:
    """Draw a token for every sampling row of a step, and remember it as the row's last one.

    Waits for the device.

    Args:
        state: the worker's rows.
        step: the step.
        bitmask: what grammars allow, or None.
    """
    layout, logits = step.layout, step.logits
    rows, epochs = layout.sample_rows, layout.sample_epochs
    found = []
    if rows.size:
        if bitmask is not None:
            _constrain(layout, logits, bitmask, max_num_seqs=state.max_num_seqs)
        found = [*sample(logits, state.sampling(layout))]
        state.remember(rows, found[0])
    if step.has_broken_kv is not None:
        found.append(step.has_broken_kv)
    # One copy for all of it, since the host waits for each.
    on_host = read(torch.cat([part.to(torch.int32) for part in found]))
    token_ids = on_host[: rows.size]
    is_good = on_host[rows.size : 2 * rows.size] == 0
    broken_rows = rows[:0]
    if step.has_broken_kv is not None:
        broken_rows = _rows_of(layout, on_host[2 * rows.size :])
    if broken_rows.size:
        is_good &= ~np.isin(rows, broken_rows)
    elif all_set(is_good):
        return DrawnTokens(
            rows=rows, epochs=epochs, token_ids=token_ids, errors=(), has_drawn=is_good
        )
    causes = dict.fromkeys(rows[~is_good].tolist(), _NO_DRAW)
    causes |= dict.fromkeys(broken_rows.tolist(), _BROKEN_KV)
    failed = np.array(list(causes), np.int32)
    errors = tuple(
        RowError(row=row, epoch=epoch, cause=cause)
        for (row, cause), epoch in zip(causes.items(), state.epochs(failed).tolist(), strict=True)
    )
    return DrawnTokens(
        rows=rows[is_good],
        epochs=epochs[is_good],
        token_ids=token_ids[is_good],
        errors=errors,
        has_drawn=is_good,
    )


def _rows_of(layout: StepLayout, is_broken: Int32Array) -> Int32Array:
    """The rows that any of some tokens belongs to."""
    starts = np.cumsum(layout.num_scheduled) - layout.num_scheduled
    return layout.rows[np.add.reduceat(is_broken, starts) > 0]


def _constrain(
    step: StepLayout, logits: Tensor, bitmask: GrammarBitmask, *, max_num_seqs: int
) -> None:
    """Apply the masks of rows that draw in this step, and of their present tenants alone."""
    place_of_row = np.full(max_num_seqs, -1, np.int64)
    place_of_row[step.sample_rows] = np.arange(step.sample_rows.size)
    places = place_of_row[bitmask.rows]
    is_meant = places >= 0
    is_meant[is_meant] = step.sample_epochs[places[is_meant]] == bitmask.epochs[is_meant]
    if is_meant.any():
        device = logits.device
        allow_only(logits, send(places[is_meant], device), send(bitmask.bits[is_meant], device))
