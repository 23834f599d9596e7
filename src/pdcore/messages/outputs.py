"""What the application is told of a step."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from pdcore.request import FinishReason

__all__ = ["RequestOutput", "StepResult"]

Int32Array = npt.NDArray[np.int32]
Int8Array = npt.NDArray[np.int8]


@attrs.frozen(kw_only=True, slots=False)
class RequestOutput:
    """What one step means for one request.

    Args:
        request_id: the application's name for it.
        new_token_ids: the tokens it produced in this step; may be empty.
        finish_reason: why it ended, or None while it lives.
        cause: the reason in words, when there is more to say than the reason does.
        kv_transfer_params: what to hand to the decode engine after a prefill for hand-over.
        num_prompt_tokens, num_output_tokens: totals; 0 until it ends, as the numbers below.
        num_cached_tokens: prompt tokens found in the local prefix cache at its first admission.
        num_external_tokens: prompt tokens that a connector brought.
        num_preemptions: how often it lost its row.
    """

    request_id: str
    new_token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    cause: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_external_tokens: int = 0
    num_preemptions: int = 0


@attrs.define(kw_only=True, eq=False, slots=False)
class StepResult:
    """What one step means for the application: columns first, objects on demand.

    The first ``len(token_ids)`` entries produced one token each. Entries after them ended without
    a new token (an abort, an error, a deadline).

    Args:
        step_id: the plan these results belong to.
        request_ids: one for each entry.
        token_ids: int32, the new token of each entry that produced one.
        finish_reasons: int8, a `FinishReason` or 0, one for each entry.
        finished: the full story of every entry that ended, by its index.
    """

    step_id: int
    request_ids: list[str]
    token_ids: Int32Array
    finish_reasons: Int8Array
    finished: dict[int, RequestOutput]

    @cached_property
    def outputs(self) -> tuple[RequestOutput, ...]:
        """One `RequestOutput` for each entry; built on first use."""
        tokens = self.token_ids.tolist()
        return tuple(
            self.finished.get(index)
            or RequestOutput(request_id=request_id, new_token_ids=(tokens[index],))
            for index, request_id in enumerate(self.request_ids)
        )
