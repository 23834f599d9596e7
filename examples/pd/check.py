"""The demo's proof: prefill and decode apart give the tokens that one engine gives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs

from pd.router import Answer

__all__ = ["NEAR_TIE_LOGITS", "Difference", "compare", "shortcomings"]

NEAR_TIE_LOGITS = {"float32": 0.0, "bfloat16": 0.5, "float16": 0.1}
"""How far apart, in logits, two tokens may be for rounding to decide between them. Logits of the
demo's models reach about 30, where neighbouring bfloat16 numbers differ by 0.125 and float16
numbers by 0.016; an answer sums a few such errors. float32 answers must be equal."""


@attrs.frozen(kw_only=True)
class Difference:
    """An answer that is not the one that a single engine gives.

    Args:
        request_id: whose.
        position: of the first token that differs.
        is_excused: whether rounding may have decided between the two.
        words: what differs.
    """

    request_id: str
    position: int
    is_excused: bool
    words: str


def shortcomings(answers: Sequence[Answer], *, needs_transfer: bool) -> list[str]:
    """What is wrong with a run, whatever its tokens: chats without an answer, KV that never moved.

    Args:
        answers: from the two processes, or from the one.
        needs_transfer: whether prefill and decode were apart all the time.
    """
    found = [
        f"{answer.request_id} has no answer: {answer.finish_reason or 'never ended'}"
        + (f" ({answer.cause})" if answer.cause else "")
        for answer in answers
        if answer.finish_reason not in ("stop", "length") or not answer.token_ids
    ]
    if needs_transfer:
        found += [
            f"{answer.request_id} was decoded without any KV of the prefill process"
            for answer in answers
            if not (answer.num_moved_bytes or answer.num_local_decode_tokens)
        ]
        if not any(answer.num_moved_bytes for answer in answers):
            found.append("no KV was moved at all")
    return found


def compare(
    answers: Sequence[Answer],
    expected: Sequence[Answer],
    candidates: Mapping[str, Sequence[Mapping[int, float]]],
    *,
    dtype: str,
) -> list[Difference]:
    """Compare answers, request by request, with those of one engine.

    Args:
        answers: from the two processes.
        expected: from the one.
        candidates: by request and place, the likeliest tokens of the one, and how many logits each
            was behind.
        dtype: the precision; it decides how near a tie must be to excuse a difference.
    """
    differences = []
    for answer, solo in zip(answers, expected, strict=True):
        position = _first_difference(answer.token_ids, solo.token_ids)
        if position is not None:
            places = candidates.get(answer.request_id, ())
            near = places[position] if position < len(places) else {}
            differences.append(_judge(answer, solo, position, near, NEAR_TIE_LOGITS[dtype]))
    return differences


def _first_difference(tokens: Sequence[int], expected: Sequence[int]) -> int | None:
    for position, (token, other) in enumerate(zip(tokens, expected, strict=False)):
        if token != other:
            return position
    return None if len(tokens) == len(expected) else min(len(tokens), len(expected))


def _judge(
    answer: Answer, solo: Answer, position: int, near: Mapping[int, float], tolerance: float
) -> Difference:
    token = answer.token_ids[position] if position < len(answer.token_ids) else None
    other = solo.token_ids[position] if position < len(solo.token_ids) else None
    behind = math.inf if token is None else near.get(token, math.inf)
    return Difference(
        request_id=answer.request_id,
        position=position,
        is_excused=behind < tolerance,
        words=f"{answer.request_id}, token {position}: {token} instead of {other}"
        + (f", which is {behind:.4f} logits likelier" if math.isfinite(behind) else ""),
    )
