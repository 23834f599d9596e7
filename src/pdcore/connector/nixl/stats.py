"""What one transfer cost, measured where it happened."""

from __future__ import annotations

import attrs

from pdcore.messages import TransferKey

__all__ = ["TransferStats"]


@attrs.frozen(kw_only=True)
class TransferStats:
    """One finished read, as the worker saw it. Times are seconds on the monotonic clock.

    Args:
        transfer: which load.
        peer: whom it was read from, for people.
        num_bytes, num_blocks: how much was moved.
        num_descriptors: in how many pieces, after neighbours were merged.
        queued_at: when the worker heard of it.
        started_at: when the read was posted.
        ended_at: when all data was there.
    """

    transfer: TransferKey
    peer: str
    num_bytes: int
    num_blocks: int
    num_descriptors: int
    queued_at: float
    started_at: float
    ended_at: float

    @property
    def queue_s(self) -> float:
        return self.started_at - self.queued_at

    @property
    def wire_s(self) -> float:
        return self.ended_at - self.started_at

    @property
    def num_bytes_per_s(self) -> float:
        return self.num_bytes / self.wire_s if self.wire_s > 0 else 0.0
