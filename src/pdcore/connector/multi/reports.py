"""Workers' reports of several connectors in one, and apart again."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pdcore.messages import TransferKey, TransferReport

__all__ = ["join_reports", "part_of"]

_SLASH = "/"
"""Between a connector's name, which has none, and its own name for a hand-over."""


def join_reports(reports: Mapping[str, TransferReport]) -> TransferReport:
    """One report out of those of several connectors, by name.

    Loads have names of their own already. Hand-overs get that of their connector before theirs.
    """
    each = reports.values()
    return TransferReport(
        finished_sending=tuple(
            f"{name}{_SLASH}{sent}"
            for name, report in reports.items()
            for sent in report.finished_sending
        ),
        finished_recving=tuple(key for report in each for key in report.finished_recving),
        failed=tuple(failure for report in each for failure in report.failed),
        measured=tuple(stats for report in each for stats in report.measured),
        pushed=tuple(push for report in each for push in report.pushed),
    )


def part_of(
    report: TransferReport, name: str, *, owner_of: Callable[[TransferKey], str | None]
) -> TransferReport:
    """What one connector has to hear of a report that `join_reports` made.

    Args:
        report: of all connectors, and of all ranks.
        name: the connector.
        owner_of: which connector brings a load; None when nobody is known to.
    """
    start = f"{name}{_SLASH}"
    return TransferReport(
        finished_sending=tuple(
            sent.removeprefix(start) for sent in report.finished_sending if sent.startswith(start)
        ),
        finished_recving=tuple(key for key in report.finished_recving if owner_of(key) == name),
        failed=tuple(failure for failure in report.failed if owner_of(failure.transfer) == name),
        measured=tuple(stats for stats in report.measured if owner_of(stats.transfer) == name),
        pushed=report.pushed,  # their names are unique, so each knows its own
    )
