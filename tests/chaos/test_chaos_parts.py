"""The adversary's plan is its seed's, and the judge lets no lie pass. No engine runs here."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from adversary import DECODES, Job, make_plan
from chaos_messages import Counts
from verdict import Life, Oracle, judge, judge_movement

_JOB = Job(number=0, request_id="r0", prompt=(5, 6, 7), max_tokens=4, prefill="P0", decode="D0")
_LAPSED = "remote KV could not be loaded: engine P0 at 127.0.0.1:1: its lease of 1 s ended"
_RESTARTED = "remote KV could not be loaded: engine P0 at 127.0.0.1:1 restarted"


def a_life(outcome: str, cause: str = "", *, num_tokens: int = 0, **options: Any) -> Life:
    """A request that ended, with the first tokens of its solo run."""
    job = attrs.evolve(_JOB, deadline_s=options.pop("deadline_s", None))
    expected = Oracle().of(job)
    life = Life(job=job, expected=expected, outcome=outcome, cause=cause, num_tries=1)
    life.token_ids = expected[0][:num_tokens]
    life.was_aborted = bool(options.pop("was_aborted", False))
    assert not options
    return life


def a_finding(life: Life, *, fails: bool = True, num_kills: int = 0) -> str | None:
    """The kind of what the judge finds one second after the request began."""
    finding = judge(life, now=1.0, fails_on_lost_load=fails, num_kills=num_kills)
    return None if finding is None else finding.kind


def test_a_plan_is_its_seeds() -> None:
    """One seed makes one plan, and another seed another."""
    assert make_plan(7, 200) == make_plan(7, 200)
    assert make_plan(7, 200) != make_plan(8, 200)
    assert len(make_plan(7, 200).jobs) == 200


@pytest.mark.parametrize(
    "life",
    [
        a_life("length", num_tokens=4),
        a_life("abort", num_tokens=2, was_aborted=True),
        a_life("timeout", deadline_s=0.5),
        a_life("error", _LAPSED),
        a_life("walked out"),
    ],
    ids=lambda life: life.outcome,
)
def test_a_true_end_is_let_pass(life: Life) -> None:
    """The solo run's tokens, or the part before an end that has its reason."""
    assert a_finding(life) is None


@pytest.mark.parametrize(
    "life",
    [
        a_life("length", num_tokens=3),
        a_life("stop", num_tokens=4),
        a_life("abort"),
        a_life("timeout"),
        a_life("timeout", deadline_s=2.0),
        a_life("error"),
        a_life("error", "remote KV could not be loaded: for reasons"),
        a_life("error", _RESTARTED),
        a_life("capacity"),
        a_life("refused"),
        a_life("engine killed"),
    ],
    ids=lambda life: f"{life.outcome}-{life.cause[-12:]}",
)
def test_an_end_without_its_reason_is_found(life: Life) -> None:
    """Too few tokens, an abort that nobody asked for, a cause that cannot be."""
    assert a_finding(life) == "untrue reason"


def test_a_failed_load_is_no_reason_where_it_should_be_computed() -> None:
    """Under on_load_failure="recompute" no request may fail for its KV."""
    assert a_finding(a_life("error", _LAPSED), fails=False) == "untrue reason"


def test_a_wrong_token_is_found_however_the_request_ended() -> None:
    """An abort excuses missing tokens, not wrong ones."""
    life = a_life("abort", num_tokens=3, was_aborted=True)
    life.token_ids[1] += 1

    assert a_finding(life) == "wrong token"


_MOVED = Counts(num_loads=40, num_accepted=10, num_pushes=28, num_landed=5)


@pytest.mark.parametrize(
    ("counts", "num_pushed_blocks", "words"),
    [
        (_MOVED, 1, []),
        (attrs.evolve(_MOVED, num_accepted=9), 1, ["9 of 40 loads were vouched for"]),
        (attrs.evolve(_MOVED, num_landed=4), 1, ["4 of 28 pushes were vouched for"]),
        (attrs.evolve(_MOVED, num_pushes=9, num_landed=1), 1, []),
        (attrs.evolve(_MOVED, num_pushes=9, num_landed=0), 1, ["0 of 9 pushes were vouched for"]),
        (attrs.evolve(_MOVED, num_pushes=0, num_landed=0), 1, ["0 of 0 pushes were vouched for"]),
        (_MOVED, 0, ["no request ran on KV that was pushed"]),
    ],
)
def test_a_run_in_which_too_little_moved_is_found(
    counts: Counts, num_pushed_blocks: int, words: list[str]
) -> None:
    """A quarter of the loads and of the pushes, and a request that ran on what was pushed."""
    life = a_life("length", num_tokens=4)
    life.num_pushed_blocks = num_pushed_blocks
    assert [finding.words for finding in judge_movement(counts, [life])] == words


@pytest.mark.parametrize("seed", range(10))
def test_a_plan_pushes_a_good_share(seed: int) -> None:
    """With slow and lost writes, called-off leave and leave from elsewhere among them."""
    jobs = make_plan(seed, 1000).jobs
    pushed = [job for job in jobs if job.is_pushed]
    assert len(pushed) > 250
    assert {job.decode for job in pushed} == set(DECODES)
    assert any(job.write_fault is not None and job.write_fault.is_lost for job in pushed)
    assert any(job.write_fault is not None and job.write_fault.delay_s for job in pushed)
    assert any(job.write_fault is not None and job.write_fault.breaks for job in pushed)
    assert any(job.calls_off_after_s is not None for job in pushed)
    assert any(job.leave_from not in ("", job.decode) for job in pushed)
    told = {fault.message for job in pushed for fault in job.notice_faults}
    assert told >= {"Claim", "Pushing", "PushEnded"}
