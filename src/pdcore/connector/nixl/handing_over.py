"""A prefill engine's side of the scheduler half: finished prompts in, tickets out."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable

from pdcore.clock import Clock
from pdcore.connector.base import FinishedBlocks, HandOver
from pdcore.connector.nixl.config import NixlConfig
from pdcore.connector.nixl.doorbell import ring
from pdcore.connector.nixl.engine_name import EngineName
from pdcore.connector.nixl.meta import Doorbell, RankEndpoint
from pdcore.connector.nixl.params import TransferParams
from pdcore.connector.nixl.protocol import (
    Accept,
    Answer,
    Describe,
    Description,
    Message,
    ProtocolError,
    Reading,
    Release,
    Renew,
)
from pdcore.connector.ticket_contents import prompt_digest
from pdcore.connector.tickets import TicketRegistry
from pdcore.errors import ConfigError, TransferError
from pdcore.request import FinishReason, Request

__all__ = ["HandOverDesk"]

_HANDS_OVER = (FinishReason.STOP, FinishReason.LENGTH)
_RING_S = 1.0


class HandOverDesk:
    """Issues tickets on the scheduler's thread, and answers for them on the control thread.

    Args:
        name: this engine.
        config: its settings.
        clock: whose seconds the leases are counted in.
        address: host and port that peers are told.
        notify: wakes the engine's loop when a ticket ended.
    """

    def __init__(
        self,
        *,
        name: EngineName,
        config: NixlConfig,
        clock: Clock,
        address: tuple[str, int],
        notify: Callable[[], None],
    ) -> None:
        self._name = name
        self._config = config
        self._address = address
        self._notify = notify
        self.registry = TicketRegistry(clock)
        self._endpoints: tuple[RankEndpoint, ...] = ()
        self._doorbells: tuple[Doorbell, ...] = ()
        self._lock = threading.Lock()
        self._reading: set[str] = set()

    def serve(self, endpoints: tuple[RankEndpoint, ...], doorbells: tuple[Doorbell, ...]) -> None:
        """Take the ranks' KV memory and doorbells; peers are refused until then."""
        self._endpoints = endpoints
        self._doorbells = doorbells

    def hand_over(
        self, request: Request, blocks: FinishedBlocks, *, push_id: str = ""
    ) -> HandOver | None:
        """Issue a ticket for the prompt's KV; None when there is none to hand over.

        Args:
            request: the request; blocks: what it leaves.
            push_id: the push that sent parts of it ahead, or empty.

        Raises:
            ConfigError: no worker has registered its KV memory, so nobody could read it.
        """
        num_tokens = min(blocks.num_tokens, request.num_prompt_tokens)
        if blocks.finish_reason not in _HANDS_OVER or num_tokens == 0:
            return None
        if not self._endpoints:
            raise ConfigError(
                "a hand-over was asked for before set_xfer_handshake_metadata: pass it what each "
                "worker's get_handshake_metadata returned"
            )
        params = self._params(request, blocks, num_tokens, push_id)
        self.registry.grant(params.transfer_id, params.contents, lease_s=self._config.lease_s)
        return HandOver(
            transfer_id=params.transfer_id,
            kv_transfer_params=params.to_dict(key=self._config.key),
        )

    def answer(self, request: Message, sender: str) -> Message:
        """Answer a peer; called on the control thread, never waits.

        Raises:
            ProtocolError: the message is no request.
            TransferError: it cannot be answered.
        """
        match request:
            case Describe():
                return self._describe()
            case Renew():
                return Answer.of(self.registry.renew(request.transfer_id))
            case Reading():
                return self._reading_begins(request.transfer_id)
            case Accept():
                return self._accept(request, sender)
            case Release():
                return self._release(request)
        raise ProtocolError(f"{type(request).__name__} is not a request")

    def keep_workers_awake(self) -> bool:
        """Ring for reads that are under way; return whether there are any. Call it every 0.5 s."""
        with self._lock:
            self._reading = {name for name in self._reading if self.registry.is_open(name)}
            is_reading = bool(self._reading)
        if is_reading:
            self._ring(_RING_S)
        return is_reading

    def _params(
        self, request: Request, blocks: FinishedBlocks, num_tokens: int, push_id: str
    ) -> TransferParams:
        block_size = self._config.block_size
        num_blocks = -(-num_tokens // block_size)
        if num_blocks > blocks.block_ids.size:
            raise ConfigError(
                f"{num_tokens} tokens need {num_blocks} blocks of {block_size}, but the request "
                f"had {blocks.block_ids.size}: is NixlConfig.block_size the pool's?"
            )
        host, port = self._address
        return TransferParams(
            engine_id=self._name.engine_id,
            epoch=self._name.epoch,
            transfer_id=uuid.uuid4().hex,
            host=host,
            port=port,
            block_ids=blocks.block_ids[:num_blocks],
            generations=blocks.generations[:num_blocks],
            num_tokens=num_tokens,
            block_size=block_size,
            fingerprint=self._endpoints[0].fingerprint,
            tp_size=len(self._endpoints),
            lease_s=self._config.lease_s,
            prompt_digest=prompt_digest(request),
            push_id=push_id,
        )

    def _describe(self) -> Description:
        if not self._endpoints:
            raise TransferError("its workers have not registered their KV memory yet")
        return Description(block_size=self._config.block_size, ranks=self._endpoints)

    def _reading_begins(self, transfer_id: str) -> Answer:
        answer = self.registry.renew(transfer_id)
        if answer:
            with self._lock:
                self._reading.add(transfer_id)
            self._ring(_RING_S)
        return Answer.of(answer)

    def _accept(self, request: Accept, sender: str) -> Answer:
        answer = self.registry.accept(
            request.transfer_id, request.contents_digest, consumer=f"{sender}/{request.read}"
        )
        self._reading_ends(request.transfer_id)
        self._notify()
        return Answer.of(answer)

    def _release(self, request: Release) -> Answer:
        reason = f"its reader gave it back: {request.reason}" if request.reason else ""
        self.registry.release(request.transfer_id, reason=reason or "its reader gave it back")
        self._reading_ends(request.transfer_id)
        self._notify()
        return Answer(ok=True)

    def _reading_ends(self, transfer_id: str) -> None:
        with self._lock:
            was_last = transfer_id in self._reading and len(self._reading) == 1
            self._reading.discard(transfer_id)
        if was_last:
            self._ring(0.0)

    def _ring(self, seconds: float) -> None:
        for doorbell in self._doorbells:
            ring(doorbell, seconds)
