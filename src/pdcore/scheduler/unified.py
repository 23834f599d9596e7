"""The reference scheduler: everything is "this request is N tokens behind"."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import numpy as np
import numpy.typing as npt

from pdcore.answers import check_answer
from pdcore.clock import Clock, MonotonicClock
from pdcore.connector.base import SchedulerConnector
from pdcore.errors import InvalidRequest, ReentrantCall
from pdcore.kvcache.manager import KVCacheManager
from pdcore.messages import (
    GrammarBitmask,
    ModelRunnerOutput,
    RequestOutput,
    SchedulerOutput,
    StepResult,
    TransferReport,
)
from pdcore.request import FinishReason, Request, RequestStatus
from pdcore.scheduler.abandon import count_lost_load, take_back, tell_connector, undo_exactly
from pdcore.scheduler.admission import AdmissionPass
from pdcore.scheduler.arrivals import Arrivals
from pdcore.scheduler.asking import ask_stats, ask_wakeup, ask_whether_pending
from pdcore.scheduler.audit import audit, fingerprint, raise_if_stalled
from pdcore.scheduler.base import (
    Limits,
    RequestHandle,
    Scheduler,
    SchedulerStats,
    Skip,
    SkipCode,
)
from pdcore.scheduler.commit import Commit
from pdcore.scheduler.core import Core
from pdcore.scheduler.dispatch import Dispatch, OrdersLost
from pdcore.scheduler.ending import finish
from pdcore.scheduler.explaining import explain
from pdcore.scheduler.grammar import GrammarBackend
from pdcore.scheduler.intake import Intake, is_compiled
from pdcore.scheduler.loading import Loading
from pdcore.scheduler.masking import make_bitmask
from pdcore.scheduler.plan import Plan
from pdcore.scheduler.policy import FCFS, SchedulingPolicy
from pdcore.scheduler.running import RunningPass
from pdcore.scheduler.table import RequestTable
from pdcore.scheduler.validate import check_parts, out_of_order, refuse_mismatch

__all__ = ["UnifiedScheduler"]

Int32Array = npt.NDArray[np.int32]


class UnifiedScheduler(Scheduler):
    """Prefill, decode and re-computation after preemption are one thing: tokens to catch up on.

    A step with nothing but decodes is a fixed number of array operations, however many requests
    run and wait. Which tokens are computed when, who is preempted and which prefixes are shared is
    decided as vLLM's scheduler does.

    Args:
        kv_manager: keeps the blocks; one scheduler owns it.
        policy: who goes first and who gives way.
        limits: the bounds to keep to.
        connector: the scheduler's half of a KV connector, or None.
        grammar: compiles structured output, or None: then requests that ask for it are refused.
        clock: where time comes from; the operating system's monotonic clock when None.

    Raises:
        ConfigError: the parts do not fit together.
    """

    def __init__(
        self,
        kv_manager: KVCacheManager,
        *,
        policy: SchedulingPolicy | None = None,
        limits: Limits | None = None,
        connector: SchedulerConnector | None = None,
        grammar: GrammarBackend | None = None,
        clock: Clock | None = None,
    ) -> None:
        policy, limits, clock = policy or FCFS(), limits or Limits(), clock or MonotonicClock()
        check_parts(kv_manager, policy, limits, connector, grammar, clock)
        kv_manager.reserve_rows(limits.max_num_seqs, limits.max_model_len)
        if connector is not None:
            connector.bind_kv_manager(kv_manager)
        self._core = Core(
            manager=kv_manager,
            policy=policy,
            limits=limits,
            clock=clock,
            connector=connector,
            grammar=grammar,
            table=RequestTable(limits.max_num_seqs, kv_manager.block_size),
        )
        self._arrivals = Arrivals(self._core)
        self._intake = Intake(self._core)
        self._running = RunningPass(self._core)
        self._loading = Loading(self._core)
        self._admission = AdmissionPass(self._core, self._loading)
        self._dispatch = Dispatch(self._core)
        self._commit = Commit(self._core)
        self._is_paused = False
        self._last_plan: SchedulerOutput | None = None

    @property
    def clock(self) -> Clock:
        """The clock that deadlines are on."""
        return self._core.clock

    @property
    def in_flight(self) -> tuple[SchedulerOutput, ...]:
        return tuple(self._core.in_flight)

    @property
    def limits(self) -> Limits:
        """The bounds it keeps to."""
        return self._core.limits

    def add_request(self, request: Request) -> RequestHandle:
        if not isinstance(request, Request):
            raise InvalidRequest(f"add_request() got a {type(request).__name__}: pass a Request")
        if self._core.is_busy:
            raise _reentrant("add_request")
        return self._arrivals.add(request)

    def abort_requests(self, requests: Iterable[str | RequestHandle]) -> None:
        core = self._core
        if core.is_busy:
            raise _reentrant("abort_requests")
        if isinstance(requests, str | RequestHandle):
            requests = (requests,)
        try:
            core.is_busy = True
            for request in requests:
                request_id = request.request_id if isinstance(request, RequestHandle) else request
                uid = core.uids.get(request_id)
                # The id may have been used again, and the uid may be one of another scheduler.
                if uid is None or (isinstance(request, RequestHandle) and request.uid != uid):
                    continue
                core.tell(finish(core, core.requests[uid], FinishReason.ABORT))
        finally:
            core.is_busy = False

    def schedule(self) -> SchedulerOutput:
        while True:
            try:
                return self._plan()
            except OrdersLost as lost:
                # Nothing of that plan is left. Each request is planned with a load twice at most.
                told = "the connector's build_connector_meta() raised; planning again"
                self._core.complain(told, lost.error)
                for state in lost.states:
                    count_lost_load(self._core, state)

    def _plan(self) -> SchedulerOutput:
        core = self._core
        if core.is_busy:
            raise _reentrant("schedule")
        try:
            core.is_busy = True
            now = core.clock.now()
            self._intake.run(now)
            return self._plan_at(now)
        finally:
            core.is_busy = False

    def _plan_at(self, now: float) -> SchedulerOutput:
        core = self._core
        core.step_id += 1
        core.skips = {}
        core.undo.clear()
        core.recording = True
        core.manager.begin(core.step_id)
        plan = Plan(core.step_id, core.limits.max_num_batched_tokens, now)
        output: SchedulerOutput | None = None
        try:
            if self._is_paused:
                core.closed = SkipCode.PAUSED
            else:
                self._make(plan)
            output = self._dispatch.run(plan)
            core.is_quiet = not (output.rows.size or output.finished_rows.size or core.outbox)
            if core.is_quiet and not self._is_paused:
                raise_if_stalled(core)
            core.undo_is_exact = True
            core.in_flight.append(output)
        except BaseException:
            # An interrupt may come when it is in flight already: then it is for `abandon`.
            if not (core.in_flight and core.in_flight[-1] is output):
                undo_exactly(core, core.step_id)
            raise
        finally:
            core.recording = False
            core.manager.end()
        self._last_plan = output
        return output

    def get_grammar_bitmask(self, output: SchedulerOutput) -> GrammarBitmask | None:
        return make_bitmask(self._core, output)

    def update_from_output(
        self, output: SchedulerOutput, model_output: ModelRunnerOutput
    ) -> StepResult:
        core = self._core
        if core.is_busy:
            raise _reentrant("update_from_output")
        if not core.in_flight or core.in_flight[0] is not output:
            raise out_of_order(core, output, "the oldest", "results come in order, once each")
        is_in_order = refuse_mismatch(output, model_output)
        try:
            core.is_busy = True
            del core.in_flight[0]
            self._take_report(model_output.transfer_report)
            result = self._commit.run(output, model_output, is_in_order=is_in_order)
            if core.left_blocks:
                core.forget_left_blocks(output.step_id)
            if core.synchronous_loads:
                core.synchronous_loads.pop(output.step_id, None)
        finally:
            core.is_busy = False
        if type(core.policy).observe is not SchedulingPolicy.observe:
            try:
                core.policy.observe(result)
            except Exception as error:
                core.complain("the policy's observe() raised", error)
                core.counters.num_policy_errors += 1
        return result

    def abandon(
        self,
        output: SchedulerOutput,
        *,
        dispatched: bool = False,
        transfer_report: TransferReport | None = None,
    ) -> None:
        core = self._core
        if core.is_busy:
            raise _reentrant("abandon")
        if not core.in_flight or core.in_flight[-1] is not output:
            raise out_of_order(core, output, "the newest", "abandon the newest first")
        try:
            core.is_busy = True
            core.in_flight.pop()
            self._last_plan = None
            take_back(core, output, dispatched=dispatched)
            if transfer_report is not None:
                self._take_report(transfer_report)
            tell_connector(core, output, dispatched=dispatched)
        finally:
            core.is_busy = False

    def drain(self) -> tuple[RequestOutput, ...]:
        if self._core.is_busy:
            raise _reentrant("drain")
        return tuple(self._core.take_outbox())

    def has_requests(self) -> bool:
        core = self._core
        return bool(
            core.requests
            or core.in_flight
            or core.outbox
            or core.handed_over
            or core.quarantine
            or ask_whether_pending(core)
        )

    def has_work(self) -> bool:
        core = self._core
        if core.in_flight or core.outbox or core.failing or core.finished_rows or core.has_news:
            return True
        if any(map(is_compiled, core.compiling.values())) or core.find_crowding():
            return True
        wakeup = self.next_wakeup()
        if wakeup is not None and wakeup <= core.clock.now():
            return True
        if core.is_quiet or self._is_paused:
            return False
        return bool(len(core.table) or len(core.waiting) or len(core.landed))

    def next_wakeup(self) -> float | None:
        core = self._core
        times = (core.alarms.next(), ask_wakeup(core))
        return min((time for time in times if time is not None), default=None)

    def status(self, request_id: str) -> RequestStatus | None:
        uid = self._core.uids.get(request_id)
        return None if uid is None else self._core.requests[uid].status

    def explain(self, request_id: str) -> Skip:
        return explain(self._core, request_id, plan=self._last_plan, is_paused=self._is_paused)

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        self._core.is_quiet = False

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        core = self._core
        if core.is_busy:
            raise _reentrant("reset_prefix_cache")
        if core.parked or core.handed_over or core.quarantine:
            return False
        if not preempt_running and (len(core.table) or len(core.landed)):
            return False
        core.touch()
        for row in core.table.running[::-1].tolist():
            core.preempt(core.table.state(row))
        for state in list(core.landed):
            core.restart(state)
        if not core.manager.pool.reset():
            return False
        if core.connector is not None:
            core.connector.reset_cache()
        return True

    def stats(self) -> SchedulerStats:
        core = self._core
        pool = core.manager.pool
        return SchedulerStats(
            num_running=len(core.table),
            num_waiting=len(core.waiting) + len(core.landed) + len(core.compiling),
            num_parked=len(core.parked),
            num_in_flight=len(core.in_flight),
            num_held_for_peers=len(core.handed_over),
            num_free_blocks=pool.num_free_blocks,
            num_usable_blocks=pool.num_usable_blocks,
            num_quarantined_blocks=core.quarantine.num_blocks,
            max_num_quarantined_blocks=core.quarantine.max_num_blocks,
            connector=ask_stats(core),
            **attrs.asdict(core.counters),
        )

    def check(self) -> None:
        audit(self._core)

    def fingerprint(self) -> bytes:
        return fingerprint(self._core)

    def __repr__(self) -> str:
        core = self._core
        return (
            f"<UnifiedScheduler {len(core.table)} running, {len(core.waiting)} waiting, "
            f"{len(core.parked)} parked, {len(core.in_flight)} steps in flight, "
            f"{core.manager.pool}>"
        )

    def _take_report(self, report: TransferReport) -> None:
        core = self._core
        if core.connector is not None:
            try:
                check_answer(report, TransferReport)
                core.has_news |= bool(report)
                core.connector.update_connector_output(report)
            except Exception as error:
                told = "the connector's update_connector_output() raised; what was lost times out"
                core.complain(told, error)

    def _make(self, plan: Plan) -> None:
        """Decide what runs."""
        core = self._core
        self._running.run(plan)
        self._admission.run(plan)
        if plan.preempted and not plan.rows.size and len(core.landed):
            # Everybody gave way to blocks that loads hold: let those go on now.
            plan.preempted = False
            self._admission.run(plan)
        while not (plan.rows.size or plan.admitted_rows) and not core.in_flight:
            if not self._loading.roll_back_landed():
                break
            self._admission.run(plan)


def _reentrant(name: str) -> ReentrantCall:
    return ReentrantCall(
        f"{name}() was called by a hook of the very scheduler that waits for its answer: let the "
        f"hook return, and call {name}() afterwards"
    )
