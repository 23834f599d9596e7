"""Names for prefixes: keys that two different prefixes, or two domains, do not share."""

from __future__ import annotations

import hashlib
import operator
import secrets

import numpy as np
import numpy.typing as npt

from pdcore.checks import check_count
from pdcore.errors import ConfigError

__all__ = ["PrefixHasher"]

TokenIds = npt.NDArray[np.int32]
Lanes = npt.NDArray[np.uint64]

_NUM_LANES = 4
_KEY = f"V{8 * _NUM_LANES}"
# An array, since numpy shifts by it faster than by a number.
_HALF = np.array(32, np.uint64)
_POSITIONS_AT_ONCE = 1024
_LEAST_SECRET = 16
_MAX_PADDING = 64
"""Blocks of padding for each sequence, above which each is hashed by itself."""


class PrefixHasher:
    """Computes the keys of full blocks, many at a time.

    A key is 256 bits: four independent sums, modulo 2**64, over the prefix's blocks. Each block
    adds ``weight[position] * digest``, where its digest is the upper half of
    ``offset + sum(multiplier[i] * token[i])`` modulo 2**64. All multipliers, weights and offsets
    are drawn from the secret. This is the multilinear family, used twice (Lemire and Kaser,
    "Strongly universal string hashing is fast", The Computer Journal, 2014): two different prefixes
    share a key with a probability below 2**-120, whatever their tokens are, as long as these were
    chosen without knowledge of the keys and the weights, which SHAKE-256 draws, are as good as
    random. A sum has no step that waits for the one before, so a
    prompt costs a few array operations: about 0.15 µs for a block of 16 tokens.

    The sum starts from a keyed digest of the domain, which is cache salt and adapter, each tagged
    and with its length, so that no two domains meet.

    Keys are for the index of an engine and of those it trusts. Whoever sees many keys with their
    tokens can solve for the secret: do not publish them. A subclass that overrides `chain` and
    `each` names blocks in another way, by SHA-256 for instance.

    Args:
        block_size: tokens in a block.
        secret: what the weights are drawn from: random bytes, at least 16, since whoever guesses
            them can make prompts that share a key; made for this process when None. Engines that
            are to name blocks alike need the same secret and block size.

    Raises:
        ConfigError: the block size is no integer above 0, or the secret is not bytes, or too short.

    Attributes:
        block_size: tokens in a block.
        is_lasting: whether the secret was given, so that names outlive the process.
    """

    def __init__(self, block_size: int, *, secret: bytes | None = None) -> None:
        check_count("block_size", block_size)
        if secret is not None and not isinstance(secret, bytes):
            raise ConfigError(f"the hasher's secret is a {type(secret).__name__}: pass bytes")
        if secret is not None and len(secret) < _LEAST_SECRET:
            raise ConfigError(
                f"the hasher's secret has {len(secret)} bytes, which can be guessed: pass at least "
                f"{_LEAST_SECRET} random ones, such as secrets.token_bytes(32)"
            )
        self.block_size = block_size = operator.index(block_size)
        self.is_lasting = secret is not None
        secret = secrets.token_bytes(32) if secret is None else secret
        # Of one length, so that nothing that follows it can be taken for a part of it. Blocks of
        # different sizes are different domains.
        size = block_size.to_bytes(8, "little")
        self._secret = hashlib.blake2b(secret, digest_size=64, salt=size).digest()
        self._multipliers = self._draw(b"multipliers", block_size)
        self._offset = self._draw(b"offset", 1)
        self._weights = np.zeros((0, _NUM_LANES), np.uint64)
        self._last_root: tuple[tuple[str | None, str | None], bytes] = ((None, None), b"")

    def root(self, cache_salt: str | None, lora: str | None) -> bytes:
        """The parent key of a domain's first blocks."""
        domain = (cache_salt, lora)
        if domain == self._last_root[0] and self._last_root[1]:
            return self._last_root[1]
        digest = hashlib.blake2b(key=self._secret, digest_size=8 * _NUM_LANES)
        for tag, value in ((b"salt", cache_salt), (b"lora", lora)):
            if value is not None:
                data = value.encode()
                digest.update(tag + len(data).to_bytes(8, "little") + data)
        self._last_root = (domain, digest.digest())
        return self._last_root[1]

    def chain(self, parent: bytes, tokens: TokenIds, *, start: int) -> list[bytes]:
        """The keys of the full blocks in a run of tokens.

        Args:
            parent: the key of the block before, or the root.
            tokens: int32 (n,), from token ``start * block_size`` of a sequence on.
            start: the position of the first block.
        """
        num_blocks = tokens.size // self.block_size
        if not num_blocks:
            return []
        end = start + num_blocks
        self._reach(end)
        sums = self._digests(tokens[: num_blocks * self.block_size].reshape(-1, self.block_size))
        sums *= self._weights[start:end]
        sums[0] += np.frombuffer(parent, np.uint64)
        np.add.accumulate(sums, 0, None, sums)
        return _as_keys(sums)

    def chains(self, roots: list[bytes], tokens: list[TokenIds]) -> list[list[bytes]]:
        """`chain` for several sequences from their start, at once unless their lengths differ much.

        Args:
            roots: the root of each one's domain.
            tokens: int32 (n,), the start of each.
        """
        size = self.block_size
        counts = [run.size // size for run in tokens]
        longest = max(counts, default=0)
        num_padding = longest * len(counts) - sum(counts)
        is_overridden = type(self).chain is not PrefixHasher.chain
        if is_overridden or not longest or num_padding > _MAX_PADDING * len(counts):
            runs = zip(roots, tokens, strict=True)
            return [self.chain(root, run, start=0) for root, run in runs]
        self._reach(longest)
        # The keys of what is padded come behind a sequence's own, and are cut off.
        padded = np.zeros((len(counts), longest * size), np.uint64)
        for row, run, count in zip(padded, tokens, counts, strict=True):
            row[: count * size] = run[: count * size]
        sums = self._digests(padded.reshape(-1, size)).reshape(-1, longest, _NUM_LANES)
        sums *= self._weights[:longest]
        sums[:, 0] += np.frombuffer(b"".join(roots), np.uint64).reshape(-1, _NUM_LANES)
        np.add.accumulate(sums, 1, None, sums)
        keys = _as_keys(sums)
        starts = range(0, len(keys), longest)
        return [keys[start : start + n] for start, n in zip(starts, counts, strict=True)]

    def each(
        self, parents: list[bytes], tokens: TokenIds, positions: npt.NDArray[np.intp]
    ) -> list[bytes]:
        """The keys of one block each of several sequences.

        Args:
            parents: the key of the block before each, or its root.
            tokens: int32 (n, block_size), what the blocks hold.
            positions: the place of each among the blocks of its sequence.
        """
        try:
            weights = self._weights[positions]
        except IndexError:
            self._reach(int(positions.max()) + 1)
            weights = self._weights[positions]
        sums = self._digests(tokens)
        sums *= weights
        sums += np.frombuffer(b"".join(parents), np.uint64).reshape(sums.shape)
        return _as_keys(sums)

    def _digests(self, blocks: TokenIds | Lanes) -> Lanes:
        digests: Lanes = blocks.astype(np.uint64, copy=False) @ self._multipliers
        digests += self._offset
        digests >>= _HALF
        return digests

    def _reach(self, num_positions: int) -> None:
        """Draw the weights of so many positions; each is the same in whatever order they come."""
        while self._weights.shape[0] < num_positions:
            tag = b"weights" + self._weights.shape[0].to_bytes(8, "little")
            more = self._draw(tag, _POSITIONS_AT_ONCE)
            self._weights = np.concatenate((self._weights, more))

    def _draw(self, tag: bytes, num_rows: int) -> Lanes:
        data = hashlib.shake_256(self._secret + tag).digest(8 * _NUM_LANES * num_rows)
        return np.frombuffer(data, "<u8").astype(np.uint64).reshape(num_rows, _NUM_LANES)


def _as_keys(sums: Lanes) -> list[bytes]:
    keys: list[bytes] = sums.view(_KEY).ravel().tolist()
    return keys
