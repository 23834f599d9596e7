"""The NIXL connector's half beside the scheduler: tickets, leases and acceptance."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import attrs

from pdcore.checks import check_all_ranks, check_block_size
from pdcore.clock import Clock
from pdcore.connector.base import (
    ConnectorEvents,
    ExternalMatch,
    FinishedBlocks,
    HandOver,
    KVLoad,
    SchedulerConnector,
)
from pdcore.connector.block_count import BlockCount
from pdcore.connector.nixl.config import NixlConfig
from pdcore.connector.nixl.control import ControlThread
from pdcore.connector.nixl.engine_name import EngineName
from pdcore.connector.nixl.handing_over import HandOverDesk
from pdcore.connector.nixl.links import PeerLinks
from pdcore.connector.nixl.meta import NixlMeta
from pdcore.connector.nixl.notices import NoticeKind, NoticeListener
from pdcore.connector.nixl.params import TransferParams
from pdcore.connector.nixl.protocol import Claim, Message, PushEnded, Pushing
from pdcore.connector.nixl.pulling import PullDesk
from pdcore.connector.nixl.push.desk import PushDesk
from pdcore.connector.nixl.push.landing_desk import LOOK_EVERY_S, LandingDesk
from pdcore.connector.nixl.server import SideChannelServer, bind
from pdcore.connector.nixl.tickets_in_hand import TicketsInHand
from pdcore.connector.nixl.worker_side import WorkerHandshake
from pdcore.connector.stats import ConnectorStats
from pdcore.connector.tickets import asks_for_hand_over
from pdcore.errors import ConfigError
from pdcore.kvcache.manager import KVCacheManager
from pdcore.messages import SchedulerOutput, TransferKey, TransferReport
from pdcore.request import Request

__all__ = ["NixlSchedulerConnector"]

logger = logging.getLogger(__name__)

_RING_EVERY_S = 0.5
_FAREWELL_S = 1.0


@attrs.frozen(kw_only=True, eq=False)
class _Parts:
    """What exists only between `start` and `close`."""

    clock: Clock
    server: SideChannelServer
    links: PeerLinks
    hand_overs: HandOverDesk
    tickets: TicketsInHand
    pulls: PullDesk
    pushes: PushDesk
    landings: LandingDesk
    notices: NoticeListener


class NixlSchedulerConnector(SchedulerConnector):
    """Hands over prompts that this engine computed, and takes those that others did.

    One engine can do both. `start` opens the side channel and starts one thread; nothing here
    blocks the scheduler's.

    Args:
        config: the connector's settings, with an engine id.
    """

    def __init__(self, config: NixlConfig) -> None:
        super().__init__()
        self._config = config
        self._name = EngineName(engine_id=config.engine_id, epoch=secrets.token_hex(8))
        self._control = ControlThread("pdcore-nixl-control")
        self._started: _Parts | None = None
        self._address = (config.host, config.port)
        self._block_count = BlockCount()
        self._polled_at = 0.0
        self._is_closed = False

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the side channel; the port is known once `start` returned."""
        return self._address

    def start(self, *, clock: Clock, notify: Callable[[], None]) -> None:
        """Listen for peers and start the control thread. If it raises, it may be called again.

        Raises:
            AddressInUse: the side channel's address is taken or not this machine's.
            ConfigError: it was started before, or ``doorbell_host`` is not this machine's.
        """
        if self._started is not None:
            raise ConfigError("this connector was started before: make a new one")
        config, control = self._config, self._control
        with ExitStack() as undo:
            listener = undo.enter_context(bind(config.host, config.port))
            notices = undo.enter_context(closing(NoticeListener(config.doorbell_host)))
            parts = self._make_parts(listener, notices, clock=clock, notify=notify)
            undo.callback(setattr, self, "_started", None)
            self._started = parts
            undo.callback(control.close)
            control.start()
            # Nothing here waits for anybody but that thread, however late it is.
            control.run(parts.server.start())
            control.run(self._listen_to_workers(notices, notify))
            self._address = (config.host, listener.getsockname()[1])
            undo.pop_all()
        control.repeat(parts.hand_overs.keep_workers_awake, every_s=_RING_EVERY_S)
        control.repeat(parts.landings.watch, every_s=LOOK_EVERY_S)

    def _make_parts(
        self,
        listener: socket.socket,
        notices: NoticeListener,
        *,
        clock: Clock,
        notify: Callable[[], None],
    ) -> _Parts:
        config, name, control = self._config, self._name, self._control
        links = PeerLinks(name=name, config=config, control=control, clock=clock)
        address = (config.advertised_host or config.host, listener.getsockname()[1])
        hand_overs = HandOverDesk(
            name=name, config=config, clock=clock, address=address, notify=partial(_soon, notify)
        )
        landings = LandingDesk(
            name=name, config=config, clock=clock, address=address, control=control
        )
        tickets = TicketsInHand(
            config=config,
            links=links,
            landings=landings,
            control=control,
            clock=clock,
            notify=notify,
        )
        pulls = PullDesk(
            config=config, tickets=tickets, landings=landings, control=control, notify=notify
        )
        pushes = PushDesk(
            config=config,
            links=links,
            control=control,
            clock=clock,
            notify=notify,
            life_host=address[0],
        )
        server = SideChannelServer(listener, name=name, config=config, handle=self._answer)
        return _Parts(
            clock=clock,
            server=server,
            links=links,
            hand_overs=hand_overs,
            tickets=tickets,
            pulls=pulls,
            pushes=pushes,
            landings=landings,
            notices=notices,
        )

    def bind_kv_manager(self, manager: KVCacheManager) -> None:
        """Raises `ConfigError` if its pool has other blocks than `NixlConfig.block_size` says, or
        more of them than a rank."""
        check_block_size("NixlConfig.block_size", self._config.block_size, manager.block_size)
        self._block_count.of_pool(manager.pool.num_blocks)

    def set_xfer_handshake_metadata(self, metadata: list[WorkerHandshake | None]) -> None:
        """Take the ranks' KV memory. Called after `start`, before the first request.

        Raises:
            ConfigError: a rank has not registered its KV memory, or has fewer blocks than the
                scheduler's pool.
        """
        ranks = check_all_ranks(
            metadata,
            mend="their worker half has no KV memory. Pass it to the rank's model runner as "
            "connector=..., and start the executor first",
        )
        endpoints = tuple(handshake.endpoint for handshake in ranks)
        self._block_count.of_ranks(endpoint.region.num_blocks for endpoint in endpoints)
        self._parts.links.endpoints = endpoints
        self._parts.pulls.arrivals.num_ranks = len(ranks)
        self._parts.hand_overs.serve(endpoints, tuple(handshake.doorbell for handshake in ranks))
        self._parts.pushes.life_ports = tuple(handshake.life_port for handshake in ranks)
        landings = tuple(rank.landing for rank in ranks if rank.landing is not None)
        if len(landings) == len(ranks):
            doorbells = [rank.landing_doorbell for rank in ranks]
            self._parts.landings.serve(
                landings, tuple(bell for bell in doorbells if bell is not None)
            )

    def expect_push(self, request: Request) -> dict[str, Any] | None:
        """Let a prefill engine send a prompt's KV here while it computes it.

        The answer goes, as ``push_to`` beside ``do_remote_decode``, into the ``kv_transfer_params``
        of the request that the prefill engine gets. All else is as without: the ticket that comes
        out of the prefill goes to this engine with its request. What was sent by then is taken from
        staging memory; the rest is read.

        Args:
            request: the prompt, as either engine gets it; only its tokens and ``lora`` count.

        Returns:
            Plain data; or None when the staging memory is in use, which is as good as not asking.

        Raises:
            ConfigError: this engine takes no pushes, or no worker has registered its KV memory.
        """
        return self._parts.landings.expect(request)

    def call_off_push(self, push_to: Mapping[str, Any]) -> None:
        """The push that was expected is not wanted: no request with its ticket will come.

        Without this, its slots are free again when the lease ends.

        Raises:
            InvalidTransferParams: ``push_to`` is not what `expect_push` returned.
        """
        self._parts.landings.call_off(push_to)

    def recognizes(self, params: Mapping[str, Any]) -> bool:
        return TransferParams.look_like(params)

    def request_added(self, request: Request, uid: int) -> None:
        params = request.kv_transfer_params
        if asks_for_hand_over(params):
            self._parts.pushes.add(request, uid)
        elif params is not None:
            self._parts.tickets.take(request, uid)

    def request_refused(self, request: Request) -> None:
        params = request.kv_transfer_params
        if params is not None and not asks_for_hand_over(params):
            self._parts.tickets.refuse(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_local_tokens: int
    ) -> ExternalMatch | None:
        num_tokens = self._parts.pulls.num_matched_tokens(request, num_local_tokens)
        return ExternalMatch(num_tokens=num_tokens, is_async=num_tokens > 0)

    def update_state_after_alloc(self, request: Request, load: KVLoad) -> None:
        self._parts.pulls.begin(load)

    def undo_alloc(self, request: Request, load: KVLoad) -> None:
        self._parts.pulls.undo(load)

    def build_connector_meta(self, output: SchedulerOutput) -> NixlMeta | None:
        """Orders for the workers. While they read, also an empty one, so that they report."""
        pulls = self._parts.pulls
        for new in output.scheduled_new_reqs:
            pulls.note_admitted(new.uid)
        self._polled_at = self._parts.clock.now()
        orders = pulls.take_orders()
        tasks, stops = self._parts.pushes.plan(output)
        if tasks or stops:
            orders = attrs.evolve(orders or NixlMeta(), pushes=tasks, push_stops=stops)
        return None if orders is None else self._with_doorbell(orders)

    def rebuild_connector_meta(self, meta: NixlMeta) -> None:
        self._parts.pulls.retake_orders(meta)
        self._parts.pushes.retake(meta.pushes)

    def step_failed(self, meta: NixlMeta) -> None:
        self._parts.pulls.end_reads(meta)
        self._parts.pulls.repeat_cancels(meta)

    def request_finished(
        self, request: Request, uid: int, blocks: FinishedBlocks
    ) -> HandOver | None:
        self._parts.pulls.finish(uid)
        if not asks_for_hand_over(request.kv_transfer_params):
            return None
        pushes = self._parts.pushes
        hand_over: HandOver | None = None
        try:
            push_id = pushes.push_id_of(uid)
            hand_over = self._parts.hand_overs.hand_over(request, blocks, push_id=push_id)
        finally:
            ticket_id = hand_over.transfer_id if hand_over is not None else None
            held = pushes.finish(uid, blocks, ticket_id=ticket_id or "")
        return hand_over or (HandOver(transfer_id=held) if held else None)

    def cancel(self, transfer: TransferKey) -> None:
        self._parts.pulls.cancel(transfer)

    def cut_off(self, transfer: TransferKey) -> None:
        self._parts.pulls.cut_off(transfer)

    def update_connector_output(self, report: TransferReport) -> None:
        self._parts.pulls.hear_report(report)
        self._parts.pushes.hear_report(report)

    def take_events(self) -> ConnectorEvents:
        self._parts.pushes.take_facts()
        finished, failed = self._parts.pulls.take_events()
        released = self._parts.hand_overs.registry.take_released()
        return ConnectorEvents(
            finished_sending=self._parts.pushes.hold_back(released),
            finished_recving=finished,
            failed=failed,
        )

    def next_wakeup(self) -> float | None:
        """When a hold may go; while workers read, the next time to ask them."""
        times = [self._parts.hand_overs.registry.next_release()]
        pulls = self._parts.pulls
        if pulls.num_reading or pulls.has_orders or self._parts.pushes.awaits_reports:
            times.append(self._polled_at + self._config.load_poll_s)
        return min((time for time in times if time is not None), default=None)

    def has_pending(self) -> bool:
        parts = self._parts
        hands_over = parts.hand_overs.registry.has_pending or parts.pushes.has_pending
        return hands_over or parts.pulls.has_pending

    def explain(self, request: Request) -> str | None:
        return self._parts.pulls.explain(request)

    def stats(self) -> ConnectorStats:
        if self._started is None:
            return ConnectorStats()
        pulls = self._parts.pulls.tally
        return ConnectorStats(
            tickets=self._parts.hand_overs.registry.counts(),
            loads=pulls.counts(),
            transfers=pulls.transfers(),
            pushes=self._parts.pushes.counts(),
            landings=self._parts.landings.counts(),
        )

    def close(self) -> None:
        """Give back unused tickets, close every connection, join the thread. Idempotent."""
        if self._started is not None and not self._is_closed:
            self._is_closed = True
            self._say_farewell(self._started)
        self._control.close()
        if self._started is not None:
            self._started.notices.close()

    def _say_farewell(self, parts: _Parts) -> None:
        parts.tickets.give_back_all("the decode engine is closing")
        parts.pushes.close()
        try:
            self._control.run(self._wind_up(parts.server), timeout_s=3 * _FAREWELL_S)
        except TimeoutError:
            logger.warning("the NIXL side channel closed before every peer was told")
        parts.links.close()

    async def _answer(self, request: Message, sender: str) -> Message:
        """Answer a peer. On the control thread."""
        if isinstance(request, Claim | Pushing | PushEnded):
            return await self._parts.landings.answer(request, sender)
        return self._parts.hand_overs.answer(request, sender)

    def _with_doorbell(self, orders: NixlMeta) -> NixlMeta:
        return attrs.evolve(orders, doorbell=self._parts.notices.address)

    async def _listen_to_workers(self, notices: NoticeListener, notify: Callable[[], None]) -> None:
        """Pass on what workers say, as soon as they say it, and wake the engine's loop for the
        report."""
        loop = asyncio.get_running_loop()

        def heard() -> None:
            has_report = False
            for notice in notices.take():
                has_report |= notice.kind is not NoticeKind.NEEDS_PEER
                errand = self._parts.pulls.arrivals.hear(notice)
                if errand is not None:
                    self._control.begin(errand)
            if has_report:
                loop.call_soon(notify)  # After the errands: the peer's answer takes longest.

        loop.add_reader(notices.fileno(), heard)

    async def _wind_up(self, server: SideChannelServer) -> None:
        await self._control.wait_idle(timeout_s=_FAREWELL_S)
        await server.close()

    @property
    def _parts(self) -> _Parts:
        if self._started is None:
            raise ConfigError("the NIXL connector is not started: call start() first")
        return self._started


def _soon(notify: Callable[[], None]) -> None:
    """Wake the engine's loop once the peer that is being answered has its answer."""
    asyncio.get_running_loop().call_soon(notify)
