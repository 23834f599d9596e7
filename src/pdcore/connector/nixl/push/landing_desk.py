"""A decode engine's side of pushes: what peers send before it is asked for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Mapping
from functools import partial
from typing import Any

from pdcore.clock import Clock
from pdcore.connector.nixl.addresses import AllowedPeers
from pdcore.connector.nixl.config import NixlConfig
from pdcore.connector.nixl.control import ControlThread
from pdcore.connector.nixl.doorbell import ring
from pdcore.connector.nixl.engine_name import EngineName
from pdcore.connector.nixl.meta import Doorbell, RankEndpoint
from pdcore.connector.nixl.params import TransferParams
from pdcore.connector.nixl.protocol import (
    Answer,
    Claim,
    Description,
    Message,
    ProtocolError,
    PushEnded,
    Pushing,
)
from pdcore.connector.nixl.push.landing import Suspect
from pdcore.connector.nixl.push.landings import LandingRegistry
from pdcore.connector.nixl.push.lookout import Lookout
from pdcore.connector.nixl.push.params import PushParams
from pdcore.connector.stats import LandingCounts
from pdcore.connector.ticket_contents import prompt_digest
from pdcore.errors import ConfigError, TransferError
from pdcore.request import Request

__all__ = ["LOOK_EVERY_S", "LandingDesk"]

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
_RING_S = 1.0


class LandingDesk:
    """Issues push parameters, answers those who use them, and gives out what they brought.

    `answer`, `wait` and `watch` are for the control thread, the rest is for the scheduler's.

    Args:
        name: this engine.
        config: its settings.
        clock: whose seconds leases are counted in.
        address: host and port that peers are told.
        control: where it asks whether writers live.
    """

    def __init__(
        self,
        *,
        name: EngineName,
        config: NixlConfig,
        clock: Clock,
        address: tuple[str, int],
        control: ControlThread,
    ) -> None:
        self._name = name
        self._config = config
        self._clock = clock
        self._address = address
        self._lookout = Lookout(config, control)
        self._endpoints: tuple[RankEndpoint, ...] = ()
        self._doorbells: tuple[Doorbell, ...] = ()
        self._registry: LandingRegistry | None = None
        self._ended: dict[str, asyncio.Event] = {}

    def serve(self, endpoints: tuple[RankEndpoint, ...], doorbells: tuple[Doorbell, ...]) -> None:
        """Take the ranks' staging memory. Without any, no push is expected."""
        self._endpoints, self._doorbells = endpoints, doorbells
        if endpoints:
            self._registry = LandingRegistry(
                self._clock,
                num_slots=min(endpoint.region.num_blocks for endpoint in endpoints),
                linger_s=self._config.request_timeout_s,
                overdue_s=_overdue_s(self._config),
            )

    # What the engine asks.

    def expect(self, request: Request) -> dict[str, Any] | None:
        """Leave for a prefill engine to push this prompt; None when there is no room for it.

        Raises:
            ConfigError: this engine has no staging memory.
        """
        if self._registry is None:
            raise ConfigError(
                "this engine takes no pushes: pass NixlConfig(push_staging_bytes=...), and let "
                "its workers register their KV memory first"
            )
        push_id, digest = uuid.uuid4().hex, prompt_digest(request)
        slots = self._registry.expect(
            push_id,
            prompt_digest=digest,
            # The last token is always computed here.
            max_num_slots=-(-(request.num_prompt_tokens - 1) // self._config.block_size),
            lease_s=self._config.lease_s,
        )
        if not slots:
            return None
        host, port = self._address
        params = PushParams(
            engine_id=self._name.engine_id,
            epoch=self._name.epoch,
            push_id=push_id,
            host=host,
            port=port,
            slots=slots,
            block_size=self._config.block_size,
            lease_s=self._config.lease_s,
            prompt_digest=digest,
        )
        return params.to_dict(key=self._config.key)

    def call_off(self, push_to: Mapping[str, Any]) -> None:
        """Nobody wants a push that was expected. Its writer hears of it with its next message.

        Raises:
            InvalidTransferParams: ``push_to`` is not what `expect` returned.
        """
        params = PushParams.from_dict(
            push_to,
            key=self._config.key,
            allowed_peers=AllowedPeers([self._address[0]]),
            max_num_bytes=self._config.max_params_bytes,
        )
        if self._registry is not None:
            self._registry.call_off(params.push_id, prompt_digest=params.prompt_digest)

    def want(self, params: TransferParams) -> bool:
        """A request has come with a ticket: keep what was pushed for it until `drop`. Returns
        whether it is still being written."""
        if self._registry is not None and params.push_id:
            self._registry.want(
                params.push_id, writer=params.peer_id, prompt_digest=params.prompt_digest
            )
        return self.is_landing(params)

    def is_landing(self, params: TransferParams) -> bool:
        """Whether a ticket's engine still writes what it pushes."""
        return self._registry is not None and self._registry.is_landing(
            params.push_id, writer=params.peer_id
        )

    def take(self, params: TransferParams) -> tuple[int, ...]:
        """The slots that hold a ticket's first blocks; they stay so until `drop`."""
        if self._registry is None or not params.push_id:
            return ()
        return self._registry.take(
            params.push_id,
            writer=params.peer_id,
            ticket_id=params.transfer_id,
            prompt_digest=params.prompt_digest,
        )

    def drop(self, params: TransferParams) -> None:
        """What was pushed for a ticket is not needed, or not any more."""
        if self._registry is not None and params.push_id:
            self._registry.drop(params.push_id, prompt_digest=params.prompt_digest)

    def refuse(self, params: TransferParams) -> None:
        """Nobody comes with a ticket for what was pushed; who reads it goes on."""
        if self._registry is not None and params.push_id:
            self._registry.call_off(params.push_id, prompt_digest=params.prompt_digest)

    def counts(self) -> LandingCounts:
        """What became of the pushes so far."""
        return LandingCounts() if self._registry is None else self._registry.counts()

    def check(self) -> None:
        """Audit the slots."""
        if self._registry is not None:
            self._registry.check()

    # What peers say, and what is found out about them.

    async def answer(self, message: Claim | Pushing | PushEnded, sender: str) -> Message:
        """Answer a writer. A claim waits until it is known whether its writer can be seen to live.

        Raises:
            ProtocolError: this engine expects no pushes.
            TransferError: the claim is refused.
        """
        registry = self._registry
        if registry is None:
            raise ProtocolError("this engine takes no pushes")
        match message:
            case Claim():
                return await self._claim(registry, message, sender)
            case Pushing():
                self._ring()
                return Answer.of(registry.hear(message.push_id, writer=sender))
            case PushEnded():
                answer = registry.end(
                    message.push_id,
                    writer=sender,
                    ticket_id=message.ticket_id,
                    num_blocks=message.num_blocks,
                    was_cut=message.was_cut,
                )
                self._tell(message.push_id)
                return Answer.of(answer)

    async def wait(self, params: TransferParams) -> None:
        """Wait until what a ticket's engine pushes is all there, or given up.

        That ends at the latest when the writer was not heard of for a lease.
        """
        event = self._ended.setdefault(params.push_id, asyncio.Event())
        try:
            while self.is_landing(params):
                # It is also set when the end of a push is refused, so that this one goes on.
                event.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(event.wait(), LOOK_EVERY_S)
        finally:
            self._ended.pop(params.push_id, None)

    def watch(self) -> None:
        """Keep the workers awake while peers write, and look after peers that are silent. Call it
        every `LOOK_EVERY_S`."""
        registry = self._registry
        if registry is not None and registry.has_writers:
            self._ring()
            self._lookout.look_after(registry.suspects(), partial(self._died, registry))
            _warn_of_overdue(registry)

    async def _claim(self, registry: LandingRegistry, message: Claim, sender: str) -> Description:
        num_ranks = len(self._endpoints)
        if len(message.life_ports) != num_ranks:
            # Each port is looked at, again and again.
            registry.count_refusal()
            raise TransferError(
                f"its claim names {len(message.life_ports)} ranks and this engine has {num_ranks}: "
                "KV can be pushed between equal shapes only. It will be read instead"
            )
        # First of all, while it cannot have written anything: of a process that dies later it must
        # be known that it lived where nobody answers any more.
        writer = Suspect(writer=sender, life_host=message.life_host, life_ports=message.life_ports)
        is_seen = registry.is_expected(message.push_id) and await self._lookout.can_see(writer)
        answer = registry.claim(
            message.push_id,
            slots=message.slots,
            prompt_digest=message.prompt_digest,
            writer=sender,
            life_host=message.life_host,
            life_ports=message.life_ports,
            was_seen_alive=is_seen,
        )
        if not answer:
            raise TransferError(answer.reason)
        self._ring()
        return Description(block_size=self._config.block_size, ranks=self._endpoints)

    def _died(self, registry: LandingRegistry, writer: Suspect) -> None:
        for push_id in registry.writer_died(writer):
            logger.warning("engine %s, which pushed %s, is dead", writer.writer, push_id)
            self._tell(push_id)

    def _tell(self, push_id: str) -> None:
        event = self._ended.get(push_id)
        if event is not None:
            event.set()

    def _ring(self) -> None:
        for doorbell in self._doorbells:
            ring(doorbell, _RING_S)


def _overdue_s(config: NixlConfig) -> float:
    """A writer that lives hears within a third of a lease that it should stop, ends its write or
    has it ended, and says so."""
    return config.lease_s + config.stall_timeout_s + 2 * config.request_timeout_s


def _warn_of_overdue(registry: LandingRegistry) -> None:
    for landing in registry.take_overdue():
        logger.warning(
            "%d staging slots are kept for engine %s at %s, which still may write to them: it has "
            "not said that it stopped, and is not known to be dead. If it hangs, end its process; "
            "if its machine is gone, restart this engine when there are too few slots",
            len(landing.slots),
            landing.writer,
            landing.life_host,
        )
