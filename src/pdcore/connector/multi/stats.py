"""The numbers of several connectors as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

import attrs

from pdcore.connector.stats import ConnectorStats, LoadCounts, TicketCounts

__all__ = ["MultiStats"]

_MAX_NUM_TRANSFERS = 1024

CountsT = TypeVar("CountsT", TicketCounts, LoadCounts)


@attrs.frozen(kw_only=True)
class MultiStats(ConnectorStats):
    """A snapshot of a `MultiConnector`: sums over its connectors.

    Args:
        by_connector: the numbers of each, by name.
        num_dropped_events: what connectors said about loads and hand-overs that were not theirs, or
            that had been reported before; the scheduler never heard of it.
    """

    by_connector: Mapping[str, ConnectorStats] = attrs.field(factory=dict)
    num_dropped_events: int = 0

    @classmethod
    def of(
        cls, by_connector: Mapping[str, ConnectorStats], *, num_dropped_events: int
    ) -> MultiStats:
        """Add up the numbers of several connectors."""
        each = by_connector.values()
        transfers = [transfer for stats in each for transfer in stats.transfers]
        transfers.sort(key=lambda transfer: transfer.ended_at)
        return cls(
            tickets=_sum(TicketCounts(), (stats.tickets for stats in each)),
            loads=_sum(LoadCounts(), (stats.loads for stats in each)),
            transfers=tuple(transfers[-_MAX_NUM_TRANSFERS:]),
            by_connector=dict(by_connector),
            num_dropped_events=num_dropped_events,
        )


def _sum(start: CountsT, counts: Iterable[CountsT]) -> CountsT:
    totals = attrs.asdict(start)
    for each in counts:
        for name in totals:
            totals[name] += getattr(each, name)
    return type(start)(**totals)
