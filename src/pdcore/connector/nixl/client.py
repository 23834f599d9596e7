"""The side channel's calling end."""

from __future__ import annotations

import asyncio
import random
from contextlib import AbstractAsyncContextManager, nullcontext

from pdcore.connector.nixl.channel import Channel, client_proof, is_proof, new_nonce, server_proof
from pdcore.connector.nixl.config import NixlConfig
from pdcore.connector.nixl.engine_name import EngineName
from pdcore.connector.nixl.protocol import (
    Challenge,
    Hello,
    Message,
    ProtocolError,
    Pushing,
    Refusal,
    Release,
    Renew,
    Welcome,
)
from pdcore.errors import HandshakeRefused, PeerLost

__all__ = ["PeerClient", "PeerRestarted"]

_MAX_FRAME_BYTES = 1 << 20
_NUM_TRIES = 8
_FIRST_PAUSE_S = 0.01


class PeerRestarted(PeerLost):
    """Raised when another engine, or another life of the engine, answers at a peer's address."""


class PeerClient:
    """Asks one engine at one address, over a few connections that stay open.

    Args:
        host, port: where its side channel listens.
        peer: who must answer there.
        name: this engine.
        config: key, limits and timeouts.
    """

    def __init__(
        self, host: str, port: int, *, peer: EngineName, name: EngineName, config: NixlConfig
    ) -> None:
        self._host = host
        self._port = port
        self._peer = peer
        self._name = name
        self._config = config
        self._slots = asyncio.Semaphore(config.max_connections_per_peer)
        # A queue of renewals leaves a connection to those whose data waits to be accepted.
        self._patient = asyncio.Semaphore(max(1, config.max_connections_per_peer - 1))
        self._idle: list[Channel] = []
        self._is_closed = False

    @property
    def where(self) -> str:
        """The peer as people know it."""
        return f"engine {self._peer.engine_id[:16]} at {self._host}:{self._port}"

    async def ask(self, request: Message) -> Message:
        """Send a request and return its reply. Requests may be repeated on the way.

        Raises:
            PeerRestarted: somebody else answers at the address.
            PeerLost: nobody answers in time.
            HandshakeRefused: the two do not share a key, or do not speak the same version; or the
                address cannot be that of a host.
        """
        timeout_s = self._config.request_timeout_s
        try:
            async with asyncio.timeout(timeout_s), self._turn(request), self._slots:
                return await self._ask_over_any(request)
        except TimeoutError:
            raise PeerLost(f"{self.where} did not answer within {timeout_s:g} s") from None
        except (OSError, EOFError) as error:
            what = getattr(error, "strerror", None) or "the connection was closed"
            raise PeerLost(f"{self.where} cannot be reached: {what}") from None
        except UnicodeError:
            # Printable, and allowed by a pattern such as *.cluster.local, but with an empty or a
            # too long part between two dots.
            raise HandshakeRefused(
                f"{self.where} cannot be reached: no host can have this name"
            ) from None
        except ProtocolError as error:
            raise PeerLost(f"{self.where} does not speak the protocol: {error}") from None

    def close(self) -> None:
        """Close the idle connections now, and those in use once they are answered."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().close()

    def _turn(self, request: Message) -> AbstractAsyncContextManager[None]:
        return self._patient if isinstance(request, Pushing | Release | Renew) else nullcontext()

    async def _ask_over_any(self, request: Message) -> Message:
        while self._idle:
            try:
                return await self._ask_over(self._idle.pop(), request)
            except (OSError, EOFError):
                continue  # the peer closed it while it was idle; requests can be repeated
        for attempt in range(_NUM_TRIES - 1):
            try:
                return await self._ask_over(await self._connect(), request)
            except (ConnectionResetError, EOFError):
                # Too many came at once. Let them not come at once again.
                await asyncio.sleep(_FIRST_PAUSE_S * 2**attempt * random.uniform(0.5, 1.5))
        return await self._ask_over(await self._connect(), request)

    async def _ask_over(self, channel: Channel, request: Message) -> Message:
        timeout_s = self._config.request_timeout_s
        try:
            await channel.send(request, timeout_s=timeout_s)
            reply = await channel.receive(timeout_s=timeout_s)
        except BaseException:
            channel.close()
            raise
        if self._is_closed:
            channel.close()
        else:
            self._idle.append(channel)
        return reply

    async def _connect(self) -> Channel:
        _, channel = await asyncio.get_running_loop().create_connection(
            lambda: Channel(max_frame_bytes=_MAX_FRAME_BYTES), self._host, self._port
        )
        try:
            await self._authenticate(channel)
        except BaseException:
            channel.close()
            raise
        return channel

    async def _authenticate(self, channel: Channel) -> None:
        timeout_s = self._config.request_timeout_s
        challenge = await channel.receive(timeout_s=timeout_s)
        if not isinstance(challenge, Challenge):
            raise ProtocolError(f"a challenge was expected, not {type(challenge).__name__}")
        hello = self._answer(challenge)
        await channel.send(hello, timeout_s=timeout_s)
        reply = await channel.receive(timeout_s=timeout_s)
        if isinstance(reply, Refusal):
            raise HandshakeRefused(f"{self.where} refused this engine: {reply.reason}")
        expected = server_proof(self._config.key, challenge, hello)
        if not isinstance(reply, Welcome) or not is_proof(reply.proof, expected):
            raise HandshakeRefused(
                f"{self.where} could not prove that it has the same key as this engine"
            )
        answered = EngineName(engine_id=challenge.engine_id, epoch=challenge.epoch)
        if answered != self._peer:
            raise PeerRestarted(self._restarted(answered))

    def _answer(self, challenge: Challenge) -> Hello:
        hello = Hello(engine_id=self._name.engine_id, epoch=self._name.epoch, nonce=new_nonce())
        proof = client_proof(self._config.key, challenge, hello)
        return Hello(engine_id=hello.engine_id, epoch=hello.epoch, nonce=hello.nonce, proof=proof)

    def _restarted(self, answered: EngineName) -> str:
        if answered.engine_id == self._peer.engine_id:
            return f"{self.where} restarted since it made the ticket, so its KV is gone"
        return f"another engine ({answered.engine_id[:16]}) answers in place of {self.where}"
