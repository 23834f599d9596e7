"""One step's plan, which goes to the workers."""

from __future__ import annotations

import operator
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from pdcore import wire
from pdcore.masks import all_set
from pdcore.request import SamplingParams

__all__ = ["NewRequestData", "SchedulerOutput"]

Int32Array = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]


@attrs.frozen(kw_only=True, eq=False, slots=False)
class NewRequestData:
    """All that a worker must know to start a row: a new request, or one that comes back.

    Args:
        row: the slot it has from now on.
        epoch: which tenancy of the slot this is.
        uid: the request's internal number, never reused.
        request_id: the application's name for it, for people.
        token_ids: int32, every known token: prompt, then output.
        num_prompt_tokens: how many of them are prompt.
        num_computed_tokens: how many already have their KV in the blocks.
        block_ids: int32, its block table so far.
        sampling: how to draw.
        cache_salt, lora: the domain that its KV belongs to.
    """

    row: int
    epoch: int
    uid: int
    request_id: str
    token_ids: Int32Array = attrs.field(repr=False)
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: Int32Array
    sampling: SamplingParams
    cache_salt: str | None = None
    lora: str | None = None


@attrs.frozen(kw_only=True, eq=False, slots=False)
class SchedulerOutput:
    """One step's plan.

    Args:
        step_id: counts up by one a plan.
        rows: int32 (n,), the rows to run, in running order.
        epochs: int32 (n,), which tenancy of each row is meant.
        num_scheduled_tokens: int32 (n,), tokens to compute for each row, at least 1.
        num_computed_tokens: int32 (n,), position of each row's first scheduled token.
        samples: bool (n,), whether the row's last scheduled token is its last known one, so that
            a new token is drawn from it.
        scheduled_new_reqs: rows that the workers do not know yet.
        block_rows, block_positions, block_ids: int32 (m,), changes to the block tables of rows that
            the workers know: ``table[row, position] = id``. Block 0 means "no longer there".
        finished_rows: int32, rows given up since the last plan, before any of this plan starts.
        connector_meta: what the scheduler's connector has to say to the workers', or None.
        num_pool_blocks: how many blocks the pool has that the block ids are from, the null block
            included; a worker with fewer raises `ConfigError`. 0 if it is not known.
        pool_block_size: how many tokens a block of that pool holds; a worker whose blocks hold
            another number raises `ConfigError`. 0 if it is not known.
    """

    step_id: int
    rows: Int32Array
    epochs: Int32Array
    num_scheduled_tokens: Int32Array
    num_computed_tokens: Int32Array
    samples: BoolArray
    scheduled_new_reqs: tuple[NewRequestData, ...] = ()
    block_rows: Int32Array
    block_positions: Int32Array
    block_ids: Int32Array
    finished_rows: Int32Array
    connector_meta: Any = None
    num_pool_blocks: int = 0
    pool_block_size: int = 0

    def __reduce__(self) -> tuple[Any, ...]:
        plan = wire.pack(_plan_columns(self))
        blocks = wire.pack(_block_columns(self))
        samples = None if all_set(self.samples) else np.packbits(self.samples).tobytes()
        new_reqs = _pack_new_reqs(self.scheduled_new_reqs) if self.scheduled_new_reqs else None
        facts = (self.step_id, self.connector_meta, self.num_pool_blocks, self.pool_block_size)
        return _read_output, (facts, plan, blocks, samples, new_reqs)

    @property
    def total_num_scheduled_tokens(self) -> int:
        return int(self.num_scheduled_tokens.sum())

    @property
    def is_empty(self) -> bool:
        """Whether the workers need not hear of this plan at all."""
        return not (self.rows.size or self.finished_rows.size) and self.connector_meta is None


_plan_columns = operator.attrgetter(
    "rows", "epochs", "num_scheduled_tokens", "num_computed_tokens", "finished_rows"
)
_block_columns = operator.attrgetter("block_rows", "block_positions", "block_ids")
_new_request_facts = operator.attrgetter(
    "row",
    "epoch",
    "uid",
    "request_id",
    "num_prompt_tokens",
    "num_computed_tokens",
    "cache_salt",
    "lora",
)


def _pack_new_reqs(new_reqs: tuple[NewRequestData, ...]) -> tuple[Any, ...]:
    """What workers must know of new rows; equal ways of drawing are written once."""
    samplings: list[SamplingParams] = []
    places: dict[Any, int] = {}
    kinds = []
    for new in new_reqs:
        kind = len(samplings)
        if new.sampling.structured_output is None:  # else it may be neither hashed nor compared
            kind = places.setdefault(new.sampling, kind)
        if kind == len(samplings):
            samplings.append(new.sampling)
        kinds.append(kind)
    return (
        list(map(_new_request_facts, new_reqs)),
        wire.pack([new.token_ids for new in new_reqs]),
        wire.pack([new.block_ids for new in new_reqs]),
        samplings,
        kinds,
    )


def _read_new_reqs(packed: tuple[Any, ...]) -> tuple[NewRequestData, ...]:
    facts, tokens, blocks, samplings, kinds = packed
    return tuple(
        NewRequestData(
            row=row,
            epoch=epoch,
            uid=uid,
            request_id=request_id,
            token_ids=token_ids,
            num_prompt_tokens=num_prompt_tokens,
            num_computed_tokens=num_computed_tokens,
            block_ids=block_ids,
            sampling=samplings[kind],
            cache_salt=cache_salt,
            lora=lora,
        )
        for (
            (row, epoch, uid, request_id, num_prompt_tokens, num_computed_tokens, cache_salt, lora),
            token_ids,
            block_ids,
            kind,
        ) in zip(facts, wire.unpack(tokens), wire.unpack(blocks), kinds, strict=True)
    )


def _read_output(
    facts: tuple[int, Any, int, int],
    plan: wire.Columns,
    blocks: wire.Columns,
    samples: bytes | None,
    new_reqs: tuple[Any, ...] | None,
) -> SchedulerOutput:
    step_id, connector_meta, num_pool_blocks, pool_block_size = facts
    rows, epochs, num_scheduled_tokens, num_computed_tokens, finished_rows = wire.unpack(plan)
    block_rows, block_positions, block_ids = wire.unpack(blocks)
    if samples is None:
        draws = np.ones(rows.size, np.bool_)
    else:
        bits = np.frombuffer(samples, np.uint8)
        draws = np.unpackbits(bits, count=rows.size).astype(np.bool_)
    return SchedulerOutput(
        step_id=step_id,
        rows=rows,
        epochs=epochs,
        num_scheduled_tokens=num_scheduled_tokens,
        num_computed_tokens=num_computed_tokens,
        samples=draws,
        scheduled_new_reqs=() if new_reqs is None else _read_new_reqs(new_reqs),
        block_rows=block_rows,
        block_positions=block_positions,
        block_ids=block_ids,
        finished_rows=finished_rows,
        connector_meta=connector_meta,
        num_pool_blocks=num_pool_blocks,
        pool_block_size=pool_block_size,
    )
