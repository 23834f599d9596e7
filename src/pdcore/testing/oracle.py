"""What a request must produce when it runs alone: the oracle of `FakeKVRunner`."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import numpy as np

from pdcore.errors import ConfigError
from pdcore.request import FinishReason, Request
from pdcore.testing.chain import Chain, chain_seed

__all__ = ["FakeModel", "Script"]

Script = Callable[[str, int], int | None]
"""Forces tokens: called with a request id and a token's position; None forces nothing."""


@attrs.frozen(kw_only=True)
class FakeModel:
    """A model whose next token is a function of the chain hash of the last one.

    Args:
        vocab_size: tokens are drawn below it.
        num_special_tokens: ids below it are never drawn, so that they end a request only where the
            script says so.
        script: forces tokens at places, for instance an end-of-sequence token.
    """

    vocab_size: int = 32_000
    num_special_tokens: int = 4
    script: Script | None = None

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.num_special_tokens < self.vocab_size:
            raise ConfigError(
                f"num_special_tokens={self.num_special_tokens}: must be in 0..vocab_size-1 "
                f"({self.vocab_size - 1}), or no token is left to draw"
            )

    def next_token(self, request_id: str, position: int, last_hash: np.uint64) -> int:
        """The token at ``position``, which follows a token whose chain hash is ``last_hash``."""
        forced = None if self.script is None else self.script(request_id, position)
        if forced is not None:
            return forced
        num_ordinary = self.vocab_size - self.num_special_tokens
        return self.num_special_tokens + int(last_hash) % num_ordinary

    def solo_run(
        self, request: Request, *, max_model_len: int = 2**31 - 1
    ) -> tuple[list[int], FinishReason]:
        """What a request produces alone, and why it ends. A pure function; no pool, no steps."""
        seed = chain_seed(cache_salt=request.cache_salt, lora=request.lora)
        chain = Chain(seed, request.prompt_token_ids)
        tokens: list[int] = []
        while True:
            token = self.next_token(request.request_id, len(chain), chain.hashes[-1])
            chain.append(token)
            tokens.append(token)
            if _is_stop(request, token, len(tokens)):
                return tokens, FinishReason.STOP
            if len(tokens) >= request.sampling.max_tokens or len(chain) >= max_model_len:
                return tokens, FinishReason.LENGTH

    def solo_tokens(self, request: Request, *, max_model_len: int = 2**31 - 1) -> list[int]:
        """What a request produces alone."""
        return self.solo_run(request, max_model_len=max_model_len)[0]


def _is_stop(request: Request, token: int, num_output_tokens: int) -> bool:
    sampling = request.sampling
    if num_output_tokens < sampling.min_tokens:
        return False
    is_eos = token == request.eos_token_id and not sampling.ignore_eos
    return is_eos or token in sampling.stop_token_ids
