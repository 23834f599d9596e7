"""What all parts of the scheduler share: the tables, and the changes that touch several of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future

import attrs
import numpy as np
import numpy.typing as npt

from pdcore.clock import Clock
from pdcore.connector.base import SchedulerConnector
from pdcore.kvcache.holds import Hold, HoldReason
from pdcore.kvcache.manager import KVCacheManager
from pdcore.messages import RequestOutput, SchedulerOutput, TransferKey
from pdcore.request import RequestStatus
from pdcore.scheduler.alarms import Alarms
from pdcore.scheduler.base import Limits, Skip, SkipCode
from pdcore.scheduler.grammar import GrammarBackend, GrammarMatcher
from pdcore.scheduler.policy import SchedulingPolicy
from pdcore.scheduler.quarantine import Quarantine
from pdcore.scheduler.state import RequestState, move, move_back
from pdcore.scheduler.table import RequestTable
from pdcore.scheduler.waiting import QueueNumbers, WaitingTable

__all__ = ["Core", "Counters"]

BlockIds = npt.NDArray[np.int32]

logger = logging.getLogger(__name__)


@attrs.define(eq=False)
class Counters:
    """Totals since the scheduler was made; see `SchedulerStats`."""

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_preemptions: int = 0
    num_finished: int = 0
    num_prefix_queried_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_external_tokens: int = 0
    num_failed_loads: int = 0
    num_recomputed_tokens: int = 0
    num_cut_off_loads: int = 0
    num_late_events: int = 0
    num_policy_errors: int = 0


@attrs.define(eq=False, kw_only=True)
class Core:
    """The state of a `UnifiedScheduler`.

    Args:
        requests: unfinished requests by uid; uids: by request id.
        numbers: the places that ``waiting`` and ``landed`` give out.
        table: those that run; waiting: those that may be admitted; landed: those that may be, and
            hold blocks that were loaded for them.
        parked: those that wait for remote KV, by uid; compiling: for their grammar.
        quarantine: blocks of loads that nobody wants any more, by load.
        handed_over: blocks kept for a peer, by transfer id.
        in_flight: plans whose result is not in, oldest first.
        departed: who had a row, by (row, epoch), while a draw of theirs is in flight.
        left_blocks: the blocks of rows that were taken while plans of theirs are in flight, by
            (row, epoch), with the newest of these plans.
        synchronous_loads: loads that plans in flight do within their step, by step.
        finished_rows: rows given up since the last plan.
        outbox: finish events that no `StepResult` has carried; undelivered: their request ids.
        failing: requests that a hook failed for in the last plan; they end with the next one.
        skips: why requests that the last step looked at did not run, by uid.
        closed: why those that it did not look at did not.
        is_busy: whether a call is under way that hooks must not break into.
        undo: how to take back what the newest plan changed; exact while nothing else has changed.
        has_news: whether a worker's report waits to be taken in.
        is_quiet: whether the last plan found nothing to do, and nothing has changed since.
        last_load_failure: why the newest load failed that did.
        complaints: what the log has of hooks that may fail in every step.
    """

    manager: KVCacheManager
    policy: SchedulingPolicy
    limits: Limits
    clock: Clock
    connector: SchedulerConnector | None
    grammar: GrammarBackend | None
    table: RequestTable
    requests: dict[int, RequestState] = attrs.field(factory=dict)
    uids: dict[str, int] = attrs.field(factory=dict)
    numbers: QueueNumbers = attrs.field(factory=QueueNumbers)
    waiting: WaitingTable = attrs.field(
        default=attrs.Factory(lambda self: WaitingTable(self.numbers), takes_self=True)
    )
    landed: WaitingTable = attrs.field(
        default=attrs.Factory(lambda self: WaitingTable(self.numbers), takes_self=True)
    )
    parked: dict[int, RequestState] = attrs.field(factory=dict)
    compiling: dict[int, Future[GrammarMatcher]] = attrs.field(factory=dict)
    quarantine: Quarantine = attrs.field(
        default=attrs.Factory(
            lambda self: Quarantine.of(self.limits, self.manager), takes_self=True
        )
    )
    handed_over: dict[str, Hold] = attrs.field(factory=dict)
    in_flight: list[SchedulerOutput] = attrs.field(factory=list)
    departed: dict[tuple[int, int], RequestState] = attrs.field(factory=dict)
    left_blocks: dict[tuple[int, int], tuple[int, BlockIds]] = attrs.field(factory=dict)
    synchronous_loads: dict[int, list[tuple[RequestState, TransferKey]]] = attrs.field(factory=dict)
    finished_rows: list[int] = attrs.field(factory=list)
    outbox: list[RequestOutput] = attrs.field(factory=list)
    undelivered: set[str] = attrs.field(factory=set)
    failing: list[tuple[RequestState, str]] = attrs.field(factory=list)
    alarms: Alarms = attrs.field(factory=Alarms)
    counters: Counters = attrs.field(factory=Counters)
    skips: dict[int, Skip] = attrs.field(factory=dict)
    closed: SkipCode = SkipCode.NOT_REACHED
    step_id: int = 0
    is_busy: bool = False
    undo: list[Callable[[], None]] = attrs.field(factory=list)
    recording: bool = False
    undo_is_exact: bool = False
    has_news: bool = False
    is_quiet: bool = False
    last_load_failure: str = ""
    complaints: set[tuple[str, type[Exception]]] = attrs.field(factory=set)

    def touch(self) -> None:
        """Something changed apart from planning: the newest plan cannot be undone exactly."""
        self.undo_is_exact = False
        self.is_quiet = False

    def complain(self, told: str, error: Exception) -> None:
        """A hook of a policy or connector failed where the scheduler goes on without it.

        It may do so in every step, so the log has each kind of failure whole only once.
        """
        kind = (told, type(error))
        is_new = kind not in self.complaints
        self.complaints.add(kind)
        level = logging.ERROR if is_new else logging.DEBUG
        logger.log(level, "%s: %r", told, error, exc_info=error if is_new else None)

    def cause_of(self, state: RequestState, told: str) -> str:
        """Why a row failed: the hook that failed for it before, or what the worker told.

        A row whose grammar raised is allowed no token, and that is all that a worker can say of it.
        """
        return next((cause for failing, cause in self.failing if failing is state), told)

    def tell(self, event: RequestOutput) -> None:
        """Deliver a finish event with the next `StepResult`, or by `drain`."""
        self.outbox.append(event)
        self.undelivered.add(event.request_id)

    def take_outbox(self) -> list[RequestOutput]:
        """The finish events that are delivered now."""
        outbox, self.outbox = self.outbox, []
        self.undelivered.clear()
        return outbox

    def record(self, undo: Callable[[], None]) -> None:
        """Remember how to take back a change that the plan being made has made."""
        if self.recording:
            self.undo.append(undo)

    def enqueue(self, state: RequestState, *, ahead: bool = False) -> None:
        """Put a request without a row into the queue it belongs to."""
        self._queue_of(state).join(state, ahead=ahead)

    def rejoin(self, state: RequestState) -> None:
        """Put a request that waited for remote KV back into a queue, at the place it had."""
        self._queue_of(state).put_back(state)

    def vacate(self, state: RequestState, *, expects_late: bool = True) -> None:
        """Take a request's row and blocks.

        Args:
            state: a running request.
            expects_late: whether tokens in flight for it are still wanted; else they are dropped.
        """
        table, row = self.table, state.row
        table.flush(row)
        epoch = int(table.epoch[row])
        if expects_late:
            self.expect_late(state)
        if self.in_flight:
            newest = self.in_flight[-1].step_id
            self.left_blocks[row, epoch] = (newest, self.manager.tables.row_blocks(row))
        self.manager.tables.free(row)
        self.finished_rows.append(row)
        if not self.recording:
            table.release(row)
            return
        restore = table.release_undoably(row)

        def undo() -> None:
            self.finished_rows.pop()
            restore()
            self.departed.pop((row, epoch), None)
            self.left_blocks.pop((row, epoch), None)
            state.num_late_tokens = 0

        self.undo.append(undo)

    def expect_late(self, state: RequestState) -> None:
        """Remember who has a row, if draws for it are in flight."""
        num_in_flight = int(self.table.num_in_flight[state.row])
        if num_in_flight:
            self.departed[state.row, int(self.table.epoch[state.row])] = state
            state.num_late_tokens = num_in_flight

    def take_late(self, row: int, epoch: int) -> RequestState | None:
        """Who expected a draw of a row that they had; they expect one less from now on."""
        state = self.departed.get((row, epoch))
        if state is not None:
            state.num_late_tokens -= 1
            if not state.num_late_tokens:
                del self.departed[row, epoch]
        return state

    def drop_late(self, state: RequestState) -> None:
        """Nothing that is still drawn for a row that a request had is wanted any more."""
        self.departed = {it: who for it, who in self.departed.items() if who is not state}
        state.num_late_tokens = 0

    def forget_left_blocks(self, step_id: int) -> None:
        """The result of a plan is in: it, and those before it, report no more failures of rows."""
        self.left_blocks = {
            tenancy: left for tenancy, left in self.left_blocks.items() if left[0] > step_id
        }

    def preempt(self, state: RequestState, *, expects_late: bool = True) -> None:
        """Take a running request's row and blocks, and put it back into the queue."""
        self.vacate(state, expects_late=expects_late)
        queue_key = state.queue_key
        move(state, RequestStatus.PREEMPTED)
        state.num_preemptions += 1
        self.counters.num_preemptions += 1
        self.enqueue(state, ahead=True)
        self.skips[state.uid] = Skip(code=SkipCode.PREEMPTED_THIS_STEP)

        def undo() -> None:
            self.waiting.remove(state)
            self.counters.num_preemptions -= 1
            state.num_preemptions -= 1
            move_back(state)
            state.queue_key = queue_key

        self.record(undo)

    def leave(self, state: RequestState, queue: WaitingTable) -> None:
        """Take a request out of a queue for good, unless the plan is taken back."""
        queue.remove(state)
        self.stop_asking(state)
        self.record(lambda: queue.put_back(state))

    def unpark(self, state: RequestState, *, still_written: bool) -> None:
        """Take a request out of WAITING_FOR_REMOTE_KVS, keeping its local blocks only.

        Args:
            state: a parked request.
            still_written: whether the load may still write to its blocks, so that they must stay
                in quarantine until the connector reports it.
        """
        load = state.load
        assert load is not None
        assert state.block_ids is not None
        del self.parked[state.uid]
        self.alarms.cancel(("load", load.transfer))
        state.load = None
        num_local_blocks = load.num_local_tokens // self.manager.block_size
        local, loading = state.block_ids[:num_local_blocks], state.block_ids[num_local_blocks:]
        if still_written:
            self._quarantine(load.transfer, loading)
        self.manager.pool.release(loading[::-1])
        state.block_ids = local if local.size else None
        state.num_computed_tokens = load.num_local_tokens

    def restart(self, state: RequestState) -> None:
        """Put a request without a row back into the queue, to begin from nothing."""
        if state.uid in self.parked:
            self.unpark(state, still_written=True)
            move(state, RequestStatus.WAITING)
        else:
            self.landed.remove(state)
        self.drop_blocks(state)
        self.rejoin(state)

    def distrust(self, block_ids: npt.NDArray[np.int32], *, since_step: int) -> None:
        """Blocks that others may share were not written as planned: those begin anew.

        Only what joined in ``since_step`` or later can share them. What such a row has drawn, or
        still draws in steps in flight, is dropped, since it may come from the missing data.
        """
        rows = self.table.running
        for row in rows[self.table.since_step[rows] >= since_step][::-1].tolist():
            if np.isin(self.manager.tables.row_blocks(row), block_ids).any():
                self.preempt(self.table.state(row), expects_late=False)
        for state in (*self.parked.values(), *self.landed):
            if np.isin(state.block_ids, block_ids).any():
                self.restart(state)

    def stop_asking(self, state: RequestState) -> None:
        """A request no longer waits for its connector to say what it has."""
        if state.is_asking:
            state.is_asking = False
            self.alarms.cancel(("ask", state.uid))

    def drop_blocks(self, state: RequestState) -> None:
        """Release the blocks of a request that has no row."""
        if state.block_ids is not None:
            self.manager.pool.release(state.block_ids[::-1])
            state.block_ids = None
        state.num_computed_tokens = 0

    def _queue_of(self, state: RequestState) -> WaitingTable:
        return self.waiting if state.block_ids is None else self.landed

    def _quarantine(self, transfer: TransferKey, block_ids: npt.NDArray[np.int32]) -> None:
        deadline = self.clock.now() + self.limits.quarantine_timeout_s
        hold = self.manager.pool.hold(
            block_ids, owner=transfer, reason=HoldReason.QUARANTINE, deadline=deadline
        )
        self.quarantine.add(transfer, hold, told_in=self.step_id + 1)
        self.alarms.set(("quarantine", transfer), deadline)
        self.call_off(transfer)

    def find_crowding(self) -> list[TransferKey]:
        """Cancelled loads that keep more blocks than they may, though workers know of them."""
        if not self.quarantine:
            return []
        answered = self.in_flight[0].step_id - 1 if self.in_flight else self.step_id
        return self.quarantine.find_excess(answered=answered)

    def call_off(self, transfer: TransferKey) -> None:
        """Tell the connector that nobody wants a load any more."""
        if self.connector is not None:
            try:
                self.connector.cancel(transfer)
            except Exception:
                logger.exception("the connector's cancel(%s) raised", transfer)

    def count_failed_load(self, state: RequestState, cause: str) -> None:
        """A load failed: its request asks the connector again only while it has tries left.

        A request that is computed here after all ends without a cause, so the log has it: a
        warning, unless it is the cause of the failure before as well. A peer's end fails many
        loads.
        """
        level = logging.DEBUG if cause == self.last_load_failure else logging.WARNING
        logger.log(level, "remote KV of request %s was not loaded: %s", state.request_id, cause)
        self.last_load_failure = cause
        self.counters.num_failed_loads += 1
        state.num_failed_loads += 1
        state.ask_connector = state.num_failed_loads <= self.limits.max_load_retries
