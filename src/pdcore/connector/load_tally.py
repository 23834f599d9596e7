"""Counts a connector's loads and remembers the newest reads."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque

import attrs

from pdcore.connector.stats import LoadCounts, TransferStats
from pdcore.messages import TransferKey

__all__ = ["LoadTally"]

_MAX_NUM_MEASURED = 1024
_MAX_NUM_REPORTED = 4096


class LoadTally:
    """What a scheduler half notes about its loads. Its owner's thread alone uses it.

    What is remembered to tell repeated reports from late ones is bounded, so a report that is
    repeated after four thousand others counts as late.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._reported: OrderedDict[TransferKey, None] = OrderedDict()
        self._measured: dict[TransferKey, list[TransferStats]] = {}
        self._transfers: deque[TransferStats] = deque(maxlen=_MAX_NUM_MEASURED)

    def started(self) -> None:
        """A load began."""
        self._counts["num_started"] += 1

    def undone(self) -> None:
        """A load's plan was taken back."""
        self._counts["num_started"] -= 1

    def reported(self, transfer: TransferKey, *, is_awaited: bool) -> None:
        """A worker said that a load ended."""
        if transfer in self._reported:
            self._counts["num_duplicate"] += 1
        elif not is_awaited:
            self._counts["num_late"] += 1
        self._reported[transfer] = None
        if len(self._reported) > _MAX_NUM_REPORTED:
            self._reported.popitem(last=False)

    def measured(self, stats: TransferStats) -> None:
        """A rank measured its read of a load that is still to be vouched for."""
        self._measured.setdefault(stats.transfer, []).append(stats)

    def expired(self) -> None:
        """A ticket was lost before it was used."""
        self._counts["num_expired"] += 1

    def ended(
        self,
        transfer: TransferKey,
        *,
        is_good: bool,
        is_cancelled: bool = False,
        is_rejected: bool = False,
        accept_s: float | None = None,
    ) -> None:
        """A load ended, one way or another."""
        if is_cancelled:
            self._counts["num_cancelled"] += 1
        else:
            self._counts["num_finished" if is_good else "num_failed"] += 1
            self._counts["num_rejected"] += is_rejected
        for stats in self._measured.pop(transfer, ()):
            self._transfers.append(attrs.evolve(stats, accept_s=accept_s))

    def counts(self) -> LoadCounts:
        """The counters so far."""
        return LoadCounts(**self._counts)

    def transfers(self) -> tuple[TransferStats, ...]:
        """The newest reads."""
        return tuple(self._transfers)
