"""Hypothesis strategies for requests, limits, and traces of what an application does."""

from __future__ import annotations

import attrs

from pdcore.request import Request, SamplingParams
from pdcore.scheduler.base import Limits
from pdcore.testing.extras import require_hypothesis

require_hypothesis("pdcore.testing.strategies")

from hypothesis import strategies as st  # noqa: E402

__all__ = ["Abort", "Add", "Operation", "Step", "limits", "requests", "traces"]

_EOS = 2


@attrs.frozen
class Add:
    """Add a request."""

    request: Request


@attrs.frozen
class Step:
    """Run one step; abort some requests between its plan and its result.

    Args:
        aborts: ids of requests, which may be unknown or finished by then.
    """

    aborts: tuple[str, ...] = ()


@attrs.frozen
class Abort:
    """Abort a request between two steps.

    Args:
        request_id: its id; it may be unknown or finished by then.
    """

    request_id: str


Operation = Add | Step | Abort


@st.composite
def _prompts(draw: st.DrawFn, block_size: int, max_prompt_len: int, vocab_size: int) -> list[int]:
    """A prompt that is likely to begin as another one does.

    Its start is cut from one of two fixed sequences, at a block's edge or beside it.
    """
    family = draw(st.integers(0, 1))
    num_shared = draw(st.integers(0, max_prompt_len // block_size)) * block_size
    num_shared += draw(st.sampled_from([0, 1, block_size - 1]))
    shared = [(7 + 13 * family + i) % vocab_size for i in range(min(num_shared, max_prompt_len))]
    room = max_prompt_len - len(shared)
    tails = st.lists(st.integers(0, min(9, vocab_size - 1)), max_size=min(room, 2 * block_size))
    own = draw(tails)
    return shared + own or [family]


@st.composite
def _sampling_params(draw: st.DrawFn, max_tokens: int, vocab_size: int) -> SamplingParams:
    most = draw(st.integers(1, max_tokens))
    return SamplingParams(
        max_tokens=most,
        min_tokens=draw(st.integers(0, most)),
        temperature=0.0,
        stop_token_ids=draw(st.lists(st.integers(0, vocab_size - 1), max_size=3)),
        ignore_eos=draw(st.booleans()),
    )


def requests(
    request_id: str | st.SearchStrategy[str] = "request",
    *,
    block_size: int = 4,
    max_prompt_len: int = 24,
    max_tokens: int = 8,
    vocab_size: int = 32,
    eos_token_id: int = _EOS,
) -> st.SearchStrategy[Request]:
    """Requests whose prompts share prefixes, with salts, adapters, stop tokens and lengths.

    A small vocabulary makes stop tokens happen; give `FakeKVRunner` the same one, with
    ``num_special_tokens=0``, so that the end of sequence happens as well.

    Args:
        request_id: the id, or a strategy for it.
        block_size: prompts share prefixes up to, and beside, multiples of it.
        max_prompt_len: the longest prompt.
        max_tokens: the largest ``max_tokens``.
        vocab_size: all ids lie below it.
        eos_token_id: the end of sequence of requests that have one.
    """
    return st.builds(
        Request,
        st.just(request_id) if isinstance(request_id, str) else request_id,
        _prompts(block_size, max_prompt_len, vocab_size),
        sampling=_sampling_params(max_tokens, vocab_size),
        eos_token_id=st.sampled_from([None, eos_token_id]),
        priority=st.integers(0, 2),
        tenant=st.sampled_from([None, "a", "b"]),
        cache_salt=st.sampled_from([None, None, "salt"]),
        lora=st.sampled_from([None, None, "adapter"]),
    )


@st.composite
def limits(draw: st.DrawFn, *, max_num_seqs: int = 5, max_model_len: int = 64) -> Limits:
    """Tight limits, so that budgets, rows and chunks all run out."""
    num_seqs = draw(st.integers(1, max_num_seqs))
    return Limits(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=draw(st.integers(num_seqs, num_seqs + 24)),
        max_model_len=max_model_len,
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 3, 7])),
        max_num_parked=draw(st.integers(1, 4)),
        max_loras=draw(st.sampled_from([None, 1, 2])),
    )


@st.composite
def traces(
    draw: st.DrawFn,
    *,
    max_num_requests: int = 8,
    max_num_steps_between: int = 4,
    block_size: int = 4,
    max_prompt_len: int = 24,
    max_tokens: int = 8,
    vocab_size: int = 32,
) -> list[Operation]:
    """What an application may do: add, step, and abort at any point.

    Args:
        max_num_requests: how many requests are added at most.
        max_num_steps_between: steps between two additions, at most.
        block_size, max_prompt_len, max_tokens, vocab_size: as for `requests`.
    """
    num_requests = draw(st.integers(1, max_num_requests))
    ids = [f"r{index}" for index in range(num_requests)]
    aborts = st.lists(st.sampled_from([*ids, "unknown"]), max_size=2).map(tuple)
    between = st.lists(
        st.one_of(st.just(Step()), st.builds(Step, aborts), st.builds(Abort, st.sampled_from(ids))),
        max_size=max_num_steps_between,
    )
    trace: list[Operation] = []
    for name in ids:
        trace.append(
            Add(
                draw(
                    requests(
                        name,
                        block_size=block_size,
                        max_prompt_len=max_prompt_len,
                        max_tokens=max_tokens,
                        vocab_size=vocab_size,
                    )
                )
            )
        )
        trace.extend(draw(between))
    return trace
