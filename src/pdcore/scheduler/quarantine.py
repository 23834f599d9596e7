"""Blocks that nobody wants any more and that a transfer may still write to."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from pdcore.kvcache.holds import Hold
from pdcore.kvcache.manager import KVCacheManager
from pdcore.messages import TransferKey
from pdcore.scheduler.base import Limits

__all__ = ["Quarantine"]


@attrs.define(eq=False, kw_only=True)
class _Load:
    hold: Hold
    told_in: int
    is_cut_off: bool = False


class Quarantine:
    """The holds of cancelled loads, from the oldest to the newest, until each is known to be over.

    Args:
        max_num_blocks: how many blocks they may keep before the oldest are to be cut off.
    """

    def __init__(self, *, max_num_blocks: int) -> None:
        self.max_num_blocks = max_num_blocks
        self._loads: dict[TransferKey, _Load] = {}

    @classmethod
    def of(cls, limits: Limits, manager: KVCacheManager) -> Quarantine:
        """As large as its share of the pool."""
        return cls(
            max_num_blocks=int(limits.max_quarantined_share * manager.pool.num_usable_blocks)
        )

    def add(self, transfer: TransferKey, hold: Hold, *, told_in: int) -> None:
        """A load was cancelled; the workers hear of it in step ``told_in``."""
        self._loads[transfer] = _Load(hold=hold, told_in=told_in)

    def remove(self, transfer: TransferKey) -> Hold | None:
        """A load is over: return what held its blocks; None if it is not in here."""
        load = self._loads.pop(transfer, None)
        return None if load is None else load.hold

    def cut_off(self, transfer: TransferKey) -> bool:
        """Note that a load is stopped by force; return whether it is for the first time."""
        load = self._loads[transfer]
        was_cut_off, load.is_cut_off = load.is_cut_off, True
        return not was_cut_off

    def find_excess(self, *, answered: int) -> list[TransferKey]:
        """The loads to cut off so that the others keep no more than ``max_num_blocks``.

        The oldest, and none that the workers have not had the time to end by themselves. Those that
        were cut off before do not count: they are on their way out.

        Args:
            answered: the newest step whose result, and those of all before it, are in.
        """
        loads = [(key, load) for key, load in self._loads.items() if not load.is_cut_off]
        num_too_many = sum(load.hold.block_ids.size for _, load in loads) - self.max_num_blocks
        excess: list[TransferKey] = []
        for transfer, load in loads:
            if num_too_many <= 0 or load.told_in > answered:
                break
            excess.append(transfer)
            num_too_many -= load.hold.block_ids.size
        return excess

    @property
    def num_blocks(self) -> int:
        """How many blocks are in quarantine now."""
        return sum(load.hold.block_ids.size for load in self._loads.values())

    @property
    def holds(self) -> list[Hold]:
        return [load.hold for load in self._loads.values()]

    def __iter__(self) -> Iterator[TransferKey]:
        return iter(self._loads)

    def __len__(self) -> int:
        return len(self._loads)
