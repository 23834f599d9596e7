"""What an engine counts for the report."""

from __future__ import annotations

from chaos_messages import Counts

from pdcore.connector.base import SchedulerConnector
from pdcore.messages import TransferKey
from pdcore.scheduler.unified import UnifiedScheduler

__all__ = ["EngineCounts"]


class EngineCounts:
    """Adds up what the parts of one engine say of themselves.

    Args:
        scheduler: asked for its totals.
        connector: every load that it is told to cancel is in quarantine.

    Attributes:
        num_failed_steps: for the loop to count.
    """

    def __init__(self, scheduler: UnifiedScheduler, connector: SchedulerConnector) -> None:
        self._scheduler = scheduler
        self._num_quarantines = 0
        self.num_failed_steps = 0
        cancel = connector.cancel

        def counted_cancel(transfer: TransferKey) -> None:
            self._num_quarantines += 1
            cancel(transfer)

        connector.cancel = counted_cancel  # type: ignore[method-assign]

    def take(self) -> Counts:
        """The totals now."""
        stats = self._scheduler.stats()
        tickets, loads = stats.connector.tickets, stats.connector.loads
        pushes, landings = stats.connector.pushes, stats.connector.landings
        return Counts(
            num_loads=loads.num_started,
            num_transfers=loads.num_finished,
            num_bytes=sum(read.num_bytes for read in stats.connector.transfers),
            num_failed_loads=stats.num_failed_loads,
            num_recomputed_tokens=stats.num_recomputed_tokens,
            num_late_events=stats.num_late_events + loads.num_late + tickets.num_late,
            num_duplicates=loads.num_duplicate + tickets.num_duplicate,
            num_quarantines=self._num_quarantines,
            num_accepted=tickets.num_accepted,
            num_rejected=tickets.num_rejected,
            num_expired=tickets.num_expired,
            num_released=tickets.num_released,
            num_preemptions=stats.num_preemptions,
            num_failed_steps=self.num_failed_steps,
            num_pushes=pushes.num_started,
            num_refused_pushes=pushes.num_refused,
            num_push_restarts=pushes.num_restarts,
            num_expected=landings.num_expected,
            num_declined=landings.num_declined,
            num_landed=landings.num_landed,
            num_used=landings.num_used,
        )

    def leaks(self) -> list[str]:
        """What began and never ended, by the connector's own count, in an engine at rest."""
        stats = self._scheduler.stats().connector
        tickets, loads = stats.tickets, stats.loads
        ended = tickets.num_accepted + tickets.num_released + tickets.num_expired
        leaks = []
        if ended != tickets.num_granted:
            leaks.append(f"{tickets.num_granted} tickets granted, {ended} ended")
        ended = loads.num_finished + loads.num_failed + loads.num_cancelled
        if ended != loads.num_started:
            leaks.append(f"{loads.num_started} loads begun, {ended} ended")
        return leaks
