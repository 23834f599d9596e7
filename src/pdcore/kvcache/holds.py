"""Holds: why a block that no request refers to must not be reused yet."""

from __future__ import annotations

import enum
from collections.abc import Hashable

import attrs
import numpy as np
import numpy.typing as npt

__all__ = ["Hold", "HoldReason"]


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
