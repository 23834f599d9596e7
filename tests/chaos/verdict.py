"""What became of each request, and whether that may be."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Literal

import attrs
from adversary import Job
from chaos_messages import Counts

from pdcore.request import FinishReason, Request, SamplingParams
from pdcore.testing.oracle import FakeModel

__all__ = ["Finding", "Life", "Oracle", "judge", "judge_movement"]

_NUM_UNLUCKY_PUSHES = 8
_REASONS_TO_RECOMPUTE = re.compile(
    r"lease|vouch|ticket|restarted|another engine|cannot be reached|did not answer"
    r"|no completion within|no data came|lost engine|refused|limit"
)


@attrs.frozen
class Finding:
    """Something that must not be: what kind, and what exactly."""

    kind: Literal[
        "wrong token", "foreign KV", "hang", "leak", "untrue reason", "dead engine", "nothing moved"
    ]
    words: str


@attrs.define(eq=False, kw_only=True)
class Life:
    """A request on its way.

    Args:
        job: what the plan says.
        expected: its tokens when it runs alone, and why that run ends.
        stage: where it is.
        engine: at which engine, in the stages "leave", "prefill" and "decode".
        token_ids: what it was given so far, since it last began anew.
        num_tries: how often it began.
        began_at, heard_at: when it began first, and when there was news last.
        was_aborted: whether the client gave up.
        outcome, cause: how it ended.
        num_pushed_blocks: of the KV that it ran on, how many blocks were pushed.
    """

    job: Job
    expected: tuple[list[int], FinishReason]
    stage: Literal["queued", "leave", "prefill", "holding", "decode", "ended"] = "queued"
    engine: str = ""
    token_ids: list[int] = attrs.field(factory=list)
    num_tries: int = 0
    began_at: float = 0.0
    heard_at: float = 0.0
    was_aborted: bool = False
    outcome: str = ""
    cause: str = ""
    num_pushed_blocks: int = 0

    @property
    def request_id(self) -> str:
        """Its id where it is; a proxy makes one for the prefill."""
        if self.stage == "prefill":
            return f"{self.job.request_id}-prefill-{self.job.number}"
        return self.job.request_id

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """What ends it early, in either engine."""
        if self.job.stops_at is None or self.expected[1] is not FinishReason.STOP:
            return ()
        return (self.expected[0][-1],)

    def first_wrong_token(self) -> str:
        """In words, where its tokens leave those of its solo run; empty if they do not."""
        solo = self.expected[0]
        for place, token in enumerate(self.token_ids):
            if place >= len(solo) or token != solo[place]:
                wanted = solo[place] if place < len(solo) else "its end"
                return (
                    f"request {self.job.request_id} (job {self.job.number}), token {place}: "
                    f"{token} instead of {wanted}"
                )
        return ""


class Oracle:
    """Solo runs of jobs."""

    def __init__(self) -> None:
        self._model = FakeModel()

    def of(self, job: Job) -> tuple[list[int], FinishReason]:
        """The tokens that a job must get, and why it ends if nothing befalls it."""
        tokens, reason = self._run(job, ())
        if job.stops_at is None or job.stops_at >= len(tokens):
            return tokens, reason
        return self._run(job, (tokens[job.stops_at],))

    def _run(self, job: Job, stop_token_ids: tuple[int, ...]) -> tuple[list[int], FinishReason]:
        sampling = SamplingParams(max_tokens=job.max_tokens, stop_token_ids=stop_token_ids)
        request = Request(job.request_id, job.prompt, sampling=sampling, cache_salt=job.cache_salt)
        return self._model.solo_run(request)


def judge(life: Life, *, now: float, fails_on_lost_load: bool, num_kills: int) -> Finding | None:
    """Whether a request's end may be.

    Args:
        life: of a request that ended.
        now: when it did.
        fails_on_lost_load: whether the engine it ended at fails requests whose KV cannot be loaded.
        num_kills: how many engines the adversary had killed by then.
    """
    solo, reason = life.expected
    if wrong := life.first_wrong_token():
        return Finding("wrong token", wrong)
    if life.outcome in ("stop", "length"):
        if life.token_ids == solo and life.outcome == str(reason):
            return None
        words = f"{len(life.token_ids)} of {len(solo)} tokens, {life.outcome} instead of {reason}"
    elif life.outcome == "walked out" or (life.outcome == "abort" and life.was_aborted):
        return None
    elif life.outcome == "timeout" and life.job.deadline_s is not None:
        if now - life.began_at >= life.job.deadline_s:
            return None
        words = f"timeout {now - life.began_at:.3f} s after it began"
    elif life.outcome == "engine killed":
        if num_kills >= life.num_tries:
            return None
        words = f"{num_kills} engines killed, {life.num_tries} tries"
    elif life.outcome == "error" and fails_on_lost_load and _is_true(life.cause, num_kills):
        return None
    else:
        words = f"{life.outcome}: {life.cause}"
    return Finding("untrue reason", f"request {life.job.request_id} ended with {words}")


def judge_movement(counts: Counts, lives: Iterable[Life]) -> Iterator[Finding]:
    """Whether KV has moved, both ways. A transport on which every load fails, or every push, would
    pass all else: everybody computes, or reads, for himself."""
    asked = {
        "loads": (counts.num_loads, counts.num_loads, counts.num_accepted),
        # A small run begins few, and each slow write or client that is gone costs one.
        "pushes": (counts.num_pushes, counts.num_pushes - _NUM_UNLUCKY_PUSHES, counts.num_landed),
    }
    for what, (num_begun, num_judged, num_vouched) in asked.items():
        if num_vouched < max(num_judged / 4, 1):
            yield Finding("nothing moved", f"{num_vouched} of {num_begun} {what} were vouched for")
    if not any(life.num_pushed_blocks and life.token_ids for life in lives):
        yield Finding("nothing moved", "no request ran on KV that was pushed")


def _is_true(cause: str, num_kills: int) -> bool:
    """Whether a cause names something that the adversary, or a busy machine, can have done."""
    if not cause.startswith("remote KV could not be loaded: "):
        return False
    if "restarted" in cause or "cannot be reached" in cause:
        return num_kills > 0
    return _REASONS_TO_RECOMPUTE.search(cause) is not None
