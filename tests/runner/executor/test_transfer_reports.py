"""What several ranks report, said once."""

from __future__ import annotations

import pytest

from pdcore.connector.stats import TransferStats
from pdcore.errors import ConfigError
from pdcore.messages import LoadFailure, TransferKey, TransferReport
from pdcore.runner.executor import TransferReportMerger

LOAD = TransferKey(7, 0)
DONE = TransferReport(finished_recving=(LOAD,))
QUIET = TransferReport()


def failed(num_valid_tokens: int = 16, cause: str = "the wire broke") -> TransferReport:
    """A rank's word that its part of the load failed."""
    failure = LoadFailure(transfer=LOAD, num_valid_tokens=num_valid_tokens, cause=cause)
    return TransferReport(failed=(failure,))


def test_a_load_is_finished_when_its_last_rank_is() -> None:
    """Three of four ranks in step 1, the last in step 3: told in step 3, once."""
    merger = TransferReportMerger(4)
    assert not merger.merge([DONE, DONE, QUIET, DONE])
    assert not merger.merge([QUIET] * 4)
    assert merger.merge([QUIET, QUIET, DONE, QUIET]) == DONE
    assert not merger.merge([QUIET] * 4)


def test_a_rank_that_says_it_twice_is_one_rank() -> None:
    """A repeated report does not stand for the rank that has yet to report."""
    merger = TransferReportMerger(2)
    assert not merger.merge([DONE, QUIET])
    assert not merger.merge([DONE, None])
    assert merger.merge([QUIET, DONE]) == DONE


def test_one_failing_rank_fails_all_once_the_others_ended() -> None:
    """A failure is told when no rank writes any more, with the rank's name."""
    merger = TransferReportMerger(4)
    assert not merger.merge([DONE, failed(), QUIET, DONE])
    report = merger.merge([QUIET, QUIET, DONE, QUIET])
    assert report.finished_recving == ()
    (failure,) = report.failed
    assert (failure.transfer, failure.cause) == (LOAD, "rank 1: the wire broke")


def test_of_several_failures_the_shortest_prefix_counts() -> None:
    """Only tokens that are good on every rank are good."""
    report = TransferReportMerger(3).merge([failed(32), failed(16), failed(48)])
    assert [failure.num_valid_tokens for failure in report.failed] == [16]


def test_a_rank_without_a_report_is_waited_for() -> None:
    """None is no word at all, be it for the load or for another one."""
    merger = TransferReportMerger(2)
    assert not merger.merge([DONE, None])
    other = TransferReport(finished_recving=(TransferKey(8, 0),))
    assert not merger.merge([None, other])
    assert merger.merge([other, DONE]).finished_recving == (TransferKey(8, 0), LOAD)


def test_what_is_said_again_is_passed_on() -> None:
    """The report of a load that ended everywhere may have got lost: its repeat is not held back."""
    merger = TransferReportMerger(2)
    merger.merge([DONE, DONE])
    assert [failure.transfer for failure in merger.merge([failed(), QUIET]).failed] == [LOAD]


def test_a_hand_over_is_sent_when_all_ranks_sent_it() -> None:
    """The name is told with the last rank."""
    merger = TransferReportMerger(2)
    sent = TransferReport(finished_sending=("t",))
    assert not merger.merge([sent, QUIET])
    assert merger.merge([QUIET, sent]) == sent


def test_measurements_of_all_ranks_come_with_the_load() -> None:
    """What early ranks measured is kept for the report."""
    measured = [
        TransferStats(
            transfer=LOAD,
            peer=f"p{rank}",
            num_bytes=1,
            num_blocks=1,
            num_descriptors=1,
            queued_at=0.0,
            started_at=0.0,
            ended_at=1.0,
        )
        for rank in range(2)
    ]
    reports = [TransferReport(finished_recving=(LOAD,), measured=(stats,)) for stats in measured]
    merger = TransferReportMerger(2)
    merger.merge([QUIET, reports[1]])
    report = merger.merge([reports[0], QUIET])
    assert {stats.peer for stats in report.measured} == {"p0", "p1"}


def test_a_missing_rank_is_an_error() -> None:
    """There is one report for each rank, and at least one rank."""
    with pytest.raises(ConfigError, match="3 reports from 4 ranks"):
        TransferReportMerger(4).merge([QUIET] * 3)
    with pytest.raises(ConfigError, match="num_ranks=0"):
        TransferReportMerger(0)
