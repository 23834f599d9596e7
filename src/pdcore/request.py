"""What an application asks for, and the states a request passes through.

`Request` and `SamplingParams` are what the application builds. They never change after they are
made; what happens to a request lives in the scheduler. `TRANSITIONS` is the whole life of a
request as data.
"""

from __future__ import annotations

import enum
import operator
import sys
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from pdcore.errors import InvalidRequest
from pdcore.shown import shown
from pdcore.token_ids import as_token_ids

__all__ = [
    "TRANSITIONS",
    "FinishReason",
    "Request",
    "RequestStatus",
    "SamplingParams",
]


class RequestStatus(enum.Enum):
    """Where a request is in its life."""

    # By identity, which costs no call of Python; each member exists once.
    __hash__ = object.__hash__

    WAITING = "WAITING"
    """In the queue, without a row."""
    WAITING_FOR_GRAMMAR = "WAITING_FOR_GRAMMAR"
    """Its grammar is being compiled."""
    WAITING_FOR_REMOTE_KVS = "WAITING_FOR_REMOTE_KVS"
    """Its KV is on the way. It has blocks, but no row and no compute slot."""
    RUNNING = "RUNNING"
    """It has a row on every worker."""
    PREEMPTED = "PREEMPTED"
    """It lost its row and blocks to others and is back in the queue."""
    FINISHED = "FINISHED"
    """It ended, for a `FinishReason`."""


TRANSITIONS: Mapping[RequestStatus, frozenset[RequestStatus]] = MappingProxyType(
    {
        RequestStatus.WAITING: frozenset(
            {
                RequestStatus.RUNNING,
                RequestStatus.WAITING_FOR_GRAMMAR,
                RequestStatus.WAITING_FOR_REMOTE_KVS,
                RequestStatus.FINISHED,
            }
        ),
        RequestStatus.WAITING_FOR_GRAMMAR: frozenset(
            {RequestStatus.WAITING, RequestStatus.FINISHED}
        ),
        RequestStatus.WAITING_FOR_REMOTE_KVS: frozenset(
            {RequestStatus.WAITING, RequestStatus.FINISHED}
        ),
        RequestStatus.RUNNING: frozenset({RequestStatus.PREEMPTED, RequestStatus.FINISHED}),
        RequestStatus.PREEMPTED: frozenset(
            {
                RequestStatus.RUNNING,
                RequestStatus.WAITING_FOR_REMOTE_KVS,
                RequestStatus.FINISHED,
            }
        ),
        RequestStatus.FINISHED: frozenset(),
    }
)
"""Which status may follow which. Every change of status is checked against this table."""


class FinishReason(enum.IntEnum):
    """Why a request ended. In columns of `StepResult`, 0 stands for "not ended"."""

    STOP = 1
    """It sampled its end-of-sequence token or a stop token."""
    LENGTH = 2
    """It reached ``max_tokens`` or the model length."""
    ABORT = 3
    """The application aborted it."""
    ERROR = 4
    """Something that only this request depends on failed; the cause says what."""
    CAPACITY = 5
    """It outgrew the block pool. Its tokens so far are valid."""
    TIMEOUT = 6
    """Its deadline passed."""

    def __str__(self) -> str:
        return self.name.lower()

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


def _finite_at_least_zero(name: str, value: float) -> None:
    if type(value) is float and 0.0 <= value <= _MAX_FLOAT:
        return
    if not (isinstance(value, int | float) and 0 <= value <= _MAX_FLOAT):
        raise InvalidRequest(
            f"{name}={shown(value)} is not allowed: pass a finite number >= 0 (0 means greedy)"
        )


def _stop_token_ids(values: Iterable[int]) -> tuple[int, ...]:
    if isinstance(values, tuple) and not values:
        return ()
    try:
        ids = tuple(operator.index(value) for value in values)
    except TypeError:
        raise InvalidRequest(
            f"stop_token_ids={shown(values)}: pass a sequence of integers"
        ) from None
    if any(not 0 <= value < 2**31 for value in ids):
        raise InvalidRequest(f"stop_token_ids={shown(ids)} holds an id outside 0..2**31-1")
    return ids


_MAX_FLOAT = sys.float_info.max

_RESERVED: Mapping[str, Any] = MappingProxyType(
    {
        "n": 1,
        "logprobs": None,
        "prompt_logprobs": None,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "pooling": None,
        "encoder_inputs": None,
    }
)
# What most requests leave as it is.
_SELDOM_SET: Mapping[str, Any] = MappingProxyType(
    {"min_tokens": 0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": None, **_RESERVED}
)
_seldom_set = operator.attrgetter(*_SELDOM_SET)


# Without slots, as all messages of which every request makes one: attrs fills a frozen class with
# slots by one call a field, and one without by writing its dictionary.
@attrs.frozen(kw_only=True, slots=False)
class SamplingParams:
    """How the tokens of one request are drawn, and when it ends.

    The order of the filters is temperature, top-k, top-p, min-p. ``temperature=0`` takes the most
    likely token and ignores the filters. With a ``seed`` the draw at a position depends on the seed
    and the position alone, so a preempted request draws the same tokens again.

    Args:
        max_tokens: the most tokens to produce, at least 1.
        min_tokens: before this many tokens, end-of-sequence and stop tokens do not end the request.
        temperature: 0 for greedy, else the divisor of the logits.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches ``top_p``; 1 keeps all.
        min_p: drop tokens less likely than ``min_p`` times the most likely one; 0 keeps all.
        seed: makes the draws repeatable, in 0..2**63-1. None lets the runner pick one.
        stop_token_ids: ids that end the request; the id itself is part of the output.
        ignore_eos: go on after the end-of-sequence token.
        structured_output: what the scheduler's grammar compiles, or None.

    The remaining names are reserved: any value but the default raises `InvalidRequest`.

    Raises:
        InvalidRequest: a value is out of its range.
    """

    max_tokens: int = 16
    min_tokens: int = _SELDOM_SET["min_tokens"]
    temperature: float = 1.0
    top_k: int = _SELDOM_SET["top_k"]
    top_p: float = _SELDOM_SET["top_p"]
    min_p: float = _SELDOM_SET["min_p"]
    seed: int | None = _SELDOM_SET["seed"]
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=_stop_token_ids)
    ignore_eos: bool = False
    structured_output: Any = None
    n: int = _SELDOM_SET["n"]
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = _SELDOM_SET["presence_penalty"]
    frequency_penalty: float = _SELDOM_SET["frequency_penalty"]
    repetition_penalty: float = _SELDOM_SET["repetition_penalty"]
    pooling: None = None
    encoder_inputs: None = None

    def __attrs_post_init__(self) -> None:
        is_usual = (
            type(self.max_tokens) is int
            and 1 <= self.max_tokens < 2**31
            and type(self.temperature) is float
            and 0.0 <= self.temperature <= _MAX_FLOAT
            and all(map(operator.is_, _seldom_set(self), _SELDOM_SET.values()))
        )
        if not is_usual:
            self._check()

    def _check(self) -> None:
        """Raise `InvalidRequest` for the first value that is out of its range."""
        if not isinstance(self.max_tokens, int) or not 1 <= self.max_tokens < 2**31:
            raise InvalidRequest(
                f"max_tokens={shown(self.max_tokens)} is not allowed: pass an integer in "
                "1..2**31-1 (a prefill for hand-over uses 1)"
            )
        if not isinstance(self.min_tokens, int) or not 0 <= self.min_tokens <= self.max_tokens:
            raise InvalidRequest(
                f"min_tokens={shown(self.min_tokens)} is not allowed: pass an integer in "
                f"0..max_tokens ({self.max_tokens})"
            )
        _finite_at_least_zero("temperature", self.temperature)
        if not isinstance(self.top_k, int) or not 0 <= self.top_k < 2**31:
            raise InvalidRequest(f"top_k={shown(self.top_k)} is not allowed: pass 0..2**31-1")
        _finite_at_least_zero("top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            raise InvalidRequest(f"top_p={self.top_p!r} is not allowed: pass a value in (0, 1]")
        _finite_at_least_zero("min_p", self.min_p)
        if self.min_p > 1:
            raise InvalidRequest(f"min_p={self.min_p!r} is not allowed: pass a value in [0, 1]")
        if self.seed is not None and not (isinstance(self.seed, int) and 0 <= self.seed < 2**63):
            raise InvalidRequest(f"seed={shown(self.seed)} is not allowed: pass 0..2**63-1 or None")
        for name, default in _RESERVED.items():
            value = getattr(self, name)
            is_same = value is default or (type(value) in (int, float) and value == default)
            if not is_same:
                raise InvalidRequest(
                    f"{name}={shown(value)} is not supported yet; leave it at {default!r}"
                )

    def __reduce__(self) -> tuple[Any, ...]:
        # What is as usual is not written, and what was checked once is not checked again.
        changed = {
            name: value
            for name, value in zip(_SAMPLING_FIELDS, _sampling_values(self), strict=True)
            # What a grammar is made from may have an equality of its own.
            if value is not _SAMPLING_DEFAULTS[name]
            and (name == "structured_output" or value != _SAMPLING_DEFAULTS[name])
        }
        return _read_sampling, (changed,)


_SAMPLING_FIELDS = tuple(field.name for field in attrs.fields(SamplingParams))
_SAMPLING_DEFAULTS = {field.name: field.default for field in attrs.fields(SamplingParams)}
_sampling_values = operator.attrgetter(*_SAMPLING_FIELDS)


def _read_sampling(changed: dict[str, Any]) -> SamplingParams:
    sampling: SamplingParams = object.__new__(SamplingParams)
    vars(sampling).update(_SAMPLING_DEFAULTS | changed)
    return sampling


_OPTIONAL_STRINGS = ("tenant", "cache_salt", "lora")
_OPTIONAL_TIMES = ("arrival_time", "deadline")
_optional_values = operator.attrgetter(*_OPTIONAL_STRINGS, *_OPTIONAL_TIMES)


@attrs.frozen(eq=False, slots=False)
class Request:
    """One prompt to continue.

    Args:
        request_id: the application's name for it, unique among unfinished requests.
        prompt_token_ids: the prompt, any flat integer sequence; kept as a read-only int32 array.
        sampling: how tokens are drawn and when the request ends.
        eos_token_id: the end-of-sequence token, or None when there is none.
        priority: lower runs first under the `Priority` policy.
        tenant: whose request it is, for policies that share fairly.
        metadata: the application's own data; pdcore never looks inside.
        arrival_time: seconds on the scheduler's clock; None means the moment it is added.
        cache_salt: only requests with an equal salt share cached blocks.
        lora: name of the adapter to run it with; different adapters never share blocks.
        kv_transfer_params: for the connector: asks for a hand-over, or says where KV lies.
        deadline: seconds on the scheduler's clock after which it ends with ``timeout``.

    Raises:
        InvalidRequest: the prompt is empty, not flat, or not made of token ids.
    """

    request_id: str
    prompt_token_ids: npt.NDArray[np.int32] = attrs.field(converter=as_token_ids, repr=False)
    sampling: SamplingParams = attrs.field(factory=SamplingParams, kw_only=True)
    eos_token_id: int | None = attrs.field(default=None, kw_only=True)
    priority: int = attrs.field(default=0, kw_only=True)
    tenant: str | None = attrs.field(default=None, kw_only=True)
    metadata: Any = attrs.field(default=None, kw_only=True, repr=False)
    arrival_time: float | None = attrs.field(default=None, kw_only=True)
    cache_salt: str | None = attrs.field(default=None, kw_only=True)
    lora: str | None = attrs.field(default=None, kw_only=True)
    kv_transfer_params: Mapping[str, Any] | None = attrs.field(
        default=None, kw_only=True, repr=False
    )
    deadline: float | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.request_id, str) or not self.request_id:
            raise InvalidRequest(f"request_id={shown(self.request_id)}: pass a non-empty string")
        if not isinstance(self.sampling, SamplingParams):
            raise InvalidRequest(f"sampling={shown(self.sampling)}: pass SamplingParams(...)")
        if not isinstance(self.priority, int) or not -(2**63) <= self.priority < 2**63:
            raise InvalidRequest(f"priority={shown(self.priority)}: pass an integer of 64 bits")
        eos = self.eos_token_id
        if eos is not None and not (isinstance(eos, int) and 0 <= eos < 2**31):
            raise InvalidRequest(f"eos_token_id={shown(eos)}: pass a token id or None")
        params = self.kv_transfer_params
        if params is not None and not isinstance(params, Mapping):
            raise InvalidRequest(
                f"kv_transfer_params={shown(params)}: pass the mapping that the "
                "prefill engine returned"
            )
        values = _optional_values(self)
        if values.count(None) == len(values):
            return
        for name, value in zip(_OPTIONAL_STRINGS, values, strict=False):
            if value is None:
                continue
            if not isinstance(value, str):
                raise InvalidRequest(f"{name}={shown(value)}: pass a string or None")
            try:
                value.encode()
            except UnicodeEncodeError:
                # JSON can name one, and nothing that is hashed or written can hold it.
                raise InvalidRequest(
                    f"{name}={value!r} holds half a surrogate pair, which is no character: "
                    "pass a string that can be encoded"
                ) from None
        for name, value in zip(_OPTIONAL_TIMES, values[len(_OPTIONAL_STRINGS) :], strict=True):
            is_time = isinstance(value, int | float) and abs(value) <= _MAX_FLOAT
            if not (is_time or value is None):
                raise InvalidRequest(f"{name}={shown(value)}: pass finite seconds or None")

    @property
    def num_prompt_tokens(self) -> int:
        return self.prompt_token_ids.size

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy of an array can be written to, and a prompt never.
        prompt = as_token_ids(state["prompt_token_ids"])
        vars(self).update(state, prompt_token_ids=prompt)

    def arriving_at(self, time: float) -> Request:
        """This request with ``time`` as its arrival, unless it has one."""
        if self.arrival_time is not None:
            return self
        if type(self) is not Request:
            return attrs.evolve(self, arrival_time=time)
        # Nothing but the time is new, so nothing is validated again.
        arrived: Request = object.__new__(Request)
        vars(arrived).update(vars(self), arrival_time=time)
        return arrived
