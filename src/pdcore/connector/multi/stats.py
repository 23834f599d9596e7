"""The numbers of several connectors as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from pdcore.connector.stats import ConnectorStats

__all__ = ["MultiStats"]

_MAX_NUM_TRANSFERS = 1024


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
        sums = {
            name: _sum(getattr(ConnectorStats(), name), [getattr(stats, name) for stats in each])
            for name in attrs.fields_dict(ConnectorStats)
            if name != "transfers"
        }
        return cls(
            transfers=tuple(transfers[-_MAX_NUM_TRANSFERS:]),
            by_connector=dict(by_connector),
            num_dropped_events=num_dropped_events,
            **sums,
        )


def _sum(zero: Any, counts: Iterable[Any]) -> Any:
    """Add up counts of one class, field by field."""
    totals = attrs.asdict(zero)
    for each in counts:
        for name in totals:
            totals[name] += getattr(each, name)
    return type(zero)(**totals)
