"""What is refused at the door."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pdcore.checks import check_count, check_part
from pdcore.clock import Clock
from pdcore.connector.base import KVConnector, SchedulerConnector
from pdcore.errors import ConfigError, InvalidRequest, OutputMismatch, OutputOrder
from pdcore.kvcache.manager import KVCacheManager
from pdcore.masks import all_set, any_set
from pdcore.messages import ModelRunnerOutput, SchedulerOutput
from pdcore.request import Request
from pdcore.scheduler.base import Limits
from pdcore.scheduler.core import Core
from pdcore.scheduler.grammar import GrammarBackend
from pdcore.scheduler.policy import SchedulingPolicy

__all__ = [
    "check_parts",
    "out_of_order",
    "policy_key",
    "refuse_mismatch",
    "refuse_what_cannot_fit",
]

_ZERO = np.array(0, np.int32)
_FLOATS = (float, np.floating)


def check_parts(
    kv_manager: KVCacheManager,
    policy: SchedulingPolicy,
    limits: Limits,
    connector: SchedulerConnector | None,
    grammar: GrammarBackend | None,
    clock: Clock,
) -> None:
    """Raise `ConfigError` for what cannot be a part: a class in place of an instance, say."""
    check_part("kv_manager", kv_manager, KVCacheManager)
    check_part("policy", policy, SchedulingPolicy)
    check_part("limits", limits, Limits)
    check_part("clock", clock, Clock)
    if isinstance(connector, KVConnector):
        raise ConfigError(
            f"a {type(connector).__name__} was given as connector: pass the half that its "
            "scheduler_side() returns"
        )
    if connector is not None:
        check_part("connector", connector, SchedulerConnector)
        if kv_manager.sliding_window is not None:
            raise ConfigError(
                "a KV connector was given with a model that has a sliding window; "
                "KV behind a window cannot be transferred yet"
            )
    if grammar is not None:
        check_part("grammar", grammar, GrammarBackend)
        check_count("grammar.vocab_size", getattr(grammar, "vocab_size", None))
    has_order = type(policy).order is not SchedulingPolicy.order
    if has_order and not policy.dynamic:
        raise ConfigError(
            f"{type(policy).__name__} has an order(), which nobody would ask: set dynamic = True, "
            "or leave order() out"
        )
    if policy.dynamic and not has_order:
        raise ConfigError(
            f"{type(policy).__name__} is dynamic, but has no order(): override it, or leave "
            "dynamic at False"
        )


def refuse_what_cannot_fit(core: Core, request: Request) -> None:
    """Raise `InvalidRequest`, with the numbers, for a request that can never be served."""
    limits = core.limits
    num_prompt = request.num_prompt_tokens
    if num_prompt + 1 > limits.max_model_len:
        raise InvalidRequest(
            f"request {request.request_id!r} has {num_prompt} prompt tokens and needs room for "
            f"1 more; max_model_len is {limits.max_model_len}. Shorten the prompt."
        )
    needed = core.manager.max_blocks_for(num_prompt, chunk=limits.max_num_batched_tokens)
    if needed > core.manager.pool.num_usable_blocks:
        raise InvalidRequest(
            f"request {request.request_id!r} has {num_prompt} prompt tokens and needs {needed} "
            f"blocks; the pool has {core.manager.pool.num_usable_blocks}. Shorten the prompt "
            "or give the pool more memory."
        )
    if not limits.enable_chunked_prefill and num_prompt > limits.max_num_batched_tokens:
        raise InvalidRequest(
            f"request {request.request_id!r} has {num_prompt} prompt tokens, chunked prefill is "
            f"off and max_num_batched_tokens is {limits.max_num_batched_tokens}. Raise that "
            "limit or enable chunked prefill."
        )
    if limits.vocab_size is not None:
        highest = int(request.prompt_token_ids.max())
        if highest >= limits.vocab_size:
            raise InvalidRequest(
                f"request {request.request_id!r} has token id {highest}; the vocabulary ends "
                f"at {limits.vocab_size - 1}. Was the prompt made by another tokenizer?"
            )
    if request.sampling.structured_output is not None and core.grammar is None:
        raise InvalidRequest(
            f"request {request.request_id!r} asks for structured output, but the scheduler has "
            "no grammar; pass grammar= when you make it"
        )


def policy_key(core: Core, request: Request) -> Any:
    """The policy's key for a request; raises `InvalidRequest` when there is none."""
    try:
        key = core.policy.key(request)
        if _holds_nan(key):
            raise ValueError(f"{key!r:.80}: NaN has no place in an order")
        core.waiting.can_compare(key)
    except Exception as error:
        raise InvalidRequest(
            f"request {request.request_id!r} was refused: the policy's key() raised {error!r}, or "
            "returned what cannot be compared with other keys"
        ) from error
    return key


def _holds_nan(key: Any) -> bool:
    if isinstance(key, tuple):
        return any(map(_holds_nan, key))
    return isinstance(key, _FLOATS) and key != key


def out_of_order(core: Core, output: object, place: str, rule: str) -> OutputOrder:
    """Why a plan's result, or its end, cannot be taken in now."""
    if not isinstance(output, SchedulerOutput):
        return OutputOrder(f"got a {type(output).__name__}: pass what schedule() returned")
    known = {plan.step_id: plan for plan in core.in_flight}
    if known.get(output.step_id, output) is not output:
        return OutputOrder(
            f"this plan of step {output.step_id} is a copy, or another scheduler's: pass the very "
            "object that schedule() returned"
        )
    listed = ", ".join(map(str, known)) or "none is"
    return OutputOrder(f"step {output.step_id} is not {place} in flight ({listed}); {rule}")


def refuse_mismatch(output: SchedulerOutput, result: ModelRunnerOutput) -> bool:
    """Raise `OutputMismatch` unless a result answers its plan: one token, or one error, for each
    row that was to draw, and nothing else but errors of rows that were not.

    Returns:
        Whether the tokens are those of all rows that were to draw, in the plan's order.
    """
    if not isinstance(result, ModelRunnerOutput):
        raise OutputMismatch(
            f"the result of step {output.step_id} is a {type(result).__name__}: "
            "pass a ModelRunnerOutput"
        )
    rows, epochs, tokens = result.rows, result.epochs, result.sampled_token_ids
    for name in ("rows", "epochs", "sampled_token_ids"):
        dtype = getattr(getattr(result, name), "dtype", None)
        if dtype != np.int32:
            raise OutputMismatch(
                f"the result of step {output.step_id} has {name} of dtype {dtype}: "
                "pass an int32 array"
            )
    if not (rows.shape == epochs.shape == tokens.shape[:1] and tokens.shape[1:] == (1,)):
        raise OutputMismatch(
            f"the result of step {output.step_id} has rows {rows.shape}, epochs {epochs.shape} and "
            f"sampled_token_ids {tokens.shape}: expected (n,), (n,) and (n, 1)"
        )
    if any_set(tokens < _ZERO):
        raise OutputMismatch(f"the result of step {output.step_id} holds a negative token id")
    drawing, expected_rows, expected_epochs = output.samples, output.rows, output.epochs
    if not all_set(drawing):
        expected_rows, expected_epochs = expected_rows[drawing], expected_epochs[drawing]
    is_exact = _are_equal(rows, expected_rows) and _are_equal(epochs, expected_epochs)
    if is_exact and not result.errors:
        return True
    planned = dict(
        zip(
            zip(output.rows.tolist(), output.epochs.tolist(), strict=True),
            drawing.tolist(),
            strict=True,
        )
    )
    drawn = list(zip(rows.tolist(), epochs.tolist(), strict=True))
    failed = [(error.row, error.epoch) for error in result.errors]
    answered = [*drawn, *failed]
    expected = {pair for pair, draws in planned.items() if draws}
    is_answer = (
        len(set(answered)) == len(answered)
        and expected <= set(answered) <= planned.keys()
        and set(drawn) <= expected
    )
    if not is_answer:
        raise OutputMismatch(
            f"the result of step {output.step_id} answers (row, epoch) {sorted(answered)}, but the "
            f"plan asked {sorted(expected)} for one token each: return a token or a RowError for "
            "each, once"
        )
    return False


def _are_equal(one: npt.NDArray[np.int32], other: npt.NDArray[np.int32]) -> bool:
    return one is other or (one.dtype == other.dtype and one.tobytes() == other.tobytes())
