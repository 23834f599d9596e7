"""The KV of requests: which blocks hold it, what can be shared, and what a step must add."""

from __future__ import annotations

import hashlib

import attrs
import numpy as np
import numpy.typing as npt

from pdcore.checks import check_part
from pdcore.errors import ConfigError, OutOfBlocks
from pdcore.kvcache.base import BlockPool
from pdcore.kvcache.prefix import PrefixHasher
from pdcore.kvcache.sequence import TokenSequence
from pdcore.kvcache.spec import KVCacheSpec
from pdcore.kvcache.tables import BlockTables
from pdcore.rows import ONE

__all__ = ["KVCacheManager", "PrefixHit"]

BlockIds = npt.NDArray[np.int32]
Rows = npt.NDArray[np.intp]

_NO_BLOCKS = np.zeros(0, np.int32)


@attrs.frozen(eq=False)
class PrefixHit:
    """The cached start of a sequence.

    Args:
        block_ids: int32, its blocks, not retained yet; 0 for those behind a sliding window.
        num_tokens: how many tokens they hold.
    """

    block_ids: BlockIds
    num_tokens: int


_NO_HIT = PrefixHit(_NO_BLOCKS, 0)


class KVCacheManager:
    """Keeps the block tables of running requests and shares prefixes between requests.

    The tables are in ``tables``. Requests without a row, which are being loaded, keep their blocks
    as plain arrays.

    Args:
        pool: where blocks come from.
        enable_prefix_caching: whether requests share blocks with equal prefixes.
        groups: the cache groups of the model. One group is supported: full attention, or one
            sliding window for all layers. None means full attention.
        hasher: how prefixes are named; a `PrefixHasher` with a random secret when None.

    Raises:
        ConfigError: more than one group, or a group or a hasher with another block size than the
            pool's.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        enable_prefix_caching: bool = True,
        groups: tuple[KVCacheSpec, ...] | None = None,
        hasher: PrefixHasher | None = None,
    ) -> None:
        check_part("pool", pool, BlockPool)
        if groups is not None and len(groups) != 1:
            raise ConfigError(
                f"{len(groups)} cache groups were given; one is supported. A model that mixes "
                "kinds of attention cannot be served yet."
            )
        if groups and groups[0].block_size != pool.block_size:
            raise ConfigError(
                f"the group's block_size={groups[0].block_size} and the pool's "
                f"block_size={pool.block_size} differ; make them equal"
            )
        self.pool = pool
        self.block_size = pool.block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.sliding_window = groups[0].sliding_window if groups else None
        self.hasher = hasher or PrefixHasher(pool.block_size)
        if self.hasher.block_size != pool.block_size:
            raise ConfigError(
                f"the hasher names blocks of {self.hasher.block_size} tokens, the pool's have "
                f"{pool.block_size}: make it as PrefixHasher({pool.block_size})"
            )
        self.tables = BlockTables(pool, sliding_window=self.sliding_window)

    def reserve_rows(self, num_rows: int, max_model_len: int) -> None:
        """Make room for the tables. Called once, by the scheduler."""
        self.tables.reserve(num_rows, self.blocks_for(max_model_len))

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def max_blocks_for(self, num_tokens: int, *, chunk: int) -> int:
        """The most blocks that a sequence holds at once, computed ``chunk`` tokens a step.

        Behind a sliding window blocks are given back, so a long sequence needs no more than the
        window and a chunk.
        """
        if self.sliding_window is None:
            return self.blocks_for(num_tokens)
        return min(self.blocks_for(num_tokens), self.blocks_for(self.sliding_window + chunk) + 1)

    def capacity_tokens(self, *, chunk: int) -> int | None:
        """The most tokens whose KV one sequence can have in this pool; None when there is no end.

        Behind a sliding window a sequence may go on for ever, if window and chunk fit.
        """
        if self.sliding_window is not None:
            least = self.blocks_for(self.sliding_window + chunk) + 1
            if least <= self.pool.num_usable_blocks:
                return None
        return self.pool.num_usable_blocks * self.block_size

    def begin(self, step: int) -> None:
        """Start recording a step's changes."""
        self.tables.begin()
        self.pool.begin(step)

    def end(self) -> None:
        """The step's planning is over; what follows cannot be rolled back exactly."""
        self.tables.end()

    def rollback(self, step: int) -> None:
        """Undo every change since ``begin(step)``, in tables and pool."""
        self.tables.rollback()
        self.pool.rollback(step)

    def get_computed_blocks(self, sequence: TokenSequence) -> PrefixHit:
        """Find the longest cached prefix that leaves at least one token to compute.

        Pure: nothing is retained. Cost: the keys are computed once for each sequence, then one
        dictionary look-up a block.
        """
        if not self.enable_prefix_caching:
            return _NO_HIT
        self._extend_keys(sequence)
        ids = self.pool.lookup(sequence.keys[: self.max_hit_blocks(sequence)])
        if not ids.size:
            return _NO_HIT
        num_tokens = ids.size * self.block_size
        if self.sliding_window is not None:
            ids[: max(self.tables.num_behind_window(num_tokens), 0)] = 0
        return PrefixHit(ids, num_tokens)

    def max_hit_blocks(self, sequence: TokenSequence) -> int:
        """How many blocks of a sequence a hit has at most: one token is left to compute."""
        return (len(sequence) - 1) // self.block_size

    def name_blocks(self, sequences: list[TokenSequence]) -> None:
        """Compute the keys of sequences that have none, all at once.

        `get_computed_blocks` does so for one; for many in one go it costs less.
        """
        if self.enable_prefix_caching:
            roots = [self.hasher.root(it.cache_salt, it.lora) for it in sequences]
            runs = [sequence.tokens() for sequence in sequences]
            for sequence, keys in zip(sequences, self.hasher.chains(roots, runs), strict=True):
                sequence.keys = keys

    def check_room(
        self,
        hit: PrefixHit,
        num_tokens: int,
        *,
        must_fit_tokens: int,
        chunk: int,
        num_reserved: int = 0,
    ) -> int:
        """Make sure that a request can start, and return how many blocks it takes at once.

        Args:
            hit: the cached start; may be empty.
            num_tokens: how many tokens need slots now, those of the hit included.
            must_fit_tokens: how many must find room, though slots are not taken yet for all.
            chunk: the most tokens of one step, for sequences behind a sliding window.
            num_reserved: blocks that must stay free for others.

        Raises:
            OutOfBlocks: there is not enough room.
        """
        full = self.max_blocks_for(must_fit_tokens, chunk=chunk)
        num_fresh = self.blocks_for(num_tokens) - hit.block_ids.size
        if not hit.block_ids.size:
            needed = max(full, num_fresh)
        else:
            needed = max(full - int(np.count_nonzero(hit.block_ids)), num_fresh)
            needed += self.pool.num_evictable(hit.block_ids)
        available = self.pool.num_free_blocks - num_reserved
        if needed > available:
            raise OutOfBlocks(needed, max(available, 0))
        return num_fresh

    def allocate_slots(
        self,
        hit: PrefixHit,
        num_tokens: int,
        *,
        must_fit_tokens: int,
        chunk: int,
        num_reserved: int = 0,
    ) -> BlockIds:
        """Retain a hit and add blocks, so that the first ``num_tokens`` tokens have slots.

        Takes what `check_room` takes.

        Returns:
            int32, all blocks in order of position.

        Raises:
            OutOfBlocks: there is not enough room; nothing has changed.
        """
        num_fresh = self.check_room(
            hit,
            num_tokens,
            must_fit_tokens=must_fit_tokens,
            chunk=chunk,
            num_reserved=num_reserved,
        )
        if not hit.block_ids.size:
            return self.pool.allocate(num_fresh)
        self.pool.retain(hit.block_ids)
        try:
            return np.concatenate((hit.block_ids, self.pool.allocate(num_fresh)))
        except BaseException:
            self.pool.release(hit.block_ids[::-1])
            raise

    def bind(
        self,
        rows: list[int],
        blocks: list[BlockIds],
        sequences: list[TokenSequence],
        *,
        num_published: list[int],
        num_tokens: list[int],
        step: int,
    ) -> None:
        """Give rows their blocks, and publish those that ``step`` fills, for all rows at once.

        Args:
            rows: rows without blocks.
            blocks: the blocks of each.
            sequences: what they hold.
            num_published: how many of them have their keys already.
            num_tokens: how many tokens of each are computed when ``step`` is done.
            step: the step that fills the blocks.
        """
        self.tables.bind(rows, blocks, num_published=num_published)
        if self.enable_prefix_caching:
            self._publish_starts(rows, blocks, sequences, num_published, num_tokens, step)

    def _publish_starts(
        self,
        rows: list[int],
        blocks: list[BlockIds],
        sequences: list[TokenSequence],
        befores: list[int],
        num_tokens: list[int],
        step: int,
    ) -> None:
        ids: list[BlockIds] = []
        keys: list[bytes] = []
        parents: list[bytes | None] | None = [] if self.pool.reports_events else None
        for row, of_row, sequence, before, end in zip(
            rows, blocks, sequences, befores, num_tokens, strict=True
        ):
            after = end // self.block_size
            if after > before:
                if len(sequence.keys) < after:
                    self._extend_keys(sequence)
                self.tables.num_published[row] = after
                ids.append(of_row[before:after])
                keys += sequence.keys[before:after]
                if parents is not None:
                    parents += _parents(sequence, before, after)
        if ids:
            at_once = ids[0] if len(ids) == 1 else np.concatenate(ids)
            self.pool.publish(at_once, keys, step, parents=parents)

    def publish(self, row: int, sequence: TokenSequence, num_tokens: int, *, step: int) -> None:
        """Publish a row's full blocks among its first ``num_tokens`` tokens, filled by ``step``."""
        before = int(self.tables.num_published[row])
        after = num_tokens // self.block_size
        self._extend_keys(sequence)
        self.tables.num_published[row] = after
        self.tables.record(lambda: self.tables.num_published.__setitem__(row, before))
        # A copy: undoing a later change puts other blocks into this stretch of the table.
        ids = self.tables.block_table[row, before:after].copy()
        if self.tables.has_hole(row):
            self._fill_holes(ids, sequence, before, step)
        else:
            self._publish(ids, sequence, before, step)

    def publish_tails(
        self,
        rows: Rows,
        positions: Rows,
        sequences: list[TokenSequence],
        tails: npt.NDArray[np.int32],
        *,
        step: int,
    ) -> None:
        """Publish the block that each row has just filled: the decode path.

        A fixed number of array operations, and a few dictionary and list operations for each row.

        Args:
            rows: rows of which exactly one full block has no key.
            positions: int64 (n,), that block's place in each row's table.
            sequences: theirs.
            tails: int32 (n, block_size), the tokens of that block.
            step: the step that fills it.
        """
        before = [it.keys[-1] if it.keys else self._last_key(it) for it in sequences]
        keys = self.hasher.each(before, tails, positions)
        parents = None
        if self.pool.reports_events:
            parents = [sequence.keys[-1] if sequence.keys else None for sequence in sequences]
        for sequence, key in zip(sequences, keys, strict=True):
            sequence.keys.append(key)
        self.pool.publish(self.tables.block_table[rows, positions], keys, step, parents=parents)
        self.tables.num_published[rows] = positions + ONE
        self.tables.record(lambda: self.tables.num_published.__setitem__(rows, positions))

    def publish_loaded(self, block_ids: BlockIds, sequence: TokenSequence, *, start: int) -> None:
        """Publish full blocks, from block ``start`` on, whose data is there already.

        Args:
            block_ids: all blocks of the sequence, in order of position.
            sequence: what they hold.
            start: how many of them have their keys already.
        """
        if self.enable_prefix_caching:
            self._extend_keys(sequence)
            step = -1
            self._publish(block_ids[start:], sequence, start, step)
            self.pool.commit(step)

    def check(self, rows: Rows) -> None:
        """Audit the pool and the tables, of which ``rows`` are in use."""
        self.pool.check()
        self.tables.check(rows)

    def fingerprint(self, rows: Rows) -> bytes:
        """A digest of pool and tables."""
        state = self.pool.fingerprint() + self.tables.fingerprint(rows)
        return hashlib.blake2b(state, digest_size=16).digest()

    def _extend_keys(self, sequence: TokenSequence) -> None:
        start, end = len(sequence.keys), len(sequence)
        if end - start * self.block_size >= self.block_size:
            tokens = sequence.slice(start * self.block_size, end) if start else sequence.tokens()
            sequence.keys += self.hasher.chain(self._last_key(sequence), tokens, start=start)

    def _last_key(self, sequence: TokenSequence) -> bytes:
        """The parent of the next block's key."""
        if sequence.keys:
            return sequence.keys[-1]
        return self.hasher.root(sequence.cache_salt, sequence.lora)

    def _publish(self, block_ids: BlockIds, sequence: TokenSequence, start: int, step: int) -> None:
        keys = sequence.keys[start : start + block_ids.size]
        if keys:
            parents = None
            if self.pool.reports_events:
                parents = _parents(sequence, start, start + len(keys))
            self.pool.publish(block_ids[: len(keys)], keys, step, parents=parents)

    def _fill_holes(
        self, block_ids: BlockIds, sequence: TokenSequence, start: int, step: int
    ) -> None:
        """`_publish` those without a key; others kept theirs when one before lost its own."""
        for place, key in enumerate(self.pool.keys(block_ids)):
            if key is None:
                self._publish(block_ids[place : place + 1], sequence, start + place, step)


def _parents(sequence: TokenSequence, start: int, end: int) -> list[bytes | None]:
    """For each of a run of a sequence's blocks the key of the one before it."""
    if start == end:
        return []
    return [sequence.keys[start - 1] if start else None, *sequence.keys[start : end - 1]]
