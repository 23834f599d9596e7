"""The block pool's interface: who owns which block, and which block holds which prefix."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from pdcore.checks import check_count
from pdcore.errors import ConfigError
from pdcore.kvcache.events import KVEvent
from pdcore.kvcache.holds import Hold, HoldReason

__all__ = ["BlockCounts", "BlockPool"]

BlockIds = npt.NDArray[np.int32]
CommitListener = Callable[[BlockIds, list[bytes]], None]


@attrs.frozen(kw_only=True)
class BlockCounts:
    """How many blocks are in each class. A block is in exactly one; the null block is in none.

    Args:
        free: no owner and no key; reused first.
        evictable: no owner, but a key: a cached prefix that goes when the free ones are used up.
        referenced: at least one reference.
        held: no reference, at least one hold, none of them a quarantine.
        quarantined: no reference, at least one quarantine.
    """

    free: int
    evictable: int
    referenced: int
    held: int
    quarantined: int

    @property
    def total(self) -> int:
        return self.free + self.evictable + self.referenced + self.held + self.quarantined


class BlockPool(ABC):
    """Hands out blocks of KV memory by number, and finds the ones that hold a known prefix.

    The scheduler's thread is the only caller. Block 0 is the null block: it stands for "no block"
    in block tables, is never handed out, cached or counted, and releasing or retaining it does
    nothing. Every method takes and returns whole int32 arrays, and either does all it was asked or
    raises and changes nothing.

    A call made between `begin` and the next `begin` belongs to the step that was begun. `rollback`
    undoes those calls exactly; `withdraw` only takes back the keys.

    Args:
        num_blocks: how many blocks there are, the null block included; at least 2.
        block_size: tokens in a block.

    Attributes:
        reports_events: whether `events` may ever return any. Where not, nobody need say which key
            is the parent of which.
    """

    reports_events: bool = True

    def __init__(self, num_blocks: int, block_size: int) -> None:
        check_count("num_blocks", num_blocks, at_least=0)
        check_count("block_size", block_size)
        if num_blocks < 2:
            raise ConfigError(
                f"num_blocks={num_blocks}: at least 2 are needed, since block 0 is the null block"
            )
        self.num_blocks = int(num_blocks)
        self.block_size = int(block_size)
        self._listeners: list[CommitListener] = []

    def subscribe(self, listener: CommitListener) -> None:
        """Have ``listener(block_ids, keys)`` called by every `commit` that makes keys final.

        It is told of each block once, when its data is written. The block cannot be handed out
        again, and so not be overwritten, before the next `allocate`. It must not raise or call
        the pool.
        """
        self._listeners.append(listener)

    def _tell_committed(self, blocks: list[int]) -> None:
        """Call the listeners; for implementations, at the end of `commit`."""
        if blocks and self._listeners:
            ids = np.array(blocks, np.int32)
            keys = [key for key in self.keys(ids) if key is not None]
            for listener in self._listeners:
                listener(ids, keys)

    @property
    def num_usable_blocks(self) -> int:
        """How many blocks can be handed out at all."""
        return self.num_blocks - 1

    @property
    @abstractmethod
    def num_free_blocks(self) -> int:
        """How many blocks `allocate` could give now: the free and the evictable ones."""

    @abstractmethod
    def allocate(self, n: int) -> BlockIds:
        """Take ``n`` blocks, each with one reference, a new generation and no key.

        Free blocks go first, the last released of them first; then evictable ones, in the order in
        which they were released.

        Raises:
            OutOfBlocks: fewer than ``n`` are free or evictable.
        """

    @abstractmethod
    def retain(self, ids: BlockIds) -> None:
        """Add a reference to each block. They must be referenced, held or evictable.

        Raises:
            BlockMisuse: a block is free or out of range.
        """

    @abstractmethod
    def release(self, ids: BlockIds) -> None:
        """Drop one reference for each mention of a block. The first in ``ids`` are reused first.

        Raises:
            BlockMisuse: a block has fewer references than it is mentioned.
        """

    def release_each(self, groups: Sequence[BlockIds]) -> None:
        """`release` each group, one after the other: requests that end in the same step.

        Raises:
            BlockMisuse: as `release`; groups before the one that is refused may stay released.
        """
        for ids in groups:
            self.release(ids)

    @abstractmethod
    def lookup(self, keys: Sequence[bytes]) -> BlockIds:
        """Return the blocks that hold the longest known prefix of the chained ``keys``.

        Where several blocks have the same key, the first published is returned. Nothing is
        retained: call `retain` before anything else can reuse them.
        """

    @abstractmethod
    def num_evictable(self, ids: BlockIds) -> int:
        """How many of these distinct blocks count as free now and would not after `retain`."""

    @abstractmethod
    def publish(
        self,
        ids: BlockIds,
        keys: Sequence[bytes],
        step: int,
        *,
        parents: Sequence[bytes | None] | None = None,
    ) -> None:
        """Make ``keys`` lead to blocks that ``step`` (or an earlier one) writes.

        Others may share the blocks from now on, since steps run in order. The keys are
        provisional until `commit`.

        Args:
            ids: referenced or held blocks without a key.
            keys: one for each block.
            step: the step that writes the data.
            parents: for each key the one before it in its sequence, or None; events tell of them.
                Without it, each is the child of the one before and the first has none.

        Raises:
            BlockMisuse: a block has a key already, or no owner.
        """

    @abstractmethod
    def begin(self, step: int) -> None:
        """Start recording, so that `rollback` can undo what follows."""

    @abstractmethod
    def commit(self, step: int) -> None:
        """The step's writes are done: its keys are final, and events tell of them."""

    @abstractmethod
    def withdraw(self, step: int, ids: BlockIds | None = None) -> None:
        """Drop the keys that ``step`` published: all, or those of the blocks ``ids``."""

    @abstractmethod
    def rollback(self, step: int) -> None:
        """Undo every call since ``begin(step)``, eviction order included, generations excepted.

        Raises:
            BlockMisuse: another step was begun since.
        """

    @abstractmethod
    def hold(
        self,
        ids: BlockIds,
        *,
        owner: Hashable,
        reason: HoldReason,
        deadline: float | None = None,
    ) -> Hold:
        """Keep blocks from reuse, whether or not they are referenced, until `release_hold`.

        Raises:
            BlockMisuse: a block is free, out of range or mentioned twice.
        """

    @abstractmethod
    def release_hold(self, hold: Hold) -> None:
        """End a hold. Blocks without another owner become evictable or free, the last first.

        Raises:
            BlockMisuse: the hold ended before.
        """

    @abstractmethod
    def holds(self) -> tuple[Hold, ...]:
        """Every hold that has not ended, oldest first."""

    @abstractmethod
    def generation(self, ids: BlockIds) -> npt.NDArray[np.int64]:
        """How often each block has been handed out. Never goes back."""

    @abstractmethod
    def keys(self, ids: BlockIds) -> list[bytes | None]:
        """The key of each block, or None."""

    @abstractmethod
    def counts(self) -> BlockCounts:
        """How many blocks are in each class."""

    @abstractmethod
    def reset(self) -> bool:
        """Drop every key, unless a block is owned; return whether it was done."""

    @abstractmethod
    def events(self) -> list[KVEvent]:
        """Return what changed in the index since the last call, in order."""

    @abstractmethod
    def check(self) -> None:
        """Audit everything; raise `InvariantBroken` with what is wrong. Cost: O(num_blocks)."""

    @abstractmethod
    def fingerprint(self) -> bytes:
        """A digest of the state that decides future results. Leaves out generations."""

    def __repr__(self) -> str:
        counts = self.counts()
        return (
            f"<{type(self).__name__} {self.num_usable_blocks} blocks of {self.block_size}: "
            f"{counts.free} free, {counts.evictable} evictable, {counts.referenced} referenced, "
            f"{counts.held} held, {counts.quarantined} quarantined>"
        )
