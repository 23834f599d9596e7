"""The tokens of one request and the prefix keys that follow from them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["TokenSequence"]

TokenIds = npt.NDArray[np.int32]

_TOKEN_BYTES = 4


class TokenSequence:
    """A growing run of token ids, prompt first, with the keys of its full blocks.

    The prompt's array is shared, never copied. Tokens that follow are kept as bytes, which grow
    without a new array.

    Args:
        prompt: int32, never written to.
        cache_salt: only sequences with equal salts share blocks.
        lora: only sequences with equal adapters share blocks.
    """

    __slots__ = ("_length", "_output", "_prompt", "cache_salt", "keys", "lora")

    def __init__(
        self, prompt: TokenIds, *, cache_salt: str | None = None, lora: str | None = None
    ) -> None:
        self._prompt = prompt
        self._length: int = prompt.size
        self._output = bytearray()
        self.cache_salt = cache_salt
        self.lora = lora
        self.keys: list[bytes] = []

    def __len__(self) -> int:
        return self._length

    def append(self, tokens: TokenIds) -> None:
        """Add tokens at the end. Cost: amortised O(len(tokens))."""
        added = np.ascontiguousarray(tokens, np.int32)
        self._output += added.tobytes()
        self._length += added.size

    def tokens(self) -> TokenIds:
        """All tokens; the prompt's own array as long as there are no others."""
        return self.slice(0, len(self)) if self._output else self._prompt

    def fill_block(self, block: bytes) -> None:
        """Add the tokens that the last block lacks, given all of it as bytes."""
        missing = block[self._length * _TOKEN_BYTES % len(block) :]
        self._output += missing
        self._length += len(missing) // _TOKEN_BYTES

    def last_block(self, block_size: int) -> TokenIds:
        """The tokens of the last block, partial or just full."""
        start = (self._length - 1) // block_size * block_size
        return self.slice(start, self._length) if self._output else self._prompt[start:]

    def slice(self, start: int, end: int) -> TokenIds:
        """Tokens ``start`` to ``end``; later appends do not change them."""
        num_prompt = self._prompt.size
        prompt = self._prompt[start:end]
        if end <= num_prompt or not self._output:
            return prompt
        begin = max(start - num_prompt, 0) * _TOKEN_BYTES
        output = self._output[begin : (end - num_prompt) * _TOKEN_BYTES]
        tokens = np.frombuffer(output, np.int32)
        return np.concatenate((prompt, tokens)) if prompt.size else tokens
