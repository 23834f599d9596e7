"""Short ways to write plans for `FakeKVRunner`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pdcore.kvcache.spec import KVCacheConfig
from pdcore.messages import ModelRunnerOutput, NewRequestData, SchedulerOutput
from pdcore.request import SamplingParams
from pdcore.testing import FakeKVRunner

PROMPT = tuple(range(11, 21))
_STEP_IDS = itertools.count()


def int32(values: Sequence[int]) -> npt.NDArray[np.int32]:
    """A column."""
    return np.array(values, dtype=np.int32)


def make_runner(num_blocks: int = 12, **kwargs: Any) -> FakeKVRunner:
    """A runner with blocks of 4 tokens, ready to run."""
    runner = FakeKVRunner(block_size=4, **kwargs)
    config = KVCacheConfig(spec=runner.get_kv_cache_spec(), num_blocks=num_blocks)
    runner.initialize_from_config(config)
    return runner


def new(
    row: int = 0,
    *,
    block_ids: Sequence[int],
    token_ids: Sequence[int] = PROMPT,
    epoch: int = 0,
    uid: int = 1,
    num_computed_tokens: int = 0,
    cache_salt: str | None = None,
    lora: str | None = None,
) -> NewRequestData:
    """A request that starts, or comes back, in a row."""
    return NewRequestData(
        row=row,
        epoch=epoch,
        uid=uid,
        request_id=f"request-{uid}",
        token_ids=int32(token_ids),
        num_prompt_tokens=len(token_ids),
        num_computed_tokens=num_computed_tokens,
        block_ids=int32(block_ids),
        sampling=SamplingParams(),
        cache_salt=cache_salt,
        lora=lora,
    )


def plan(
    *lines: tuple[int, int, int, bool],
    new_reqs: Sequence[NewRequestData] = (),
    blocks: Sequence[tuple[int, int, int]] = (),
    finished: Sequence[int] = (),
    epochs: Sequence[int] | None = None,
    step_id: int | None = None,
    connector_meta: Any = None,
) -> SchedulerOutput:
    """A plan; each line is (row, num_computed_tokens, num_scheduled_tokens, samples).

    Without a ``step_id`` it comes after all that were made before.
    """
    columns = list(zip(*lines, strict=True)) or [(), (), (), ()]
    changes = list(zip(*blocks, strict=True)) or [(), (), ()]
    return SchedulerOutput(
        step_id=next(_STEP_IDS) if step_id is None else step_id,
        rows=int32(columns[0]),
        epochs=int32([0] * len(lines) if epochs is None else epochs),
        num_computed_tokens=int32(columns[1]),
        num_scheduled_tokens=int32(columns[2]),
        samples=np.array(columns[3], dtype=np.bool_),
        scheduled_new_reqs=tuple(new_reqs),
        block_rows=int32(changes[0]),
        block_positions=int32(changes[1]),
        block_ids=int32(changes[2]),
        finished_rows=int32(finished),
        connector_meta=connector_meta,
    )


def run(runner: FakeKVRunner, output: SchedulerOutput) -> ModelRunnerOutput:
    """Execute a plan and sample it."""
    runner.execute_model(output)
    return runner.sample_tokens(None)


def token(output: ModelRunnerOutput) -> int:
    """The one token that a step drew."""
    assert output.sampled_token_ids.shape == (1, 1)
    return int(output.sampled_token_ids[0, 0])
