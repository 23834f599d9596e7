"""The scheduler's half of a loopback connector: tickets, leases, and which loads to start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from pdcore.checks import check_block_size
from pdcore.clock import Clock
from pdcore.connector.base import (
    ConnectorEvents,
    ExternalMatch,
    FinishedBlocks,
    HandOver,
    KVLoad,
    SchedulerConnector,
)
from pdcore.connector.load_tally import LoadTally
from pdcore.connector.loopback.fabric import LoopbackEngine, LoopbackFabric
from pdcore.connector.loopback.meta import LoopbackLoad, LoopbackMeta
from pdcore.connector.loopback.ticket import LoopbackTicket
from pdcore.connector.stats import ConnectorStats
from pdcore.connector.ticket_contents import prompt_digest
from pdcore.connector.tickets import asks_for_hand_over
from pdcore.errors import InvalidTransferParams
from pdcore.kvcache.manager import KVCacheManager
from pdcore.messages import LoadFailure, SchedulerOutput, TransferKey, TransferReport
from pdcore.request import FinishReason, Request

__all__ = ["LoopbackSchedulerConnector"]


@attrs.define(eq=False, kw_only=True)
class _Remote:
    """A request whose prompt a peer has computed."""

    uid: int
    request: Request
    ticket: LoopbackTicket
    renew_at: float
    is_open: bool = True
    """Whether the ticket can still be loaded from, as far as this side knows."""


@attrs.define(eq=False, kw_only=True)
class _Load:
    """A load that the scheduler waits for, or that has its blocks in quarantine."""

    remote: _Remote
    load: KVLoad
    is_sent: bool = False
    is_cancelled: bool = False


class LoopbackSchedulerConnector(SchedulerConnector):
    """Hands over and loads. Made by `LoopbackConnector.scheduler_side`."""

    def __init__(
        self, fabric: LoopbackFabric, engine: LoopbackEngine, *, block_size: int, lease_s: float
    ) -> None:
        super().__init__()
        self._fabric = fabric
        self._engine = engine
        self._block_size = block_size
        self._lease_s = lease_s
        self._num_granted = 0
        self._remotes: dict[int, _Remote] = {}
        # By identity: an id may be used again, and `get_num_new_matched_tokens` knows no uid.
        self._by_request: dict[Request, _Remote] = {}
        self._loads: dict[TransferKey, _Load] = {}
        self._orders_cancelled: list[TransferKey] = []
        self._orders_cut_off: list[TransferKey] = []
        self._tally = LoadTally()

    def start(self, *, clock: Clock, notify: Callable[[], None]) -> None:
        self._engine.notify = notify

    def bind_kv_manager(self, manager: KVCacheManager) -> None:
        check_block_size("LoopbackConnector has block_size", self._block_size, manager.block_size)
        self._engine.block_count.of_pool(manager.pool.num_blocks)

    def recognizes(self, params: Mapping[str, Any]) -> bool:
        return LoopbackTicket.is_in(params)

    def request_added(self, request: Request, uid: int) -> None:
        ticket = LoopbackTicket.from_params(request.kv_transfer_params)
        if ticket is None:
            return
        if not self._fabric.knows(ticket.engine_id):
            raise InvalidTransferParams(
                f"engine {ticket.engine_id!r} never joined this fabric: make its connector on the "
                "same LoopbackFabric"
            )
        if ticket.block_size != self._block_size:
            raise InvalidTransferParams(
                f"engine {ticket.engine_id!r} has blocks of {ticket.block_size} tokens, this one "
                f"of {self._block_size}: use one block size"
            )
        if ticket.prompt_digest != prompt_digest(request):
            raise InvalidTransferParams(
                "kv_transfer_params belong to another prompt: give the decode engine exactly the "
                "token ids that the prefill engine had"
            )
        remote = _Remote(uid=uid, request=request, ticket=ticket, renew_at=0.0)
        self._renew(remote)
        self._remotes[uid] = self._by_request[request] = remote

    def request_refused(self, request: Request) -> None:
        ticket = LoopbackTicket.from_params(request.kv_transfer_params)
        if ticket is None:
            return
        others = [remote.ticket for remote in self._remotes.values()]
        if not any(_is_same_hand_over(ticket, other) for other in others):
            self._fabric.release(ticket)

    def get_num_new_matched_tokens(self, request: Request, num_local_tokens: int) -> ExternalMatch:
        remote = self._by_request.get(request)
        if remote is None or not remote.is_open:
            return ExternalMatch(num_tokens=0)
        # The last prompt token is always computed here, so that there is something to sample from.
        num_useful = min(remote.ticket.num_tokens, request.num_prompt_tokens - 1)
        return ExternalMatch(num_tokens=max(0, num_useful - num_local_tokens), is_async=True)

    def update_state_after_alloc(self, request: Request, load: KVLoad) -> None:
        remote = self._remotes[load.transfer.uid]
        self._loads[load.transfer] = _Load(remote=remote, load=load)
        self._tally.started()

    def undo_alloc(self, request: Request, load: KVLoad) -> None:
        if self._loads.pop(load.transfer, None) is not None:
            self._tally.undone()

    def build_connector_meta(self, output: SchedulerOutput) -> LoopbackMeta | None:
        self._release_unneeded(output)
        unsent = [load for load in self._loads.values() if not load.is_sent]
        for load in unsent:
            load.is_sent = True
        cancelled, self._orders_cancelled = self._orders_cancelled, []
        cut_off, self._orders_cut_off = self._orders_cut_off, []
        if not self._loads:
            return None
        # While a load is in flight even an empty order goes out: the worker moves when it is asked.
        return LoopbackMeta(
            loads=tuple(LoopbackLoad(ticket=u.remote.ticket, load=u.load) for u in unsent),
            cancelled=tuple(cancelled),
            cut_off=tuple(cut_off),
        )

    def rebuild_connector_meta(self, meta: LoopbackMeta) -> None:
        for order in meta.loads:
            # A load that was undone as well is not there any more.
            if order.load.transfer in self._loads:
                self._loads[order.load.transfer].is_sent = False
        self._orders_cancelled[:0] = meta.cancelled
        self._orders_cut_off[:0] = meta.cut_off

    def step_failed(self, meta: LoopbackMeta) -> None:
        self._orders_cancelled[:0] = [key for key in meta.cancelled if key in self._loads]
        self._orders_cut_off[:0] = [key for key in meta.cut_off if key in self._loads]

    def request_finished(
        self, request: Request, uid: int, blocks: FinishedBlocks
    ) -> HandOver | None:
        remote = self._remotes.pop(uid, None)
        if remote is not None:
            del self._by_request[request]
            self._release(remote)
        is_complete = blocks.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if not (
            is_complete and blocks.num_tokens and asks_for_hand_over(request.kv_transfer_params)
        ):
            return None
        return self._grant(request, blocks)

    def cancel(self, transfer: TransferKey) -> None:
        load = self._loads.get(transfer)
        if load is None or load.is_cancelled:
            return
        load.is_cancelled = True
        if load.is_sent:
            self._orders_cancelled.append(transfer)
        else:
            self.update_connector_output(TransferReport(failed=(_cancelled(load),)))

    def cut_off(self, transfer: TransferKey) -> None:
        if transfer in self._loads:
            self._orders_cut_off.append(transfer)

    def update_connector_output(self, report: TransferReport) -> None:
        """Take the worker's report: what came whole must be vouched for by the peer."""
        finished: list[TransferKey] = []
        failed: list[LoadFailure] = []
        for transfer in report.finished_recving:
            load = self._take_reported(transfer)
            refusal = None if load is None else self._vouch(load)
            if refusal is None:
                finished.append(transfer)
            else:
                failed.append(refusal)
        for failure in report.failed:
            load = self._take_reported(failure.transfer)
            failed.append(failure if load is None else self._checked(load, failure))
        super().update_connector_output(
            TransferReport(finished_recving=tuple(finished), failed=tuple(failed))
        )

    def take_events(self) -> ConnectorEvents:
        now = self._fabric.clock.now()
        for remote in self._remotes.values():
            if remote.is_open and now >= remote.renew_at:
                self._renew(remote)
        released = self._engine.registry.take_released()
        return attrs.evolve(super().take_events(), finished_sending=released)

    def next_wakeup(self) -> float | None:
        if self._reports or self._has_orders:
            return self._fabric.clock.now()
        times = [remote.renew_at for remote in self._remotes.values() if remote.is_open]
        for time in (
            self._engine.registry.next_release(),
            self._fabric.next_due(self._engine, self._loads),
        ):
            if time is not None:
                times.append(time)
        return min(times, default=None)

    def has_pending(self) -> bool:
        return bool(self._loads or self._reports or self._engine.registry.has_pending)

    def explain(self, request: Request) -> str | None:
        remote = self._by_request.get(request)
        if remote is None:
            return None
        return f"its KV from engine {remote.ticket.engine_id!r} ({remote.ticket.transfer_id})"

    def stats(self) -> ConnectorStats:
        return ConnectorStats(tickets=self._engine.registry.counts(), loads=self._tally.counts())

    def close(self) -> None:
        self._engine.is_alive = False
        self._engine.notify = lambda: None

    # The prefill side.

    def _grant(self, request: Request, blocks: FinishedBlocks) -> HandOver:
        num_tokens = min(blocks.num_tokens, request.num_prompt_tokens)
        num_blocks = -(-num_tokens // self._block_size)
        self._num_granted += 1
        ticket = LoopbackTicket(
            engine_id=self._engine.engine_id,
            engine_epoch=self._engine.epoch,
            transfer_id=f"{self._engine.engine_id}-{self._engine.epoch}-{self._num_granted}",
            block_ids=tuple(blocks.block_ids[:num_blocks].tolist()),
            generations=tuple(blocks.generations[:num_blocks].tolist()),
            num_tokens=num_tokens,
            block_size=self._block_size,
            prompt_digest=prompt_digest(request),
            lease_s=self._lease_s,
        )
        self._engine.registry.grant(ticket.transfer_id, ticket.contents, lease_s=ticket.lease_s)
        return HandOver(transfer_id=ticket.transfer_id, kv_transfer_params=ticket.to_params())

    # The decode side.

    def _renew(self, remote: _Remote) -> None:
        answer = self._fabric.renew(remote.ticket)
        if remote.is_open and not answer:
            self._tally.expired()
        remote.is_open = bool(answer)
        # Twice a lease, so that one late step does not lose it.
        remote.renew_at = self._fabric.clock.now() + answer.remaining_s / 2

    @property
    def _has_orders(self) -> bool:
        """Whether the next plan has something for the worker, or drops what it would have had."""
        is_unsent = any(not load.is_sent for load in self._loads.values())
        return is_unsent or bool(self._orders_cancelled or self._orders_cut_off)

    def _release(self, remote: _Remote) -> None:
        """Tell the peer, once, that nothing (more) will be read."""
        if remote.is_open:
            remote.is_open = False
            self._fabric.release(remote.ticket)

    def _release_unneeded(self, output: SchedulerOutput) -> None:
        """A request that runs has all it wants: found here, brought, or given up."""
        for new in output.scheduled_new_reqs:
            remote = self._remotes.get(new.uid)
            if remote is not None:
                self._release(remote)

    def _take_reported(self, transfer: TransferKey) -> _Load | None:
        """The load that a report is about, unless nobody waits for it."""
        load = self._loads.pop(transfer, None)
        self._tally.reported(transfer, is_awaited=load is not None)
        return load

    def _vouch(self, load: _Load) -> LoadFailure | None:
        """Ask the peer whether the data is what its ticket promised; None is a yes."""
        key = load.load.transfer
        if load.is_cancelled:
            self._tally.ended(key, is_good=True, is_cancelled=True)
            return _cancelled(load)
        consumer = f"{self._engine.engine_id}-{self._engine.epoch}-{key.uid}-{key.attempt}"
        answer = self._fabric.accept(load.remote.ticket, consumer=consumer)
        load.remote.is_open = False
        self._tally.ended(key, is_good=bool(answer), is_rejected=not answer)
        if answer:
            return None
        return LoadFailure(
            transfer=key,
            num_valid_tokens=load.load.num_local_tokens,
            cause=f"engine {load.remote.ticket.engine_id!r} does not vouch for it: {answer.reason}",
        )

    def _checked(self, load: _Load, failure: LoadFailure) -> LoadFailure:
        """Trust what a failed load did bring only while the peer still holds the blocks."""
        self._tally.ended(failure.transfer, is_good=False, is_cancelled=load.is_cancelled)
        if load.remote.is_open:
            self._renew(load.remote)
        if load.remote.is_open:
            return failure
        return attrs.evolve(failure, num_valid_tokens=load.load.num_local_tokens)


def _cancelled(load: _Load) -> LoadFailure:
    return LoadFailure(
        transfer=load.load.transfer,
        num_valid_tokens=load.load.num_local_tokens,
        cause="the load was cancelled",
    )


def _is_same_hand_over(one: LoopbackTicket, other: LoopbackTicket) -> bool:
    return (one.engine_id, one.engine_epoch, one.transfer_id) == (
        other.engine_id,
        other.engine_epoch,
        other.transfer_id,
    )
