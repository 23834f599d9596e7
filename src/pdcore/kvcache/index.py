"""Which block holds which prefix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat

__all__ = ["PrefixIndex"]


class PrefixIndex:
    """A map from keys to blocks, in which a key may lead to several.

    Two requests that compute the same prefix at the same time fill two blocks with the same key.
    The first published is the one that is found; removing it leaves the other.
    """

    def __init__(self) -> None:
        # Nearly every key has one block, so that one is stored bare.
        self._blocks: dict[bytes, int | tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def lookup(self, keys: Sequence[bytes]) -> list[int]:
        """Return one block for each key up to the first unknown one. Cost: O(blocks found)."""
        get = self._blocks.get
        if not keys or get(keys[0]) is None:
            return []
        entries = list(map(get, keys))
        if None in entries:
            entries = entries[: entries.index(None)]
        return [entry if isinstance(entry, int) else entry[0] for entry in entries]  # type: ignore[index]

    def blocks(self, key: bytes) -> tuple[int, ...]:
        """All blocks with this key, the first published first."""
        entry = self._blocks.get(key, ())
        return (entry,) if isinstance(entry, int) else entry

    def add(self, keys: Sequence[bytes], blocks: Iterable[int]) -> None:
        """Make each key lead to one more block."""
        blocks = list(blocks)
        entries = list(map(self._blocks.setdefault, keys, blocks))
        if entries == blocks:
            return
        for key, block, entry in zip(keys, blocks, entries, strict=True):
            if entry != block:
                self._blocks[key] = (*self.blocks(key), block)

    def remove(self, keys: Sequence[bytes], blocks: Sequence[int]) -> list[tuple[int, ...] | int]:
        """Make each key lead to one block less; return what `restore` needs to undo it."""
        before = list(map(self._blocks.pop, keys, repeat(())))
        if before == blocks:
            return before
        # Some keys lead to several blocks: one by one, from the start.
        self._blocks.update((key, entry) for key, entry in zip(keys, before, strict=True) if entry)
        return [self._remove(key, block) for key, block in zip(keys, blocks, strict=True)]

    def restore(self, keys: Sequence[bytes], entries: Sequence[tuple[int, ...] | int]) -> None:
        """Undo `remove`, the last key first."""
        for key, entry in zip(reversed(keys), reversed(entries), strict=True):
            self._blocks[key] = entry

    def clear(self) -> None:
        """Forget every key."""
        self._blocks.clear()

    def items(self) -> list[tuple[bytes, tuple[int, ...]]]:
        """Every key with its blocks."""
        return [(key, self.blocks(key)) for key in self._blocks]

    def _remove(self, key: bytes, block: int) -> tuple[int, ...] | int:
        entry = self._blocks[key]
        if isinstance(entry, int):
            del self._blocks[key]
        else:
            left = tuple(other for other in entry if other != block)
            self._blocks[key] = left if len(left) > 1 else left[0]
        return entry
