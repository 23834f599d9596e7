"""The chain hash that stands for KV in fakes: one number that depends on a whole prefix.

The hash of position ``i`` is ``mix(seed + mix(token_0, 0) + ... + mix(token_i, i))`` in arithmetic
modulo 2**64, where the seed stands for cache salt and LoRA. Tokens are mixed with their positions
first, so the sum knows their order; and since it is a sum, the hashes of a prompt of any length are
one vectorised cumulative sum.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

__all__ = ["OMITTED", "POISON", "Chain", "chain_seed"]

UInt64Array = npt.NDArray[np.uint64]
Int32Array = npt.NDArray[np.int32]

POISON = np.uint64(0xDEAD_BEEF_DEAD_BEEF)
"""What KV memory holds before anything is written to it."""
OMITTED = np.uint64(0x0DD5_107D_0DD5_107D)
"""What it holds where a row that failed was to write."""

_GOLDEN = np.uint64(0x9E37_79B9_7F4A_7C15)
_MULTIPLY_1 = np.uint64(0xBF58_476D_1CE4_E5B9)
_MULTIPLY_2 = np.uint64(0x94D0_49BB_1331_11EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)
_POSITION_SHIFT = np.uint64(32)


def _mix(values: UInt64Array) -> UInt64Array:
    """Scatter bits: the finaliser of SplitMix64 (Steele, Lea, Flood 2014). In place."""
    values += _GOLDEN
    values ^= values >> _SHIFT_1
    values *= _MULTIPLY_1
    values ^= values >> _SHIFT_2
    values *= _MULTIPLY_2
    values ^= values >> _SHIFT_3
    return values


def chain_seed(*, cache_salt: str | None = None, lora: str | None = None) -> np.uint64:
    """The seed of a domain. Different salts and adapters never share a chain."""
    digest = hashlib.blake2b(repr((cache_salt, lora)).encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


class Chain:
    """A growing token sequence with the chain hash of each of its positions.

    Args:
        seed: the domain, from `chain_seed`.
        token_ids: int32, the tokens so far.

    `append` costs O(1) amortised, `extend` O(number of new tokens).
    """

    def __init__(self, seed: np.uint64, token_ids: Int32Array) -> None:
        self._sum = np.array([seed], dtype=np.uint64)
        self._tokens = np.empty(0, dtype=np.int32)
        self._hashes = np.empty(0, dtype=np.uint64)
        self._length = 0
        self.extend(token_ids)

    def __len__(self) -> int:
        return self._length

    @property
    def token_ids(self) -> Int32Array:
        """int32 (length,), a view."""
        return self._tokens[: self._length]

    @property
    def hashes(self) -> UInt64Array:
        """uint64 (length,), the hash of each position; a view."""
        return self._hashes[: self._length]

    def append(self, token_id: int) -> None:
        self.extend(np.array([token_id], dtype=np.int32))

    def extend(self, token_ids: Int32Array) -> None:
        start, end = self._length, self._length + token_ids.size
        self._reserve(end)
        mixed = np.arange(start, end, dtype=np.uint64)
        mixed <<= _POSITION_SHIFT
        mixed |= token_ids.astype(np.uint64)
        sums = np.cumsum(_mix(mixed), dtype=np.uint64)
        sums += self._sum
        if sums.size:
            self._sum = sums[-1:].copy()
        self._tokens[start:end] = token_ids
        self._hashes[start:end] = _mix(sums)
        self._length = end

    def _reserve(self, length: int) -> None:
        if length <= self._tokens.size:
            return
        capacity = max(length + 16, 2 * self._length)
        self._tokens = np.resize(self._tokens, capacity)
        self._hashes = np.resize(self._hashes, capacity)
