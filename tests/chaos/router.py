"""A PD proxy: sends each request to a P, then with its ticket to a D. It lets the adversary act."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import attrs
from adversary import DECODES, PREFILLS, Job, Plan
from chaos_messages import (
    Abort,
    Counts,
    Explain,
    Explanation,
    Leave,
    Progress,
    Settle,
    Settled,
    Submit,
    Told,
)
from engine_process import EngineProcess
from fleet import Fleet
from leaves import Leaves
from timers import Timers
from verdict import Finding, Life, Oracle, judge

__all__ = ["Bounds", "Router"]

_WANT_HAND_OVER = {"do_remote_decode": True}
_MAX_NUM_TRIES = 4
_MEETING_S = 0.6
_AFTERTHOUGHT_S = 0.1
_TICK_S = 0.05


@attrs.frozen(kw_only=True)
class Bounds:
    """What the router bears with.

    Args:
        num_at_once: requests under way.
        hang_s: a request that hears nothing for so long hangs.
        settle_s: how long the engines may take to come to rest at the end.
        give_up_after_s: the whole run.
        stops_at: kinds of findings that end the run.
    """

    num_at_once: int = 16
    hang_s: float = 30.0
    settle_s: float = 15.0
    give_up_after_s: float = 600.0
    stops_at: tuple[str, ...] = ()


class Router:
    """Runs a plan on engines.

    Args:
        plan: what to run, and what befalls it.
        engines: by name.
        bounds: of the run.
    """

    def __init__(self, plan: Plan, engines: dict[str, EngineProcess], bounds: Bounds) -> None:
        self._bounds = bounds
        oracle = Oracle()
        self.lives = [Life(job=job, expected=oracle.of(job)) for job in plan.jobs]
        self._queue = list(reversed(self.lives))
        self._followers: dict[int, list[tuple[Life, dict[str, Any] | None]]] = {}
        self._meetings: dict[int, list[tuple[Life, dict[str, Any] | None]]] = {}
        self._engine_faults = list(plan.engine_faults)
        self._timers = Timers()
        self._fleet = Fleet(engines, self._timers, lost=self._lost)
        self._leaves = Leaves(self._fleet, self._timers, answered=self._prefill)
        self._live: set[int] = set()
        self._num_begun = 0
        self._explanation = ""
        self._settled: dict[str, Settled] = {}
        self.findings: list[Finding] = []
        self.misreads: list[str] = []
        self._job_faults: Counter[str] = Counter()

    def run(self) -> None:
        """Run the plan to its end, or to a finding that stops it. At its end, see the engines come
        to rest."""
        give_up_at = time.monotonic() + self._bounds.give_up_after_s
        while not self._is_over and (self._queue or self._live):
            self._begin_more()
            self._strike_if_due()
            self._serve()
            self._look_for_hangs()
            if time.monotonic() > give_up_at:
                self.find("hang", f"the run took over {self._bounds.give_up_after_s:g} s")
                return
        if not self._is_over:
            self._see_them_settle()

    @property
    def counts(self) -> Counts:
        """What the engines counted."""
        return self._fleet.counts

    @property
    def faults(self) -> Counter[str]:
        """What befell requests and engines."""
        return self._job_faults + self._fleet.faults

    @property
    def _is_over(self) -> bool:
        return any(finding.kind in self._bounds.stops_at for finding in self.findings)

    def find(self, kind: Any, words: str) -> None:
        """Note what must not be."""
        self.findings.append(Finding(kind, words))

    # Requests: begun, prefilled, held, decoded, ended.

    def _begin_more(self) -> None:
        while self._queue and self._may_begin(self._queue[-1].job):
            self._begin(self._queue.pop())

    def _may_begin(self, job: Job) -> bool:
        # Those that wait for their time take no room, nor do those that meet.
        waits = job.starts_after_s > 0 or job.meets is not None or job.holds_ticket_s > 0
        return len(self._live) < self._bounds.num_at_once or waits

    def _begin(self, life: Life) -> None:
        self._live.add(life.job.number)
        life.began_at = time.monotonic() + life.job.starts_after_s
        life.heard_at = life.began_at
        self._job_faults.update(faults_of(life.job))
        self._timers.after(life.job.starts_after_s, partial(self._try, life))
        self._num_begun += 1

    def _try(self, life: Life) -> None:
        if life.stage == "ended":
            return
        life.num_tries += 1
        life.token_ids.clear()
        engine = self._leaves.ask(life) if life.job.is_pushed else None
        if engine is None:
            self._prefill(life, None)
        else:
            life.stage, life.engine, life.heard_at = "leave", engine.name, time.monotonic()

    def _prefill(self, life: Life, push_to: dict[str, Any] | None) -> None:
        engine = self._fleet.reachable(life.job.prefill, PREFILLS)
        if engine is None:
            self._hand_over(life, None)
            return
        params = _WANT_HAND_OVER | ({} if push_to is None else {"push_to": push_to})
        self._submit(life, engine, "prefill", max_tokens=1, params=params)

    def _hand_over(self, life: Life, params: dict[str, Any] | None) -> None:
        """The prompt is computed: go to the decode engine, when the plan says so."""
        life.stage, life.engine = "holding", ""
        job = life.job
        if job.is_walked_out:
            self._end(life, "walked out")
        elif job.follows is not None and self.lives[job.follows].stage != "ended":
            self._followers.setdefault(job.follows, []).append((life, params))
        elif job.meets is not None:
            self._meet(life, job.meets, params)
        else:
            self._timers.after(job.holds_ticket_s, partial(self._decode, life, params))

    def _meet(self, life: Life, meets: int, params: dict[str, Any] | None) -> None:
        if meets not in self._meetings:
            self._meetings[meets] = []
            self._timers.after(_MEETING_S, partial(self._end_meeting, meets))
        self._meetings[meets].append((life, params))

    def _end_meeting(self, meets: int) -> None:
        for life, params in self._meetings.pop(meets):
            self._decode(life, params)

    def _decode(self, life: Life, params: dict[str, Any] | None) -> None:
        if life.stage == "ended":
            return
        engine = self._fleet.reachable(life.job.decode, DECODES)
        if engine is None:
            self._timers.after(_TICK_S, partial(self._decode, life, params))
            return
        self._submit(life, engine, "decode", max_tokens=life.job.max_tokens, params=params)

    def _submit(
        self,
        life: Life,
        engine: EngineProcess,
        stage: Literal["prefill", "decode"],
        *,
        max_tokens: int,
        params: dict[str, Any] | None,
    ) -> None:
        job = life.job
        life.stage, life.engine, life.heard_at = stage, engine.name, time.monotonic()
        engine.send(
            Submit(
                job=job.number,
                request_id=life.request_id,
                prompt_token_ids=job.prompt,
                max_tokens=max_tokens,
                stop_token_ids=life.stop_token_ids,
                cache_salt=job.cache_salt,
                kv_transfer_params=params,
                deadline_s=job.deadline_s,
                transfer_fault=job.read_fault if stage == "decode" else job.write_fault,
                notice_faults=job.notice_faults,
            )
        )
        if job.abort_at == stage:
            self._timers.after(job.abort_after_s, partial(self._abort, life, stage))

    def _abort(self, life: Life, stage: str) -> None:
        if life.stage == stage:
            life.was_aborted = True
            self._fleet[life.engine].send(Abort(life.request_id))

    def _end(self, life: Life, outcome: str, cause: str = "") -> None:
        fails = bool(life.engine) and self._fleet[life.engine].settings.on_load_failure == "fail"
        life.stage, life.outcome, life.cause = "ended", outcome, cause
        self._live.discard(life.job.number)
        finding = judge(
            life,
            now=time.monotonic(),
            fails_on_lost_load=fails,
            num_kills=self._fleet.num_kills,
        )
        known = any(finding is not None and finding.words == f.words for f in self.findings)
        if finding is not None and not known:
            self.findings.append(finding)
        for follower in self._followers.pop(life.job.number, ()):
            self._timers.after(_AFTERTHOUGHT_S, partial(self._decode, *follower))

    # What engines say.

    def _serve(self) -> None:
        """Take in what the engines say, and do what is due."""
        self._timers.run_due()
        for engine, message in self._fleet.receive(self._timers.seconds_left(_TICK_S)):
            self._take(engine, message)

    def _take(self, engine: EngineProcess, message: Any) -> None:
        match message:
            case Progress():
                self.misreads += message.misreads
                for told in message.told:
                    self._take_told(engine, told)
            case Leave():
                self._leaves.take(engine, self.lives[message.job], message)
            case Settled():
                self._settled[engine.name] = message
            case Explanation(words):
                self._explanation = words

    def _take_told(self, engine: EngineProcess, told: Told) -> None:
        life = self.lives[told.job]
        if life.engine != engine.name or life.stage not in ("prefill", "decode"):
            return
        life.heard_at = time.monotonic()
        life.token_ids += told.token_ids
        if wrong := life.first_wrong_token():
            self._tell_wrong(wrong)
        if told.finish_reason:
            self._take_end(life, told)

    def _tell_wrong(self, wrong: str) -> None:
        if not any(finding.words == wrong for finding in self.findings):
            self.find("wrong token", wrong)

    def _take_end(self, life: Life, told: Told) -> None:
        is_prefilled = told.finish_reason in ("stop", "length")
        if life.stage == "prefill" and (is_prefilled or told.finish_reason == "error"):
            life.token_ids.clear()
            self._hand_over(life, told.kv_transfer_params)
        else:
            life.num_pushed_blocks = told.num_pushed_blocks
            self._end(life, told.finish_reason, told.cause)

    # What befalls engines.

    def _strike_if_due(self) -> None:
        watched = [self.lives[number].job for number in self._live]
        taboo = {name for job in watched if job.is_watched for name in (job.prefill, job.decode)}
        for fault in self._engine_faults[:]:
            if fault.at <= self._num_begun and fault.engine not in taboo:
                self._engine_faults.remove(fault)
                self._fleet.strike(fault)

    def _lost(self, engine: EngineProcess, was_killed: bool) -> None:
        """An engine is gone: what was sent to it begins anew, elsewhere."""
        if not was_killed:
            cause = engine.failure or f"exit code {engine.exit_code}"
            self.find("dead engine", f"{engine.name}: {cause}")
        for number in sorted(self._live):
            life = self.lives[number]
            if life.engine == engine.name and life.stage in ("leave", "prefill", "decode"):
                self._begin_anew(life)

    def _begin_anew(self, life: Life) -> None:
        life.heard_at = time.monotonic()
        if life.was_aborted:
            self._end(life, "abort")
        elif life.num_tries < _MAX_NUM_TRIES:
            self._try(life)
        else:
            self._end(life, "engine killed", f"{life.num_tries} times")

    # Hangs, and the end.

    def _look_for_hangs(self) -> None:
        now = time.monotonic()
        for number in sorted(self._live):
            life = self.lives[number]
            if now - life.heard_at > self._bounds.hang_s:
                where = f"{life.stage} {life.engine}".strip()
                why = self._ask_why(life)
                self.find(
                    "hang",
                    f"request {life.job.request_id} (job {number}) heard nothing for "
                    f"{now - life.heard_at:.1f} s at {where}: {why}",
                )
                self._end_hanging(life)
                return

    def _end_hanging(self, life: Life) -> None:
        life.stage, life.outcome = "ended", "hang"
        self._live.discard(life.job.number)

    def _ask_why(self, life: Life) -> str:
        if not life.engine:
            return "at no engine"
        self._explanation = ""
        self._fleet[life.engine].send(Explain(life.request_id))
        until = time.monotonic() + 3.0
        while not self._explanation and time.monotonic() < until:
            self._serve()
        return self._explanation or "the engine does not answer"

    def _see_them_settle(self) -> None:
        """Every engine comes to rest with all its blocks."""
        until = time.monotonic() + self._bounds.settle_s
        while not (self._fleet.is_complete and not self._timers) and time.monotonic() < until:
            self._serve()
        for engine in self._fleet:
            engine.send(Settle(self._bounds.settle_s))
        until = time.monotonic() + self._bounds.settle_s + 5.0
        while any(e.name not in self._settled for e in self._fleet) and time.monotonic() < until:
            self._serve()
        for engine in self._fleet:
            settled = self._settled.get(engine.name)
            if settled is None:
                self.find("hang", f"{engine.name} does not come to rest")
            elif settled.leaks:
                self.find("leak", f"{engine.name} at rest: {', '.join(settled.leaks)}")


def faults_of(job: Job) -> Iterator[str]:
    """The names of what befalls a job, for the report."""
    if job.abort_at:
        yield f"abort in {job.abort_at}"
    if job.request_id != f"r{job.number}":
        yield "request id used again"
    if job.deadline_s is not None:
        yield "deadline"
    if job.is_walked_out:
        yield "client gone before decode"
    if job.holds_ticket_s:
        yield "client late"
    if job.meets is not None:
        yield "crowd at one D"
    if job.read_fault is not None:
        yield "lost completion" if job.read_fault.is_lost else "slow read"
    if job.write_fault is not None:
        if job.write_fault.breaks:
            yield "broken write"
        else:
            yield "lost write completion" if job.write_fault.is_lost else "slow write"
    if job.calls_off_after_s is not None:
        yield "push called off"
    if job.leave_from and job.leave_from != job.decode:
        yield "leave from another D"
    for fault in job.notice_faults:
        yield f"notice: {fault.kind}"
