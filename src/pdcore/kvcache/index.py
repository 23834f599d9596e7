"""Which block holds which prefix."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import repeat

__all__ = ["PrefixIndex", "Removed"]

# The blocks of one key, the first published first, each with its place: a number above those of
# the blocks before it.
_Copies = OrderedDict[int, int]

Removed = int | tuple[int, int]
"""A block that lost its key: bare when it was the only one, else with its place among others."""


class PrefixIndex:
    """A map from keys to blocks, in which a key may lead to several.

    Two requests that compute the same prefix at the same time fill two blocks with the same key,
    and a block-aligned prompt fills one more each time that it comes again. The first published is
    the one that is found; removing it leaves the others. A key that is added, found or removed
    costs O(1), however many blocks it leads to.
    """

    def __init__(self) -> None:
        # Nearly every key has one block, so that one is stored bare.
        self._blocks: dict[bytes, int | _Copies] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def lookup(self, keys: Sequence[bytes]) -> list[int]:
        """Return one block for each key up to the first unknown one."""
        get = self._blocks.get
        if not keys or get(keys[0]) is None:
            return []
        entries = list(map(get, keys))
        if None in entries:
            entries = entries[: entries.index(None)]
        return [entry if isinstance(entry, int) else next(iter(entry)) for entry in entries]  # type: ignore[arg-type]

    def blocks(self, key: bytes) -> tuple[int, ...]:
        """All blocks with this key, the first published first."""
        entry = self._blocks.get(key, ())
        return (entry,) if isinstance(entry, int) else tuple(entry)

    def add(self, keys: Sequence[bytes], blocks: Iterable[int]) -> None:
        """Make each key lead to one more block."""
        blocks = list(blocks)
        entries = list(map(self._blocks.setdefault, keys, blocks))
        if entries == blocks:
            return
        for key, block, entry in zip(keys, blocks, entries, strict=True):
            if entry != block:
                self._add_copy(key, block)

    def remove(self, keys: Sequence[bytes], blocks: Sequence[int]) -> Sequence[Removed]:
        """Make each key lead to one block less; return what `restore` needs to undo it."""
        before = list(map(self._blocks.pop, keys, repeat(())))
        if before == blocks:
            return blocks
        # Some keys lead to several blocks: one by one, from the start.
        self._blocks.update((key, entry) for key, entry in zip(keys, before, strict=True) if entry)
        return [self._remove(key, block) for key, block in zip(keys, blocks, strict=True)]

    def restore(self, keys: Sequence[bytes], removed: Sequence[Removed]) -> None:
        """Undo `remove`, the last key first."""
        for key, block in zip(reversed(keys), reversed(removed), strict=True):
            if isinstance(block, int):
                self._blocks[key] = block
            else:
                self._put_back(key, *block)

    def clear(self) -> None:
        """Forget every key."""
        self._blocks.clear()

    def items(self) -> list[tuple[bytes, tuple[int, ...]]]:
        """Every key with its blocks."""
        return [(key, self.blocks(key)) for key in self._blocks]

    def _add_copy(self, key: bytes, block: int) -> None:
        copies = self._blocks[key]
        if isinstance(copies, int):
            copies = self._blocks[key] = OrderedDict({copies: 0})
        copies[block] = copies[next(reversed(copies))] + 1

    def _remove(self, key: bytes, block: int) -> Removed:
        copies = self._blocks[key]
        if isinstance(copies, int):
            del self._blocks[key]
            return copies
        place = copies.pop(block)
        if not copies:
            del self._blocks[key]
        return block, place

    def _put_back(self, key: bytes, block: int, place: int) -> None:
        copies = self._blocks.setdefault(key, OrderedDict())
        assert not isinstance(copies, int)
        copies[block] = place
        # Seldom: only what is taken back comes here.
        for other, _ in sorted(copies.items(), key=operator.itemgetter(1)):
            copies.move_to_end(other)
