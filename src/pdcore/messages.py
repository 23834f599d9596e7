"""What travels round one step: plan, result, and what the application is told.

All are frozen and picklable; plans and results are written as packed columns (`pdcore.wire`).
Arrays are columns: entry ``i`` of every array in a group speaks of the same row. Nobody writes to
an array after its message is made.

Those of which a step or a request makes one have no slots: attrs fills a frozen class with slots by
one call a field, and one without by writing its dictionary.
"""

from __future__ import annotations

import operator
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs
import numpy as np
import numpy.typing as npt

from pdcore import wire
from pdcore.masks import all_set
from pdcore.request import FinishReason, SamplingParams

if TYPE_CHECKING:
    from pdcore.connector.stats import TransferStats

__all__ = [
    "GrammarBitmask",
    "LoadFailure",
    "ModelRunnerOutput",
    "NewRequestData",
    "PushReport",
    "RequestOutput",
    "RowError",
    "SchedulerOutput",
    "StepResult",
    "TransferKey",
    "TransferReport",
]

Int32Array = npt.NDArray[np.int32]
Int8Array = npt.NDArray[np.int8]
BoolArray = npt.NDArray[np.bool_]


class TransferKey(NamedTuple):
    """Names one attempt to load one request's KV. Never reused, unlike request ids."""

    uid: int
    attempt: int


@attrs.frozen(kw_only=True)
class LoadFailure:
    """A load that ended without all of its tokens.

    Args:
        transfer: which load.
        num_valid_tokens: tokens from the start of the prompt that are good, local ones included.
        cause: what went wrong, for people.
    """

    transfer: TransferKey
    num_valid_tokens: int
    cause: str


@attrs.frozen(kw_only=True)
class PushReport:
    """A rank sends nothing of a push any more.

    Args:
        push_id: which push; attempt: which beginning of it.
        rank: who says so.
        num_blocks: how many blocks, from the first on, arrived in whole.
        cause: why there are no more, for people; empty if all that was ordered arrived.
        was_cut: whether a write was ended by force, so that parts of it may still arrive.
    """

    push_id: str
    attempt: int
    rank: int
    num_blocks: int
    cause: str = ""
    was_cut: bool = False


@attrs.frozen(kw_only=True)
class TransferReport:
    """What a worker's connector has to say since its last report.

    Args:
        finished_sending: transfer ids of hand-overs whose blocks nobody reads any more.
        finished_recving: loads whose data is all there.
        failed: loads that ended otherwise. Once a load is in here, or in ``finished_recving``, the
            connector writes to its blocks no more.
        measured: what finished reads took, from connectors that measure.
        pushed: pushes that ended on a rank, from connectors that send KV ahead.
    """

    finished_sending: tuple[str, ...] = ()
    finished_recving: tuple[TransferKey, ...] = ()
    failed: tuple[LoadFailure, ...] = ()
    measured: tuple[TransferStats, ...] = ()
    pushed: tuple[PushReport, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.finished_sending or self.finished_recving or self.failed or self.pushed)


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

    def __reduce__(self) -> tuple[Any, ...]:
        plan = wire.pack(_plan_columns(self))
        blocks = wire.pack(_block_columns(self))
        samples = None if all_set(self.samples) else np.packbits(self.samples).tobytes()
        new_reqs = _pack_new_reqs(self.scheduled_new_reqs) if self.scheduled_new_reqs else None
        return _read_output, (self.step_id, plan, blocks, samples, new_reqs, self.connector_meta)

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
    step_id: int,
    plan: wire.Columns,
    blocks: wire.Columns,
    samples: bytes | None,
    new_reqs: tuple[Any, ...] | None,
    connector_meta: Any,
) -> SchedulerOutput:
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
    )


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
    """One step's result.

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
    transfer_report: TransferReport = TransferReport()

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


@attrs.frozen(kw_only=True, slots=False)
class RequestOutput:
    """What one step means for one request.

    Args:
        request_id: the application's name for it.
        new_token_ids: the tokens it produced in this step; may be empty.
        finish_reason: why it ended, or None while it lives.
        cause: the reason in words, when there is more to say than the reason does.
        kv_transfer_params: what to hand to the decode engine after a prefill for hand-over.
        num_prompt_tokens, num_output_tokens: totals so far, set when it ended.
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
