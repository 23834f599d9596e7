"""What a scheduler is asked to do, as plain data: settings, arrivals, aborts, and the tokens drawn.

Nothing here knows any scheduler, so that the same file runs in every interpreter that drives one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["EOS", "Abort", "Arrival", "Settings", "Trace", "token_at"]

EOS = 0

_MASK = (1 << 64) - 1


def token_at(stream: int, position: int, vocab_size: int, *, attempt: int = 0) -> int:
    """The token of a stream at a position: any two streams differ, and each is the same for ever.

    Prompts and outputs come from here alike, so a prompt can repeat what another request drew.
    """
    x = (stream * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + attempt + 1) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return (x ^ (x >> 31)) % vocab_size


@dataclass(frozen=True)
class Settings:
    """How the scheduler is set up.

    Args:
        num_blocks: of the pool, the null block included.
        num_in_flight: plans made before the result of the oldest is taken in.
        vocab_size: tokens are 0..vocab_size-1, and 0 ends a sequence; a small one makes stops
            frequent and lets prefixes meet by chance.
    """

    block_size: int = 4
    num_blocks: int = 64
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 64
    max_model_len: int = 128
    long_prefill_token_threshold: int = 0
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    policy: str = "fcfs"
    num_in_flight: int = 1
    vocab_size: int = 100

    @property
    def capacity_tokens(self) -> int:
        """The most tokens whose KV the pool can hold for one request."""
        return (self.num_blocks - 1) * self.block_size


@dataclass(frozen=True)
class Arrival:
    """One request.

    Args:
        step: it is added before this step.
        prompt: (stream, length) for each run of tokens; a run's tokens depend on where it starts.
        stream: what its output is drawn from.
    """

    step: int
    prompt: tuple[tuple[int, int], ...]
    stream: int
    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    priority: int = 0
    arrival_time: float = 0.0
    cache_salt: str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return sum(length for _, length in self.prompt)


@dataclass(frozen=True)
class Abort:
    """The end of a request from outside, before a step or between its plan and its result."""

    step: int
    request: int
    is_between: bool = False


@dataclass(frozen=True)
class Trace:
    """All that a scheduler is told, apart from the results of its own plans."""

    name: str
    settings: Settings
    arrivals: tuple[Arrival, ...]
    aborts: tuple[Abort, ...] = field(default=())

    def request_id(self, request: int) -> str:
        """Ids sort otherwise than requests arrive, so that nothing can lean on their order."""
        return f"{request * 37 % 101:03d}-{request}"

    def prompt_token_ids(self, request: int) -> npt.NDArray[np.int32]:
        """int32, the request's prompt."""
        return np.array(list(self._prompt(self.arrivals[request])), np.int32)

    def limit(self, request: int) -> int:
        """The most tokens that a request may come to, prompt included."""
        arrival = self.arrivals[request]
        return min(arrival.num_prompt_tokens + arrival.max_tokens, self.settings.max_model_len)

    def draw(self, request: int, position: int) -> int:
        """The token that the model draws for a request at a position of its sequence.

        Before ``min_tokens`` it is never one that stops, as samplers see to.
        """
        arrival, vocab_size = self.arrivals[request], self.settings.vocab_size
        token = token_at(arrival.stream, position, vocab_size)
        if position - arrival.num_prompt_tokens >= arrival.min_tokens:
            return token
        attempt = 0
        while token == EOS or token in arrival.stop_token_ids:
            attempt += 1
            token = token_at(arrival.stream, position, vocab_size, attempt=attempt)
        return token

    def tokens_digest(self) -> str:
        """A digest of every token that can occur, which changes if any of them does."""
        digest = hashlib.blake2b(digest_size=8)
        for request, arrival in enumerate(self.arrivals):
            digest.update(self.prompt_token_ids(request).tobytes())
            start = arrival.num_prompt_tokens
            drawn = [self.draw(request, place) for place in range(start, self.limit(request))]
            digest.update(np.array(drawn, np.int32).tobytes())
        return digest.hexdigest()

    def to_data(self) -> dict[str, Any]:
        """Plain lists and dictionaries, without what has its default."""
        return {
            "name": self.name,
            "settings": _changed(self.settings),
            "arrivals": [_changed(arrival) for arrival in self.arrivals],
            "aborts": [_changed(abort) for abort in self.aborts],
        }

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Trace:
        """The reverse of `to_data`."""
        arrivals = [
            Arrival(
                **{
                    **arrival,
                    "prompt": tuple((stream, length) for stream, length in arrival["prompt"]),
                    "stop_token_ids": tuple(arrival.get("stop_token_ids", ())),
                }
            )
            for arrival in data["arrivals"]
        ]
        return cls(
            name=data["name"],
            settings=Settings(**data["settings"]),
            arrivals=tuple(arrivals),
            aborts=tuple(Abort(**abort) for abort in data["aborts"]),
        )

    def __str__(self) -> str:
        return json.dumps(self.to_data())

    def _prompt(self, arrival: Arrival) -> Iterator[int]:
        position = 0
        for stream, length in arrival.prompt:
            for _ in range(length):
                yield token_at(stream, position, self.settings.vocab_size)
                position += 1


def _changed(value: Settings | Arrival | Abort) -> dict[str, Any]:
    defaults = {entry.name: entry.default for entry in fields(value)}
    return {name: item for name, item in asdict(value).items() if item != defaults[name]}
