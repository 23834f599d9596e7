"""Which slots of host memory wait to be written to which slots on disk."""

from __future__ import annotations

__all__ = ["PendingWrites"]


class PendingWrites:
    """A queue without two writes from one slot, or to one slot. Every call costs O(1)."""

    def __init__(self) -> None:
        # Oldest first, both ways round.
        self._target: dict[int, int] = {}
        self._source: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._target)

    def add(self, source: int, target: int) -> None:
        """Queue a write; one to the same target that still waits is not made."""
        self.forget(source)
        overtaken = self._source.pop(target, None)
        if overtaken is not None:
            del self._target[overtaken]
        self._target[source] = target
        self._source[target] = source

    def forget(self, source: int) -> None:
        """The slot gets another block: what waits to be written from it is not."""
        target = self._target.pop(source, None)
        if target is not None:
            del self._source[target]

    def pop(self) -> tuple[int, int]:
        """The oldest write: (source, target)."""
        source = next(iter(self._target))
        target = self._target.pop(source)
        del self._source[target]
        return source, target

    def clear(self) -> int:
        """Forget all; return how many there were."""
        num_writes = len(self)
        self._target.clear()
        self._source.clear()
        return num_writes
