"""The keys that blocks have, which of them are provisional, and what changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import attrs

from pdcore.kvcache.events import BlockRemoved, BlockStored, CacheCleared, KVEvent
from pdcore.kvcache.index import PrefixIndex

__all__ = ["BlockKeys"]


@attrs.frozen
class _Publication:
    """A block's key, its parent's, and the step that writes the block while it is not done."""

    key: bytes
    parent: bytes | None
    step: int | None


class BlockKeys:
    """Names for the contents of blocks.

    A key is provisional from `publish` until the `commit` of its step; it can be found all the
    while. Events tell of committed keys only.

    Args:
        num_blocks: how many blocks there are.
        enable_events: whether `take_events` reports changes.
    """

    def __init__(self, num_blocks: int, *, enable_events: bool) -> None:
        # A bare list of keys beside the full records: it is read for every block that is released.
        self.of_block: list[bytes | None] = [None] * num_blocks
        self._published: dict[int, _Publication] = {}
        self._provisional: dict[int, dict[int, None]] = {}
        self._index = PrefixIndex()
        self._enable_events = enable_events
        self._events: list[KVEvent] = []

    def lookup(self, keys: Sequence[bytes]) -> list[int]:
        """One block for each key up to the first unknown one."""
        return self._index.lookup(keys)

    def publish(
        self, blocks: list[int], keys: Sequence[bytes], step: int, parent: bytes | None
    ) -> None:
        """Give keyless blocks their keys; each is the child of the one before."""
        provisional = self._provisional.setdefault(step, {})
        for block, key in zip(blocks, keys, strict=True):
            self.of_block[block] = key
            self._published[block] = _Publication(key, parent, step)
            self._index.add(key, block)
            provisional[block] = None
            parent = key

    def provisional(self, step: int) -> list[int]:
        """The blocks whose keys are provisional for a step, in order of publication."""
        return list(self._provisional.get(step, ()))

    def commit(self, step: int) -> None:
        """The step's blocks are written."""
        for block in self._provisional.pop(step, ()):
            publication = attrs.evolve(self._published[block], step=None)
            self._published[block] = publication
            if self._enable_events:
                self._events.append(BlockStored(publication.key, publication.parent, block))

    def forget(self, blocks: Iterable[int]) -> Callable[[], None]:
        """Drop the keys of blocks that have one; return what undoes it."""
        dropped = [self._forget(block) for block in blocks]

        def undo() -> None:
            for block, publication, siblings in reversed(dropped):
                self._restore(block, publication, siblings)

        return undo

    def clear(self) -> None:
        """Drop every key at once."""
        for block in self._published:
            self.of_block[block] = None
        self._published.clear()
        self._provisional.clear()
        self._index.clear()
        if self._enable_events:
            self._events.append(CacheCleared())

    def take_events(self) -> list[KVEvent]:
        """What changed since the last call, in order."""
        events, self._events = self._events, []
        return events

    def is_consistent(self) -> bool:
        """Whether blocks, records and index name the same keys. Cost: O(blocks)."""
        keyed = {block: key for block, key in enumerate(self.of_block) if key is not None}
        indexed = [(block, key) for key, blocks in self._index.items() for block in blocks]
        pending = [block for blocks in self._provisional.values() for block in blocks]
        return (
            sorted(indexed) == sorted(keyed.items())
            and keyed == {block: record.key for block, record in self._published.items()}
            and sorted(pending)
            == sorted(block for block, record in self._published.items() if record.step is not None)
        )

    def fingerprint(self) -> bytes:
        """All that decides later look-ups and commits."""
        steps = {block: record.step for block, record in sorted(self._published.items())}
        return repr((sorted(self._index.items()), steps)).encode()

    def _forget(self, block: int) -> tuple[int, _Publication, tuple[int, ...]]:
        publication = self._published.pop(block)
        self.of_block[block] = None
        siblings = self._index.remove(publication.key, block)
        if publication.step is not None:
            del self._provisional[publication.step][block]
            if not self._provisional[publication.step]:
                del self._provisional[publication.step]
        elif self._enable_events:
            self._events.append(BlockRemoved(publication.key, block))
        return block, publication, siblings

    def _restore(self, block: int, publication: _Publication, siblings: tuple[int, ...]) -> None:
        self.of_block[block] = publication.key
        self._published[block] = publication
        self._index.restore(publication.key, siblings)
        if publication.step is not None:
            self._provisional.setdefault(publication.step, {})[block] = None
        elif self._enable_events:
            self._take_back_removal(publication, block)

    def _take_back_removal(self, publication: _Publication, block: int) -> None:
        """Undo the report of a removal; if it was read already, report the block as stored."""
        removal = BlockRemoved(publication.key, block)
        for place in range(len(self._events) - 1, -1, -1):
            if self._events[place] == removal:
                del self._events[place]
                return
        self._events.append(BlockStored(publication.key, publication.parent, block))
