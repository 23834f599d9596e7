"""Holds: why a block that no request refers to must not be reused yet."""

from __future__ import annotations

import enum
from collections.abc import Hashable

import attrs
import numpy as np
import numpy.typing as npt

__all__ = ["Hold", "HoldBook", "HoldReason"]


class HoldReason(enum.Enum):
    """What a hold protects its blocks from."""

    SEND = "send"
    """A peer, or a background save, still reads them."""
    QUARANTINE = "quarantine"
    """Something may still write to them."""


@attrs.frozen(kw_only=True, eq=False)
class Hold:
    """Some blocks, kept from reuse for an owner.

    Args:
        hold_id: the pool's number for it, never reused.
        block_ids: int32, the blocks.
        owner: whoever asked, for people and for tests.
        reason: what they are kept for.
        deadline: seconds on the scheduler's clock by which the owner must have let go, or None.
    """

    hold_id: int
    block_ids: npt.NDArray[np.int32]
    owner: Hashable
    reason: HoldReason
    deadline: float | None = None


_NOBODY = np.zeros(0, np.int32)


class HoldBook:
    """The holds there are, and how many each block has.

    Most engines never hold a block, so the columns are made with the first hold.

    Args:
        num_blocks: how many blocks there are.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._holds: dict[int, Hold] = {}
        self._num_made = 0
        self._num_holds = self._num_quarantines = _NOBODY

    def __len__(self) -> int:
        return len(self._holds)

    def __contains__(self, hold: Hold) -> bool:
        return self._holds.get(hold.hold_id) is hold

    def make(
        self,
        ids: npt.NDArray[np.int32],
        *,
        owner: Hashable,
        reason: HoldReason,
        deadline: float | None,
    ) -> Hold:
        """A new hold, not added yet."""
        self._num_made += 1
        return Hold(
            hold_id=self._num_made, block_ids=ids, owner=owner, reason=reason, deadline=deadline
        )

    def add(self, hold: Hold) -> None:
        """Count a hold."""
        if not self._num_holds.size:
            self._num_holds = np.zeros(self._num_blocks, np.int32)
            self._num_quarantines = np.zeros(self._num_blocks, np.int32)
        self._holds[hold.hold_id] = hold
        self._count(hold, 1)

    def remove(self, hold: Hold) -> None:
        """Count a hold no more."""
        del self._holds[hold.hold_id]
        self._count(hold, -1)

    def all(self) -> tuple[Hold, ...]:
        """Every hold, oldest first."""
        return tuple(self._holds[hold_id] for hold_id in sorted(self._holds))

    def are_held(self, ids: npt.NDArray[np.intp] | slice) -> npt.NDArray[np.bool_]:
        """Which of the blocks have a hold. Only while there is one."""
        held: npt.NDArray[np.bool_] = self._num_holds[ids] > 0
        return held

    def are_quarantined(self) -> npt.NDArray[np.bool_]:
        """For every block whether it is in quarantine. Only while there is a hold."""
        quarantined: npt.NDArray[np.bool_] = self._num_quarantines > 0
        return quarantined

    def is_consistent(self) -> bool:
        """Whether the columns count the holds. Cost: O(blocks)."""
        counts = np.zeros((2, self._num_blocks), np.int32)
        for hold in self._holds.values():
            counts[: 1 + (hold.reason is HoldReason.QUARANTINE), hold.block_ids] += 1
        columns = (self._num_holds, self._num_quarantines)
        return not self._num_holds.size or np.array_equal(columns, counts)

    def fingerprint(self) -> bytes:
        """How many holds each block has."""
        if not self._holds:
            return b""
        return self._num_holds.tobytes() + self._num_quarantines.tobytes()

    def _count(self, hold: Hold, sign: int) -> None:
        self._num_holds[hold.block_ids] += sign
        if hold.reason is HoldReason.QUARANTINE:
            self._num_quarantines[hold.block_ids] += sign
