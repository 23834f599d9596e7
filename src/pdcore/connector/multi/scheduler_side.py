"""The half of a combined connector that lives beside the scheduler."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attrs
import numpy as np

from pdcore.answers import check_answer, check_time
from pdcore.clock import Clock
from pdcore.connector.base import (
    ConnectorEvents,
    ExternalMatch,
    FinishedBlocks,
    HandOver,
    KVLoad,
    SchedulerConnector,
)
from pdcore.connector.multi.asking import are_events, are_stats, are_words, ask
from pdcore.connector.multi.hand_overs import JointHandOvers
from pdcore.connector.multi.loads import JointLoads, OwnedLoad
from pdcore.connector.multi.meta import MultiMeta
from pdcore.connector.multi.params import is_joined
from pdcore.connector.multi.reports import part_of
from pdcore.connector.multi.sharing import Offers, SharedRequest
from pdcore.connector.multi.stats import MultiStats
from pdcore.connector.stats import ConnectorStats
from pdcore.errors import ConfigError, InvalidTransferParams, TransferError
from pdcore.kvcache.manager import KVCacheManager
from pdcore.messages import LoadFailure, SchedulerOutput, TransferKey, TransferReport
from pdcore.request import FinishReason, Request

__all__ = ["MultiSchedulerConnector"]

logger = logging.getLogger(__name__)

_AT_ONCE = 0.0
"""A time that has come on every clock."""

_NO_EVENTS = ConnectorEvents()


class MultiSchedulerConnector(SchedulerConnector):
    """One connector towards the scheduler, several behind it.

    Args:
        halves: by name, in order of preference.
    """

    def __init__(self, halves: Mapping[str, SchedulerConnector]) -> None:
        super().__init__()
        self._halves = dict(halves)
        # By identity: an id may be used again, and `get_num_new_matched_tokens` knows no uid.
        self._requests: dict[Request, SharedRequest] = {}
        self._loads = JointLoads()
        self._hand_overs = JointHandOvers()
        # Loads that a connector raised for when it was to begin them.
        self._unbegun: list[LoadFailure] = []
        self._num_dropped_events = 0

    def half(self, name: str) -> SchedulerConnector:
        """A connector's own half, for what only it has, such as NIXL's ``expect_push``.

        Raises:
            ConfigError: there is no connector of that name.
        """
        if name not in self._halves:
            known = ", ".join(map(repr, self._halves))
            raise ConfigError(f"there is no connector {name!r:.100} here, but {known}")
        return self._halves[name]

    # Setting up.

    def start(self, *, clock: Clock, notify: Callable[[], None]) -> None:
        """Start all of them. If one cannot start, those that could are closed again."""
        try:
            for half in self._halves.values():
                half.start(clock=clock, notify=notify)
        except BaseException:
            self.close()
            raise

    def bind_kv_manager(self, manager: KVCacheManager) -> None:
        for half in self._halves.values():
            half.bind_kv_manager(manager)

    def reset_cache(self) -> None:
        """Let all forget; an error of one is raised after that, since it may bring old KV."""
        errors: list[Exception] = []
        for half in self._halves.values():
            try:
                half.reset_cache()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def set_xfer_handshake_metadata(self, metadata: list[Any]) -> None:
        for name, half in self._halves.items():
            half.set_xfer_handshake_metadata(
                [None if rank is None else rank[name] for rank in metadata]
            )

    def recognizes(self, params: Mapping[str, Any]) -> bool:
        return is_joined(params) or any(
            ask(name, half.recognizes, params, otherwise=False, check=bool)
            for name, half in self._halves.items()
        )

    # Requests.

    def request_added(self, request: Request, uid: int) -> None:
        shared = SharedRequest()
        try:
            self._show(Offers.of(request, self._halves), uid, shared)
        except InvalidTransferParams:
            self._withdraw(shared, uid)
            raise
        self._requests[request] = shared

    def request_refused(self, request: Request) -> None:
        offers = Offers.of(request, self._halves)
        for name, half in self._halves.items():
            view = offers.made.get(name, offers.plain)
            if view.kv_transfer_params is not None:
                try:
                    half.request_refused(view)
                except InvalidTransferParams as error:
                    logger.debug("connector %r cannot read a refused ticket: %s", name, error)
                except Exception:
                    logger.exception("connector %r raised in request_refused()", name)

    def request_finished(
        self, request: Request, uid: int, blocks: FinishedBlocks
    ) -> HandOver | None:
        """Let every connector keep the blocks; they go when all have let go of them."""
        shared = self._requests.pop(request)
        self._loads.request_ended(uid)
        wishes = {}
        for name, view in shared.views.items():
            half, check = self._halves[name], partial(self._hand_overs.check, name)
            wish = ask(name, half.request_finished, view, uid, blocks, otherwise=None, check=check)
            if wish is not None:
                wishes[name] = wish
        return self._hand_overs.join(wishes, is_clear=self._is_clear)

    # Loads.

    def get_num_new_matched_tokens(
        self, request: Request, num_local_tokens: int
    ) -> ExternalMatch | None:
        """What the first connector says that has anything, or does not know yet."""
        shared = self._requests[request]
        shared.match = None
        for name in shared.sources:
            try:
                match = self._halves[name].get_num_new_matched_tokens(
                    shared.views[name], num_local_tokens
                )
                check_answer(match, ExternalMatch, may_be_none=True)
            except Exception:
                self._pass_over(shared, name, request, "get_num_new_matched_tokens")
                continue
            if match is None:
                return None
            if match.num_tokens > 0:
                shared.match = name, match
                return match
        return ExternalMatch(num_tokens=0)

    def update_state_after_alloc(self, request: Request, load: KVLoad) -> None:
        """Let the connector begin that had something. If it raises, the load has failed."""
        shared = self._requests[request]
        if shared.match is None:
            raise TransferError(f"nobody has KV for the load {load.transfer}")
        name, match = shared.match
        view = shared.views[name]
        own = attrs.evolve(load, request=view)
        try:
            self._halves[name].update_state_after_alloc(view, own)
        except Exception as error:
            if not match.is_async:
                raise
            self._pass_over(shared, name, request, "update_state_after_alloc")
            self._unbegun.append(
                LoadFailure(
                    transfer=load.transfer,
                    num_valid_tokens=load.num_local_tokens,
                    cause=f"connector {name!r} raised {error!r}",
                )
            )
            return
        self._loads.begin(OwnedLoad(owner=name, load=own, shared=shared, is_async=match.is_async))

    def undo_alloc(self, request: Request, load: KVLoad) -> None:
        owned = self._loads.undo(load.transfer)
        if owned is None:
            self._unbegun = [each for each in self._unbegun if each.transfer != load.transfer]
            return
        half, view = self._halves[owned.owner], owned.load.request
        try:
            half.undo_alloc(view, owned.load)
        except Exception:
            self._pass_over(owned.shared, owned.owner, view, "undo_alloc")
            ask(owned.owner, half.cancel, load.transfer, otherwise=None)

    def cancel(self, transfer: TransferKey) -> None:
        owner = self._loads.owner_of(transfer)
        if owner is not None:
            self._halves[owner].cancel(transfer)

    def cut_off(self, transfer: TransferKey) -> None:
        owner = self._loads.owner_of(transfer)
        if owner is not None:
            self._halves[owner].cut_off(transfer)

    # Steps.

    def build_connector_meta(self, output: SchedulerOutput) -> MultiMeta | None:
        unsent = self._loads.take_unsent()
        synchronous = frozenset(load.owner for load in unsent.values() if not load.is_async)
        parts, lost = {}, {}
        for name, half in self._halves.items():
            try:
                part = half.build_connector_meta(output)
            except Exception as error:
                logger.exception(
                    "connector %r raised in build_connector_meta(); its loads time out", name
                )
                part = None
                if name in synchronous:
                    lost[name] = repr(error)
            if part is not None:
                parts[name] = part
        if not parts and not lost:
            return None
        loads = {transfer: load.owner for transfer, load in unsent.items()}
        return MultiMeta(parts=parts, loads=loads, synchronous=synchronous, lost=lost)

    def rebuild_connector_meta(self, meta: MultiMeta | None) -> None:
        if meta is None:
            return
        self._loads.retake(meta.loads)
        for name, part in meta.parts.items():
            ask(name, self._halves[name].rebuild_connector_meta, part, otherwise=None)

    def step_failed(self, meta: MultiMeta) -> None:
        for name, part in meta.parts.items():
            ask(name, self._halves[name].step_failed, part, otherwise=None)

    def update_connector_output(self, report: TransferReport) -> None:
        """Give each connector what its own workers said."""
        owner_of = self._loads.owner_of
        ended = (*report.finished_recving, *(failure.transfer for failure in report.failed))
        self._num_dropped_events += sum(owner_of(transfer) is None for transfer in ended)
        for name, half in self._halves.items():
            part = part_of(report, name, owner_of=owner_of)
            ask(name, half.update_connector_output, part, otherwise=None)

    def take_events(self) -> ConnectorEvents:
        """What happened, each end of a load and of a hand-over once."""
        sent: list[str] = []
        finished: list[TransferKey] = []
        failed, self._unbegun = self._unbegun, []
        for name, half in self._halves.items():
            events = ask(name, half.take_events, otherwise=_NO_EVENTS, check=are_events)
            sent += self._take_sent(name, events)
            # First: a load that is told to be complete as well is not.
            for failure in events.failed:
                if self._take_end(name, failure.transfer, has_failed=True):
                    failed.append(failure)
            for transfer in events.finished_recving:
                if self._take_end(name, transfer):
                    finished.append(transfer)
        return ConnectorEvents(
            finished_sending=tuple(sent), finished_recving=tuple(finished), failed=tuple(failed)
        )

    def next_wakeup(self) -> float | None:
        if self._unbegun:
            return _AT_ONCE
        times = [
            ask(name, half.next_wakeup, otherwise=None, check=check_time)
            for name, half in self._halves.items()
        ]
        return min((time for time in times if time is not None), default=None)

    def has_pending(self) -> bool:
        return bool(self._unbegun) or any(
            ask(name, half.has_pending, otherwise=False, check=bool)
            for name, half in self._halves.items()
        )

    # What it says of itself.

    def explain(self, request: Request) -> str | None:
        shared = self._requests.get(request)
        if shared is None:
            return None
        load = self._loads.of(shared)
        for name in shared.sources if load is None else (load.owner,):
            half, view = self._halves[name], shared.views[name]
            words = ask(name, half.explain, view, otherwise=None, check=are_words)
            if words is not None:
                return f"{words}, by connector {name!r}"
        return None if load is None else f"its KV from connector {load.owner!r}"

    def stats(self) -> MultiStats:
        each = {
            name: ask(name, half.stats, otherwise=ConnectorStats(), check=are_stats)
            for name, half in self._halves.items()
        }
        return MultiStats.of(each, num_dropped_events=self._num_dropped_events)

    def close(self) -> None:
        for name, half in self._halves.items():
            ask(name, half.close, otherwise=None)

    def _show(self, offers: Offers, uid: int, shared: SharedRequest) -> None:
        """Tell all connectors of a request; those with an offer see their parameters."""
        refusals: list[InvalidTransferParams] = []
        is_taken = False
        for name in self._halves:
            if name in offers.made and not (offers.is_choice and is_taken):
                try:
                    self._add(name, offers.made[name], uid, shared)
                    is_taken |= name in shared.views
                    continue
                except InvalidTransferParams as error:
                    if not offers.is_choice:
                        raise
                    refusals.append(error)
            self._add(name, offers.plain, uid, shared)
        if refusals and not is_taken:
            raise InvalidTransferParams("; ".join(map(str, refusals)))

    def _add(self, name: str, view: Request, uid: int, shared: SharedRequest) -> None:
        """Tell one connector of a request. If that raises it has no part in it."""
        try:
            self._halves[name].request_added(view, uid)
        except InvalidTransferParams as error:
            raise InvalidTransferParams(f"connector {name!r}: {error}") from error
        except Exception:
            logger.exception("connector %r raised in request_added(%s)", name, view.request_id)
        else:
            shared.views[name] = view

    def _is_clear(self, name: str, params: Mapping[str, Any]) -> bool:
        """Whether no other connector takes these parameters for its own."""
        return not any(
            ask(other, half.recognizes, params, otherwise=False, check=bool)
            for other, half in self._halves.items()
            if other != name
        )

    def _withdraw(self, shared: SharedRequest, uid: int) -> None:
        """A request that some connectors know of was refused by another."""
        nothing = FinishedBlocks(
            block_ids=np.zeros(0, np.int32),
            generations=np.zeros(0, np.int64),
            num_tokens=0,
            finish_reason=FinishReason.ERROR,
        )
        for name, view in shared.views.items():
            half = self._halves[name]
            ask(name, half.request_finished, view, uid, nothing, otherwise=None)

    def _pass_over(self, shared: SharedRequest, name: str, request: Request, hook: str) -> None:
        logger.exception(
            "connector %r raised in %s(); it is passed over for request %s",
            name,
            hook,
            request.request_id,
        )
        shared.passed_over.add(name)

    def _take_sent(self, name: str, events: ConnectorEvents) -> list[str]:
        """The hand-overs that nobody needs any more, now that this connector does not."""
        sent: list[str] = []
        for transfer_id in events.finished_sending:
            if not self._hand_overs.is_known(name, transfer_id):
                self._num_dropped_events += 1
                continue
            joint = self._hand_overs.sent(name, transfer_id)
            if joint is not None:
                sent.append(joint)
        return sent

    def _take_end(self, name: str, transfer: TransferKey, *, has_failed: bool = False) -> bool:
        """A connector says that a load ended; return whether the scheduler waits to hear it."""
        load = self._loads.end(name, transfer)
        if load is None:
            self._num_dropped_events += 1
            return False
        if has_failed:
            load.shared.failed.add(name)
        return load.is_async
