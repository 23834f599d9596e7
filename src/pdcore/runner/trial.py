"""The plan that measures how much memory the largest step takes."""

from __future__ import annotations

import numpy as np

from pdcore.messages import NewRequestData, SchedulerOutput
from pdcore.request import SamplingParams

__all__ = ["trial_plan"]

_NOTHING = np.zeros(0, np.int32)


def trial_plan(num_rows: int, length: int, num_blocks: int) -> SchedulerOutput:
    """A step of prompts of ``length`` tokens, which all write to the blocks 1 to ``num_blocks``."""
    rows = np.arange(num_rows, dtype=np.int32)
    zeros = np.zeros(num_rows, np.int32)
    requests = tuple(
        NewRequestData(
            row=row,
            epoch=0,
            uid=row,
            request_id=f"trial-{row}",
            token_ids=np.zeros(length, np.int32),
            num_prompt_tokens=length,
            num_computed_tokens=0,
            block_ids=np.arange(1, num_blocks + 1, dtype=np.int32),
            sampling=SamplingParams(temperature=0),
        )
        for row in rows.tolist()
    )
    return SchedulerOutput(
        step_id=0,
        rows=rows,
        epochs=zeros,
        num_scheduled_tokens=zeros + length,
        num_computed_tokens=zeros,
        samples=np.ones(num_rows, np.bool_),
        scheduled_new_reqs=requests,
        block_rows=_NOTHING,
        block_positions=_NOTHING,
        block_ids=_NOTHING,
        finished_rows=_NOTHING,
    )
