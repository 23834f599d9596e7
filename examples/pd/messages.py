"""What the router and an engine process tell each other through a pipe: plain, frozen data."""

from __future__ import annotations

from typing import Any

import attrs

from pdcore.trace import Trace

__all__ = [
    "Bye",
    "Candidates",
    "EngineFailed",
    "EngineReady",
    "EngineSettings",
    "Moved",
    "NewTokens",
    "Recorded",
    "RequestDone",
    "Submit",
]


@attrs.frozen(kw_only=True)
class EngineSettings:
    """How to build one engine.

    Args:
        role: ``prefill``, ``decode``, or ``solo`` for one that does both, without a connector.
        model: path of the checkpoint.
        device, dtype: where and in what precision it runs; None lets the runner choose.
        max_num_seqs: requests that compute at once.
        max_num_batched_tokens: tokens of one step, so also of one prefill chunk.
        max_model_len: tokens of one request.
        num_blocks: size of the KV cache.
        num_threads: for torch on a CPU.
        lease_s: how long finished prompts are kept for a reader that does not renew.
        load_timeout_s: how long a request waits for its KV before it is computed here.
        key: shared by engines that may read each other's KV.
        keeps_candidates: report what else each token could have been.
        depth: plans under way; 1 runs one step at a time.
    """

    role: str
    model: str
    device: str | None = None
    dtype: str | None = None
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 512
    max_model_len: int = 2048
    num_blocks: int = 512
    num_threads: int = 1
    lease_s: float = 20.0
    load_timeout_s: float = 20.0
    key: bytes | None = attrs.field(default=None, repr=False)
    keeps_candidates: bool = False
    depth: int = 2

    @property
    def has_connector(self) -> bool:
        """Whether it exchanges KV with another engine."""
        return self.role != "solo"


@attrs.frozen(kw_only=True)
class Submit:
    """To an engine: take this request."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    eos_token_id: int | None
    kv_transfer_params: dict[str, Any] | None = None


@attrs.frozen
class Bye:
    """To an engine: send your trace and end."""


@attrs.frozen(kw_only=True)
class EngineReady:
    """From an engine: the model is loaded."""

    role: str
    dtype: str
    num_blocks: int
    bytes_per_block: int


@attrs.frozen(kw_only=True)
class EngineFailed:
    """From an engine: it cannot go on, for this reason."""

    role: str
    cause: str


@attrs.frozen(kw_only=True)
class NewTokens:
    """From an engine: a request produced these, at ``time`` on the machine's monotonic clock."""

    role: str
    request_id: str
    token_ids: tuple[int, ...]
    time: float


@attrs.frozen(kw_only=True)
class RequestDone:
    """From an engine: a request ended."""

    role: str
    request_id: str
    finish_reason: str
    cause: str | None
    kv_transfer_params: dict[str, Any] | None
    num_cached_tokens: int
    num_external_tokens: int
    time: float


@attrs.frozen(kw_only=True)
class Moved:
    """From the decode engine: the KV of a request was read from the peer."""

    request_id: str
    num_bytes: int
    seconds: float


@attrs.frozen(kw_only=True)
class Candidates:
    """From the solo engine: the likeliest tokens at each place of an answer.

    Args:
        request_id: whose answer.
        candidates: for each place, tokens and how many logits they were behind the likeliest.
    """

    request_id: str
    candidates: tuple[dict[int, float], ...]


@attrs.frozen(kw_only=True)
class Recorded:
    """From an engine: its trace so far."""

    role: str
    trace: Trace
