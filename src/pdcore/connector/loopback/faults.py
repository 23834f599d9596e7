"""What may go wrong with a loopback transfer, as data."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from pdcore.connector.base import KVLoad
from pdcore.errors import ConfigError

__all__ = ["FaultPlan", "LoopbackFaults"]


@attrs.frozen(kw_only=True)
class LoopbackFaults:
    """How one transfer behaves. The default is a perfect wire without delay.

    A load is due once both delays are over. Delays and faults combine freely.

    Args:
        delay_polls: how many times the worker must be asked before the load is due.
        delay_s: seconds on the fabric's clock before the load is due.
        lose: the data lands when due, but no completion ever comes.
        duplicate: the outcome is reported again with the next report.
        reorder: reports that come together with this one's are given newest first.
        fail: the load fails when due, for this cause, and nothing lands.
        num_valid_tokens: the load fails when due, with only so many tokens from the start of the
            prompt in place, local ones included.
        late_write: a cancelled load goes on, its data lands when due, and only then is its end
            reported: as on real networks, where a transfer in flight cannot be called back. Without
            it a cancelled load ends at once and writes nothing more.

    Raises:
        ConfigError: a delay or number of tokens is negative.
    """

    delay_polls: int = 0
    delay_s: float = 0.0
    lose: bool = False
    duplicate: bool = False
    reorder: bool = False
    fail: str | None = None
    num_valid_tokens: int | None = None
    late_write: bool = False

    def __attrs_post_init__(self) -> None:
        for name in ("delay_polls", "delay_s", "num_valid_tokens"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigError(f"{name}={value!r}: must not be negative")


FaultPlan = Callable[[KVLoad], LoopbackFaults]
"""Chooses the faults of each load when it starts. Called on the reading worker's thread."""
