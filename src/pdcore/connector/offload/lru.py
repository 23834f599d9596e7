"""Which key has which slot, and which one goes when room is needed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from pdcore.errors import InvariantBroken

__all__ = ["SlotLRU"]


class SlotLRU:
    """A fixed number of slots, given to keys; the least recently used key makes room.

    A slot that is pinned is not given to another key: something reads or writes it. To insert, to
    `touch`, and to end the last pin count as uses. Every call costs O(1) for each key.

    Args:
        num_slots: how many there are.
        entries: what some hold already: (slot, key), least recently used first.
    """

    def __init__(self, num_slots: int, entries: Iterable[tuple[int, bytes]] = ()) -> None:
        self.num_slots = num_slots
        self._slot_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        # Keys whose slots are not pinned, least recently used first.
        self._order: OrderedDict[bytes, None] = OrderedDict()
        self._num_pins: dict[int, int] = {}
        for slot, key in entries:
            if slot < num_slots and slot not in self._key_of and key not in self._slot_of:
                self._give(slot, key)
        # Popped from the end, so that a new one gives out 0, 1, 2, ...
        self._free = [slot for slot in range(num_slots)[::-1] if slot not in self._key_of]

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, key: bytes) -> bool:
        return key in self._slot_of

    @property
    def num_unpinned(self) -> int:
        """How many slots are free, or could make room."""
        return self.num_slots - len(self._num_pins)

    def touch(self, key: bytes) -> None:
        """Count as used now; unknown and pinned keys are left as they are."""
        if key in self._order:
            self._order.move_to_end(key)

    def insert(self, key: bytes) -> int | None:
        """Give a new key a slot, if need be that of another; None when every slot is pinned."""
        if self._free:
            slot = self._free.pop()
        elif self._order:
            evicted, _ = self._order.popitem(last=False)
            slot = self._slot_of.pop(evicted)
            del self._key_of[slot]
        else:
            return None
        self._give(slot, key)
        return slot

    def pin(self, key: bytes) -> int:
        """Keep a key's slot until `unpin`, and return the slot. May be done several times."""
        slot = self._slot_of[key]
        self._num_pins[slot] = self._num_pins.get(slot, 0) + 1
        self._order.pop(key, None)
        return slot

    def unpin(self, slot: int) -> None:
        """End one pin."""
        self._num_pins[slot] -= 1
        if self._num_pins[slot]:
            return
        del self._num_pins[slot]
        key = self._key_of.get(slot)
        if key is None:
            self._free.append(slot)
        else:
            self._order[key] = None

    def remove(self, key: bytes) -> None:
        """Forget a key, if it is known. Its slot is free once nothing pins it."""
        slot = self._slot_of.pop(key, None)
        if slot is None:
            return
        del self._key_of[slot]
        self._order.pop(key, None)
        if slot not in self._num_pins:
            self._free.append(slot)

    def clear(self) -> None:
        """Forget every key."""
        for key in list(self._slot_of):
            self.remove(key)

    def slot(self, key: bytes) -> int | None:
        """The slot of a key, or None."""
        return self._slot_of.get(key)

    def check(self) -> None:
        """Audit; raise `InvariantBroken` with what is wrong. Cost: O(slots)."""
        used = set(self._key_of) | set(self._num_pins)
        loose = {key for slot, key in self._key_of.items() if slot not in self._num_pins}
        if (
            sorted(self._free + list(used)) != list(range(self.num_slots))
            or {key: slot for slot, key in self._key_of.items()} != self._slot_of
            or set(self._order) != loose
        ):
            raise InvariantBroken(f"slots are lost or double: {self._free}, {self._key_of}")

    def _give(self, slot: int, key: bytes) -> None:
        self._slot_of[key] = slot
        self._key_of[slot] = key
        self._order[key] = None
