"""Which block holds which prefix."""

from __future__ import annotations

from collections.abc import Sequence

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
        found: list[int] = []
        get = self._blocks.get
        for key in keys:
            entry = get(key)
            if entry is None:
                break
            found.append(entry if isinstance(entry, int) else entry[0])
        return found

    def blocks(self, key: bytes) -> tuple[int, ...]:
        """All blocks with this key, the first published first."""
        entry = self._blocks.get(key, ())
        return (entry,) if isinstance(entry, int) else entry

    def add(self, key: bytes, block_id: int) -> None:
        """Make a key lead to one more block."""
        entry = self._blocks.setdefault(key, block_id)
        if entry is not block_id and entry != block_id:
            self._blocks[key] = (*self.blocks(key), block_id)

    def remove(self, key: bytes, block_id: int) -> tuple[int, ...]:
        """Make a key lead to one block less; return what `restore` needs to undo it."""
        before = self.blocks(key)
        if before == (block_id,):
            del self._blocks[key]
        else:
            self.restore(key, tuple(block for block in before if block != block_id))
        return before

    def restore(self, key: bytes, blocks: tuple[int, ...]) -> None:
        """Make a key lead to exactly these blocks."""
        if blocks:
            self._blocks[key] = blocks if len(blocks) > 1 else blocks[0]
        else:
            self._blocks.pop(key, None)

    def clear(self) -> None:
        """Forget every key."""
        self._blocks.clear()

    def items(self) -> list[tuple[bytes, tuple[int, ...]]]:
        """Every key with its blocks, in order of the keys' first publication."""
        return [(key, self.blocks(key)) for key in self._blocks]
