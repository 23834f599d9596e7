"""Which blocks are saved, and where."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pdcore.connector.offload.lru import SlotLRU
from pdcore.connector.offload.meta import OffloadHandshake, Place, SaveOrder

__all__ = ["Catalog"]


class Catalog:
    """The slots of both tiers. What is in a slot for sure, only the record there can say.

    Every call costs O(1) for each key. Where several keys of one prefix are used at once, the last
    counts as used first, so that the start of a prefix stays longest.

    Args:
        handshakes: of all ranks, which save and load as one.
    """

    def __init__(self, handshakes: Sequence[OffloadHandshake]) -> None:
        stored = set(handshakes[0].stored).intersection(*(it.stored for it in handshakes))
        self.bytes_per_block = max(it.bytes_per_block for it in handshakes)
        self.host = SlotLRU(min(it.num_host_slots for it in handshakes))
        self.disk = SlotLRU(
            min(it.num_disk_slots for it in handshakes),
            (entry for entry in handshakes[0].stored if entry in stored),
        )

    def places(self, keys: Iterable[bytes]) -> list[Place]:
        """Where the first of ``keys`` are, up to one that is nowhere."""
        found = []
        for key in keys:
            slot, is_on_disk = self.host.slot(key), False
            if slot is None:
                slot, is_on_disk = self.disk.slot(key), True
            if slot is None:
                break
            found.append(Place(key, slot, is_on_disk))
        return found

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count these as used now, in both tiers."""
        for key in reversed(keys):
            self.host.touch(key)
            self.disk.touch(key)

    def save(self, blocks: dict[bytes, int]) -> dict[int, SaveOrder]:
        """Give a slot to each key that has none in host memory.

        Args:
            blocks: the block of each key. Where there is no room for all, the first are saved.

        Returns:
            What to save, by slot.
        """
        orders = {}
        for key in list(blocks)[: self.host.num_unpinned][::-1]:
            slot = self.host.insert(key)
            if slot is not None:
                orders[slot] = SaveOrder(blocks[key], slot, self._disk_slot(key), key)
        return orders

    def pin(self, places: Iterable[Place]) -> None:
        """Keep the slots from other keys until `unpin`."""
        for place in places:
            self._tier(place).pin(place.key)

    def unpin(self, places: Sequence[Place]) -> None:
        """The opposite of `pin`; counts as a use."""
        for place in reversed(places):
            self._tier(place).unpin(place.slot)

    def forget(self, places: Iterable[Place]) -> None:
        """What is in these slots is not what should be there."""
        for place in places:
            tier = self._tier(place)
            if tier.slot(place.key) == place.slot:
                tier.remove(place.key)

    def clear(self) -> None:
        """Forget every key."""
        self.host.clear()
        self.disk.clear()

    @property
    def num_pinned(self) -> int:
        """How many slots are pinned, in both tiers."""
        tiers = (self.host, self.disk)
        return sum(tier.num_slots - tier.num_unpinned for tier in tiers)

    def check(self) -> None:
        """Audit; raises `InvariantBroken`. Cost: O(slots)."""
        self.host.check()
        self.disk.check()

    def _tier(self, place: Place) -> SlotLRU:
        return self.disk if place.is_on_disk else self.host

    def _disk_slot(self, key: bytes) -> int:
        """Where a key that is being saved goes on disk; -1 when it is there, or nowhere."""
        if key in self.disk:
            self.disk.touch(key)
            return -1
        slot = self.disk.insert(key)
        return -1 if slot is None else slot
