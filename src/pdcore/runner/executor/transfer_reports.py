"""One transfer report out of those of several ranks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import attrs

from pdcore.checks import check_count
from pdcore.connector.stats import TransferStats
from pdcore.errors import ConfigError
from pdcore.messages import LoadFailure, TransferKey, TransferReport

__all__ = ["TransferReportMerger"]

_MAX_NUM_ENDED = 4096


@attrs.define(eq=False)
class _Load:
    ranks: set[int] = attrs.field(factory=set)
    failures: list[LoadFailure] = attrs.field(factory=list)
    measured: list[TransferStats] = attrs.field(factory=list)


class TransferReportMerger:
    """Tells the scheduler of a load once, when it has ended on every rank.

    A load is finished if it finished on all ranks. If it failed on one it failed, but that is said
    only when the others ended too: until then they may write to its blocks. Ranks may report in
    different steps, and a rank may have nothing to say for as long as it likes. A hand-over counts
    as sent when all ranks say so. What is said of pushes is passed on as it is.

    Args:
        num_ranks: how many ranks report.

    Raises:
        ConfigError: there is no rank.
    """

    def __init__(self, num_ranks: int) -> None:
        check_count("num_ranks", num_ranks)
        self._num_ranks = num_ranks
        self._loads: dict[TransferKey, _Load] = {}
        self._sent: dict[str, set[int]] = {}
        self._ended: OrderedDict[TransferKey, None] = OrderedDict()

    def merge(self, reports: Sequence[TransferReport | None]) -> TransferReport:
        """Take one step's reports, by rank; return what is known of all ranks by now.

        What is said again of a load that ended on all ranks is passed on, once a step: the first
        time may have got lost with its step.

        Args:
            reports: one for each rank; None where a rank has nothing to say.

        Raises:
            ConfigError: there are more or fewer reports than ranks.
        """
        if len(reports) != self._num_ranks:
            raise ConfigError(
                f"{len(reports)} reports from {self._num_ranks} ranks: pass one for each rank, "
                "None where a rank has nothing to say"
            )
        touched: dict[TransferKey, None] = {}
        names: dict[str, None] = {}
        for rank, report in enumerate(reports):
            if report is not None:
                touched.update(dict.fromkeys(self._note(rank, report)))
                names.update(dict.fromkeys(self._note_sent(rank, report)))
        sent = tuple(name for name in names if len(self._sent[name]) == self._num_ranks)
        for name in sent:
            del self._sent[name]
        merged = self._report(sent, [self._take(key) for key in touched if self._is_over(key)])
        pushed = tuple(push for report in reports if report is not None for push in report.pushed)
        return attrs.evolve(merged, pushed=pushed) if pushed else merged

    def _note(self, rank: int, report: TransferReport) -> Iterable[TransferKey]:
        for stats in report.measured:
            self._loads.setdefault(stats.transfer, _Load()).measured.append(stats)
        for failure in report.failed:
            load = self._loads.setdefault(failure.transfer, _Load())
            load.ranks.add(rank)
            load.failures.append(attrs.evolve(failure, cause=self._named(rank, failure.cause)))
            yield failure.transfer
        for transfer in report.finished_recving:
            self._loads.setdefault(transfer, _Load()).ranks.add(rank)
            yield transfer

    def _note_sent(self, rank: int, report: TransferReport) -> Iterable[str]:
        for name in report.finished_sending:
            self._sent.setdefault(name, set()).add(rank)
            yield name

    def _named(self, rank: int, cause: str) -> str:
        return cause if self._num_ranks == 1 else f"rank {rank}: {cause}"

    def _is_over(self, transfer: TransferKey) -> bool:
        return transfer in self._ended or len(self._loads[transfer].ranks) == self._num_ranks

    def _take(self, transfer: TransferKey) -> tuple[TransferKey, _Load]:
        self._ended[transfer] = None
        if len(self._ended) > _MAX_NUM_ENDED:
            self._ended.popitem(last=False)
        return transfer, self._loads.pop(transfer)

    def _report(
        self, sent: tuple[str, ...], ended: list[tuple[TransferKey, _Load]]
    ) -> TransferReport:
        return TransferReport(
            finished_sending=sent,
            finished_recving=tuple(key for key, load in ended if not load.failures),
            failed=tuple(_worst(load.failures) for _, load in ended if load.failures),
            measured=tuple(stats for _, load in ended for stats in load.measured),
        )


def _worst(failures: list[LoadFailure]) -> LoadFailure:
    return min(failures, key=lambda failure: failure.num_valid_tokens)
