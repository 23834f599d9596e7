"""What an engine's control thread keeps for one that it asks."""

from __future__ import annotations

import asyncio
import logging
from typing import TypeVar

from pdcore.connector.nixl.client import PeerClient
from pdcore.connector.nixl.compatibility import must_reshape
from pdcore.connector.nixl.config import NixlConfig
from pdcore.connector.nixl.engine_name import EngineName
from pdcore.connector.nixl.meta import PeerInfo, RankEndpoint
from pdcore.connector.nixl.peer_params import PeerParams
from pdcore.connector.nixl.protocol import (
    Accept,
    Answer,
    Claim,
    Describe,
    Description,
    Message,
    Reading,
    Refusal,
    Release,
    Renew,
)
from pdcore.errors import HandshakeRefused, PeerLost

__all__ = ["PeerLink"]

logger = logging.getLogger(__name__)

_NUM_RELEASE_TRIES = 3

ReplyT = TypeVar("ReplyT", bound=Message)


class PeerLink:
    """Speaks with one life of one engine, and remembers its handshake.

    Every method is a coroutine of the control thread and ends within the request timeout.

    Args:
        params: names the engine and its address.
        name: this engine.
        config: its settings.
        endpoints: this engine's own KV memory, by rank; the peer's must match.
    """

    def __init__(
        self,
        params: PeerParams,
        *,
        name: EngineName,
        config: NixlConfig,
        endpoints: tuple[RankEndpoint, ...],
    ) -> None:
        self._peer_id = params.peer_id
        self._config = config
        self._endpoints = endpoints
        self._client = PeerClient(
            params.host, params.port, peer=params.engine, name=name, config=config
        )
        self._handshake: asyncio.Task[PeerInfo] | None = None
        self._info: PeerInfo | None = None
        self.num_users = 0

    @property
    def where(self) -> str:
        return self._client.where

    @property
    def info(self) -> PeerInfo | None:
        """The peer's KV memory if the handshake is done. From any thread."""
        return self._info

    async def describe(self) -> PeerInfo:
        """Shake hands, unless that is done, and return the peer's KV memory.

        All who ask while a handshake is under way share it, and its end, good or bad.

        Raises:
            PeerLost: the peer does not answer, or is another one.
            HandshakeRefused: the two engines cannot exchange KV.
        """
        if self._info is not None:
            return self._info
        if self._handshake is None:
            self._handshake = asyncio.create_task(self._shake_hands())
            self._handshake.add_done_callback(self._handshake_ended)
        return await asyncio.shield(self._handshake)

    async def _shake_hands(self) -> PeerInfo:
        description = await self.ask(Describe(), Description)
        return PeerInfo(
            peer_id=self._peer_id,
            name=self.where,
            ranks=description.ranks,
            block_size=description.block_size if self._must_reshape(description) else 0,
        )

    def _handshake_ended(self, handshake: asyncio.Task[PeerInfo]) -> None:
        self._handshake = None
        if not handshake.cancelled() and handshake.exception() is None:
            self._info = handshake.result()

    def forget(self) -> None:
        """Shake hands again before the next load: the last one went wrong."""
        self._info = None

    async def renew(self, transfer_id: str) -> Answer:
        """Ask for the lease to start afresh. Raises as `describe` does."""
        return await self.ask(Renew(transfer_id=transfer_id), Answer)

    async def claim(self, claim: Claim) -> PeerInfo:
        """Ask for leave to push; return the peer's staging memory.

        Raises:
            PeerLost: the peer does not answer, or is another one.
            HandshakeRefused: it does not agree, or its KV is of another shape or its slots are
                fewer than the claim's.
        """
        description = await self.ask(claim, Description)
        if self._must_reshape(description):
            raise HandshakeRefused(
                f"{self.where} has blocks or ranks of another size than this engine: KV can be "
                "pushed between equal shapes only. It will be read instead"
            )
        if any(max(claim.slots) >= rank.region.num_blocks for rank in description.ranks):
            raise HandshakeRefused(f"{self.where} named a slot that it does not have")
        return PeerInfo(peer_id=self._peer_id, name=self.where, ranks=description.ranks)

    async def accept(self, transfer_id: str, contents_digest: str, read: str) -> Answer:
        """Ask whether what one read brought is good. Raises as `describe` does."""
        question = Accept(transfer_id=transfer_id, contents_digest=contents_digest, read=read)
        return await self.ask(question, Answer)

    async def announce(self, transfer_id: str) -> None:
        """Say that a read needs the peer. It may get lost: the read is then slower."""
        try:
            await self.ask(Reading(transfer_id=transfer_id), Answer)
        except (PeerLost, HandshakeRefused) as error:
            logger.debug("could not announce a read: %s", error)

    async def release(self, transfer_id: str, reason: str) -> None:
        """Give a ticket back. When the peer cannot be told, the ticket's lease ends it."""
        for attempt in range(_NUM_RELEASE_TRIES):
            try:
                await self.ask(Release(transfer_id=transfer_id, reason=reason), Answer)
                return
            except HandshakeRefused:
                return
            except PeerLost as error:
                logger.debug("release notice %d was lost: %s", attempt + 1, error)
                await asyncio.sleep(self._config.request_timeout_s / 10)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    async def ask(self, request: Message, reply_type: type[ReplyT]) -> ReplyT:
        """Ask anything that is answered with ``reply_type``. Raises as `describe` does."""
        reply = await self._client.ask(request)
        if isinstance(reply, Refusal):
            raise HandshakeRefused(f"{self.where} refused: {reply.reason}")
        if not isinstance(reply, reply_type):
            raise PeerLost(f"{self.where} answered with a {type(reply).__name__}")
        return reply

    def _must_reshape(self, theirs: Description) -> bool:
        return must_reshape(
            self.where,
            theirs=theirs.ranks,
            ours=self._endpoints,
            their_block_size=theirs.block_size,
            our_block_size=self._config.block_size,
        )
