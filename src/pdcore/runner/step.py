"""One step's tokens: as the host lays them out, and as the device gets them."""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt
from torch import Tensor

from pdcore.messages import RowError
from pdcore.runner.attention.base import AttentionBatch

__all__ = ["StepInputs", "StepLayout"]

Int32Array = npt.NDArray[np.int32]


@attrs.frozen(kw_only=True, eq=False)
class StepLayout:
    """The healthy rows of a plan, in the order in which the model runs them. All on the host.

    Decodes come first, and of those the ones whose input the worker drew itself.

    Args:
        rows, num_computed, num_scheduled: int32 (n,).
        num_decodes: how many rows have exactly one token.
        num_device_fed: how many rows take the last token that was drawn for them.
        sample_places: int64 (k,), the places in the batch of the tokens whose logits are wanted, in
            the plan's order.
        sample_rows, sample_epochs: int32 (k,).
        draw_positions: int64 (k,), the position that each drawn token will have.
        errors: rows of the plan that were left out.
    """

    rows: Int32Array
    num_computed: Int32Array
    num_scheduled: Int32Array
    num_decodes: int
    num_device_fed: int
    sample_places: npt.NDArray[np.int64]
    sample_rows: Int32Array
    sample_epochs: Int32Array
    draw_positions: npt.NDArray[np.int64]
    errors: tuple[RowError, ...]

    @property
    def num_rows(self) -> int:
        return self.rows.size

    @property
    def is_all_draws(self) -> bool:
        """Whether there is a row, and every row draws from the one token that it has."""
        return 0 < self.num_decodes == self.rows.size == self.sample_rows.size


@attrs.frozen(kw_only=True, eq=False)
class StepInputs:
    """What the model reads in one step, on the device.

    Args:
        token_ids, positions: int64 (num_tokens,).
        attention: the same step as the attention backend sees it.
        sample_tokens: int64 (k,), the places in the batch whose logits are wanted; None for all.
    """

    token_ids: Tensor
    positions: Tensor
    attention: AttentionBatch
    sample_tokens: Tensor | None
