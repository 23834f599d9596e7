"""The tokens of one request and the prefix keys that follow from them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["TokenSequence"]

TokenIds = npt.NDArray[np.int32]


class TokenSequence:
    """A growing run of token ids, prompt first, with the keys of its full blocks.

    The prompt's array is shared until the first token is appended, so a waiting request costs no
    second copy.

    Args:
        prompt: int32, never written to.
        cache_salt: only sequences with equal salts share blocks.
        lora: only sequences with equal adapters share blocks.
    """

    __slots__ = ("_buffer", "_length", "cache_salt", "keys", "lora")

    def __init__(
        self, prompt: TokenIds, *, cache_salt: str | None = None, lora: str | None = None
    ) -> None:
        self._buffer = prompt
        self._length = prompt.size
        self.cache_salt = cache_salt
        self.lora = lora
        self.keys: list[bytes] = []

    def __len__(self) -> int:
        return self._length

    def append(self, tokens: TokenIds) -> None:
        """Add tokens at the end. Cost: amortised O(len(tokens))."""
        length = self._length + tokens.size
        if length > self._buffer.size or not self._buffer.flags.writeable:
            grown = np.empty(max(length + 64, self._buffer.size * 9 // 8), np.int32)
            grown[: self._length] = self._buffer[: self._length]
            self._buffer = grown
        self._buffer[self._length : length] = tokens
        self._length = length

    def slice(self, start: int, end: int) -> TokenIds:
        """Tokens ``start`` to ``end``, as a copy that later appends do not change."""
        return self._buffer[start : min(end, self._length)].copy()
