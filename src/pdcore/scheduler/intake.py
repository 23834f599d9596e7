"""What happened outside since the last plan: loads, hand-overs, grammars, deadlines."""

from __future__ import annotations

import logging
from concurrent.futures import CancelledError, Future

from pdcore.answers import check_answer
from pdcore.connector.base import ConnectorEvents
from pdcore.messages import LoadFailure, TransferKey
from pdcore.request import FinishReason, RequestStatus
from pdcore.scheduler.core import Core
from pdcore.scheduler.ending import fail, finish
from pdcore.scheduler.grammar import GrammarMatcher
from pdcore.scheduler.state import RequestState, move

__all__ = ["Intake", "is_compiled"]

logger = logging.getLogger(__name__)


class Intake:
    """Takes in outside events before anything is planned, so that no queue can hide them.

    Events are idempotent: one that is late, repeated or about something unknown is counted and
    ignored.
    """

    def __init__(self, core: Core) -> None:
        self._core = core

    def run(self, now: float) -> None:
        """Take in all that is there. Never waits."""
        core = self._core
        core.has_news = False
        failing, core.failing = core.failing, []
        for state, cause in failing:
            if not state.is_finished:
                fail(core, state, cause)
        if core.connector is not None:
            self._take_events()
            self._end_crowding()
        if core.compiling:
            self._take_grammars()
        for name in core.alarms.take_due(now):
            self._due(name)

    def _take_events(self) -> None:
        core = self._core
        assert core.connector is not None
        try:
            events = core.connector.take_events()
            check_answer(events, ConnectorEvents)
        except Exception as error:
            core.complain("the connector's take_events() raised; its loads time out", error)
            events = ConnectorEvents()
        for transfer_id in events.finished_sending:
            hold = core.handed_over.pop(transfer_id, None)
            if hold is None:
                core.counters.num_late_events += 1
            else:
                core.touch()
                core.manager.pool.release_hold(hold)
        # First, since a load that is told to be complete as well is not: a worker's report may come
        # twice, and the second time be taken for one that nobody has to vouch for.
        for failure in events.failed:
            self._load_failed(failure)
        for transfer in events.finished_recving:
            self._loaded(transfer)

    def _loaded(self, transfer: TransferKey) -> None:
        """A load is complete: its blocks can be shared, and its request can go on."""
        core = self._core
        state = self._parked(transfer)
        if state is None:
            self._quiet(transfer)
            return
        load, blocks = state.load, state.block_ids
        assert load is not None
        assert blocks is not None
        core.touch()
        del core.parked[state.uid]
        core.alarms.cancel(("load", transfer))
        state.load = None
        self._count_external(state, load.num_external_tokens)
        num_full = state.num_computed_tokens // core.manager.block_size
        core.manager.publish_loaded(
            blocks[:num_full],
            state.sequence,
            start=load.num_local_tokens // core.manager.block_size,
        )
        self._back_to_queue(state)

    def _load_failed(self, failure: LoadFailure) -> None:
        state = self._parked(failure.transfer)
        if state is None:
            self._quiet(failure.transfer)
        else:
            self._recover(state, failure.num_valid_tokens, failure.cause, still_written=False)

    def _recover(
        self, state: RequestState, num_valid_tokens: int, cause: str, *, still_written: bool
    ) -> None:
        """Go on after a failed load: from the longest valid prefix, or not at all."""
        core, block_size = self._core, self._core.manager.block_size
        load, blocks = state.load, state.block_ids
        assert load is not None
        assert blocks is not None
        core.touch()
        core.count_failed_load(state, cause)
        num_wanted = state.num_computed_tokens
        num_valid = min(max(num_valid_tokens, load.num_local_tokens), num_wanted)
        num_valid -= num_valid % block_size
        kept = blocks[load.num_local_tokens // block_size : num_valid // block_size]
        if kept.size and not still_written:
            core.manager.pool.retain(kept)
            core.manager.publish_loaded(
                blocks[: num_valid // block_size],
                state.sequence,
                start=load.num_local_tokens // block_size,
            )
        core.unpark(state, still_written=still_written)
        if kept.size and not still_written:
            state.block_ids = blocks[: num_valid // block_size]
            state.num_computed_tokens = num_valid
        if core.limits.on_load_failure == "fail" and not state.ask_connector:
            fail(core, state, f"remote KV could not be loaded: {cause}")
            return
        core.counters.num_recomputed_tokens += num_wanted - state.num_computed_tokens
        if state.ask_connector:
            core.drop_blocks(state)
        elif state.block_ids is not None:
            self._count_external(state, num_valid - load.num_local_tokens)
        self._back_to_queue(state)

    def _count_external(self, state: RequestState, num_tokens: int) -> None:
        state.num_external_tokens += num_tokens
        self._core.counters.num_external_tokens += num_tokens

    def _asked_in_vain(self, state: RequestState) -> None:
        """The connector never said what it has: compute everything here, or end."""
        core = self._core
        core.touch()
        core.counters.num_failed_loads += 1
        state.is_asking = False
        state.ask_connector = False
        if core.limits.on_load_failure == "fail":
            limit = core.limits.load_timeout_s
            fail(core, state, f"its connector did not find external KV within {limit:g} s")

    def _back_to_queue(self, state: RequestState) -> None:
        move(state, RequestStatus.WAITING)
        self._core.rejoin(state)

    def _parked(self, transfer: TransferKey) -> RequestState | None:
        state = self._core.parked.get(transfer.uid)
        if state is None or state.load is None or state.load.transfer != transfer:
            return None
        return state

    def _quiet(self, transfer: TransferKey) -> None:
        """Nothing writes to the blocks of a cancelled load any more."""
        core = self._core
        hold = core.quarantine.remove(transfer)
        if hold is None:
            core.counters.num_late_events += 1
            return
        core.touch()
        core.alarms.cancel(("quarantine", transfer))
        core.manager.pool.release_hold(hold)

    def _take_grammars(self) -> None:
        core = self._core
        for uid, future in list(core.compiling.items()):
            outcome = _outcome(future)
            if outcome is None:
                continue
            state = core.requests[uid]
            if isinstance(outcome, BaseException):
                fail(core, state, f"its grammar could not be compiled: {outcome!r}")
                continue
            del core.compiling[uid]
            core.alarms.cancel(("grammar", uid))
            state.matcher = outcome
            move(state, RequestStatus.WAITING)
            core.enqueue(state)

    def _due(self, name: object) -> None:
        core = self._core
        match name:
            # Another alarm of the same moment may have ended the request.
            case (_, int(uid)) if uid not in core.requests:
                pass
            case ("request", int(uid)):
                state = core.requests[uid]
                cause = f"its deadline passed while it was {state.status.value}"
                core.tell(finish(core, state, FinishReason.TIMEOUT, cause=cause))
            case ("grammar", int(uid)):
                fail(
                    core,
                    core.requests[uid],
                    f"its grammar was not compiled within {core.limits.grammar_timeout_s:g} s",
                )
            case ("ask", int(uid)):
                self._asked_in_vain(core.requests[uid])
            case ("load", TransferKey() as transfer):
                parked = self._parked(transfer)
                if parked is not None:
                    cause = f"no completion within {core.limits.load_timeout_s:g} s"
                    self._recover(parked, 0, cause, still_written=True)
            case ("quarantine", TransferKey() as transfer):
                limit_s = core.limits.quarantine_timeout_s
                self._cut_off(transfer, f"though {limit_s:g} s have passed since it was called off")

    def _end_crowding(self) -> None:
        """Cancelled loads keep too many blocks to wait any longer for the oldest of them."""
        quarantine = self._core.quarantine
        for transfer in self._core.find_crowding():
            self._cut_off(
                transfer,
                f"while {quarantine.num_blocks} blocks are in quarantine, where "
                f"{quarantine.max_num_blocks} may be",
            )

    def _cut_off(self, transfer: TransferKey, when: str) -> None:
        """A cancelled load was not reported in time: end whatever may still write, then wait."""
        core = self._core
        assert core.connector is not None
        logger.warning("load %s is still in flight %s; cutting off its peer", transfer, when)
        core.counters.num_cut_off_loads += core.quarantine.cut_off(transfer)
        core.alarms.set(
            ("quarantine", transfer), core.clock.now() + core.limits.quarantine_timeout_s
        )
        try:
            core.connector.cut_off(transfer)
        except Exception:
            logger.exception("the connector's cut_off(%s) raised", transfer)


def is_compiled(future: Future[GrammarMatcher]) -> bool:
    """Whether there is an outcome to take in: of a future that cannot even say, its error."""
    try:
        return bool(future.done())
    except Exception:
        return True


def _outcome(future: Future[GrammarMatcher]) -> GrammarMatcher | BaseException | None:
    """A grammar's matcher, or why there is none; None while it is being compiled."""
    try:
        if not future.done():
            return None
        error = CancelledError() if future.cancelled() else future.exception()
        outcome = future.result() if error is None else error
    except Exception as error:
        return error
    return TypeError("its compilation gave None for a matcher") if outcome is None else outcome
