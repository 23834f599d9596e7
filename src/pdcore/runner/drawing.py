"""From a step's logits to its tokens: grammars, draws, and rows that cannot draw."""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdcore.messages import GrammarBitmask, RowError
from pdcore.runner.batch import BatchState
from pdcore.runner.sampler import allow_only, sample
from pdcore.runner.staging import read, send
from pdcore.runner.step import StepLayout

__all__ = ["DrawnTokens", "draw"]

Int32Array = npt.NDArray[np.int32]


@attrs.frozen(kw_only=True, eq=False)
class DrawnTokens:
    """What came of a step's logits, on the host.

    Args:
        rows, epochs, token_ids: int32 (n,), of the rows that drew, in the plan's order.
        errors: the rows that could not.
        has_drawn: bool (k,), for each row of the logits whether it drew.
    """

    rows: Int32Array
    epochs: Int32Array
    token_ids: Int32Array
    errors: tuple[RowError, ...]
    has_drawn: npt.NDArray[np.bool_]


def draw(
    state: BatchState, step: StepLayout, logits: Tensor, bitmask: GrammarBitmask | None
) -> DrawnTokens:
    """Draw a token for every sampling row of a step, and remember it as the row's last one.

    Waits for the device.

    Args:
        state: the worker's rows.
        step: the step.
        logits: float32 (k, vocab_size), of ``step.sample_rows``; forbidden tokens are overwritten.
        bitmask: what grammars allow, or None.
    """
    if bitmask is not None:
        _constrain(step, logits, bitmask, max_num_seqs=state.max_num_seqs)
    tokens, is_faulty = sample(logits, state.sampling(step))
    state.remember(step.sample_rows, tokens)
    on_host = read(torch.stack((tokens, is_faulty.to(tokens.dtype))).to(torch.int32))
    is_good = on_host[1] == 0
    rows, epochs = step.sample_rows, step.sample_epochs
    if is_good.all():
        return DrawnTokens(
            rows=rows, epochs=epochs, token_ids=on_host[0], errors=(), has_drawn=is_good
        )
    errors = tuple(
        RowError(row=row, epoch=epoch, cause="the logits hold NaN or inf, or allow no token")
        for row, epoch in zip(rows[~is_good].tolist(), epochs[~is_good].tolist(), strict=True)
    )
    return DrawnTokens(
        rows=rows[is_good],
        epochs=epochs[is_good],
        token_ids=on_host[0, is_good],
        errors=errors,
        has_drawn=is_good,
    )


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
