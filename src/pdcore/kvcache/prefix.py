"""Names for prefixes: chained keys that two different prefixes, or two domains, never share."""

from __future__ import annotations

import hashlib
import secrets
from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["BlockHasher", "PrefixHasher"]


class BlockHasher(Protocol):
    """Makes the key of a block from its parent's key and its tokens."""

    def __call__(self, parent: bytes, tokens: bytes) -> bytes:
        """Return the key. ``tokens`` are the block's int32 token ids."""
        ...


def _sha256(parent: bytes, tokens: bytes) -> bytes:
    return hashlib.sha256(parent + tokens).digest()


class PrefixHasher:
    """Computes the keys of a request's full blocks.

    A key is the SHA-256 of its parent's key and its own tokens, so that equal keys mean equal
    prefixes. The first parent is a keyed digest of the domain: cache salt and adapter, each tagged
    and with its length, so that no two domains meet and nobody without the secret can predict a
    key. Cost: about 0.7 µs for a block of 16 tokens.

    Args:
        block_size: tokens in a block.
        secret: the key of the domain digest; a random one for this process when None. Engines that
            are to name blocks alike need the same secret.
        hash_block: how a block's key is made; replaced in tests only.
    """

    def __init__(
        self,
        block_size: int,
        *,
        secret: bytes | None = None,
        hash_block: BlockHasher = _sha256,
    ) -> None:
        self._block_size = block_size
        self._secret = secrets.token_bytes(32) if secret is None else secret
        self._hash_block = hash_block

    def root(self, cache_salt: str | None, lora: str | None) -> bytes:
        """The parent of a domain's first blocks."""
        digest = hashlib.blake2b(key=self._secret[:64], digest_size=32)
        for tag, value in ((b"salt", cache_salt), (b"lora", lora)):
            if value is not None:
                data = value.encode()
                digest.update(tag + len(data).to_bytes(8, "little") + data)
        return digest.digest()

    def extend(
        self, keys: list[bytes], root: bytes, tokens: npt.NDArray[np.int32], *, start: int
    ) -> None:
        """Append the keys of the full blocks in ``tokens``.

        Args:
            keys: the keys so far, one for each block before ``start``; changed in place.
            root: the domain's root.
            tokens: int32, the request's tokens from token ``start`` on.
            start: a multiple of the block size, ``len(keys) * block_size``.
        """
        data = np.ascontiguousarray(tokens, dtype=np.int32).tobytes()
        width = 4 * self._block_size
        parent = keys[-1] if start else root
        for begin in range(0, len(data) - width + 1, width):
            parent = self._hash_block(parent, data[begin : begin + width])
            keys.append(parent)
