"""The side channel's listening end, in the engine that hands KV over."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Awaitable, Callable

from pdcore.connector.nixl.channel import Channel, client_proof, is_proof, new_nonce, server_proof
from pdcore.connector.nixl.config import NixlConfig
from pdcore.connector.nixl.engine_name import EngineName
from pdcore.connector.nixl.places import Places
from pdcore.connector.nixl.protocol import (
    PROTOCOL_VERSION,
    Challenge,
    Hello,
    Message,
    ProtocolError,
    Refusal,
    Welcome,
)
from pdcore.errors import AddressInUse, TransferError

__all__ = ["Handler", "SideChannelServer", "bind"]

logger = logging.getLogger(__name__)

_ACCEPTING_S = 0.01
_MAX_FRAME_BYTES = 1 << 20
_MAX_HELLO_BYTES = 1 << 14
"""Of each stranger so much is kept at most, and there may be as many as connections."""
_IDLE_FACTOR = 4


Handler = Callable[[Message, str], Awaitable[Message]]
"""Takes a request and its sender's `EngineName.peer_id`; returns the reply. Must not block, and may
wait for a fraction of the request timeout."""

_GONE = (OSError, EOFError, TimeoutError)


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        AddressInUse: somebody else listens there, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A port whose last owner just died is free; one with a living owner still is refused.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise AddressInUse(_bind_message(host, port, error)) from error
    return listener


def _bind_message(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"the side channel cannot listen on {host}:{port}: another process does. "
            "Stop that one, choose another port, or pass port=0 to take a free one"
        )
    return (
        f"the side channel cannot listen on {host}:{port}: {error.strerror}. "
        "Pass the address of one of this machine's interfaces and a port that is allowed"
    )


class SideChannelServer:
    """Serves peers, each on a task of its own, so that a silent one delays nobody.

    A connection must authenticate at once and is dropped when it does not. What happens when there
    are too many of them, `Places` says.

    Args:
        listener: from `bind`.
        name: this engine.
        config: key, limits and timeouts.
        handle: answers requests.
    """

    def __init__(
        self, listener: socket.socket, *, name: EngineName, config: NixlConfig, handle: Handler
    ) -> None:
        self._listener = listener
        self._name = name
        self._config = config
        self._handle = handle
        self._places = Places(config.max_num_connections)
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Begin to serve, on the running loop."""
        self._server = await asyncio.get_running_loop().create_server(
            lambda: Channel(max_frame_bytes=_MAX_HELLO_BYTES, connected=self._connected),
            sock=self._listener,
        )

    async def close(self) -> None:
        """Stop listening, drop every connection, and see their tasks end."""
        if self._server is not None:
            self._server.close()
        # A connection that was just accepted has no task of ours yet: it gets one, then it ends.
        await asyncio.sleep(_ACCEPTING_S)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._config.request_timeout_s)

    def _connected(self, channel: Channel) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(channel))
        self._tasks.add(task)

        def end(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            channel.close()

        task.add_done_callback(end)

    async def _serve(self, channel: Channel) -> None:
        self._places.greet(channel)
        try:
            sender = await self._authenticate(channel)
            if await self._places.seat(channel, timeout_s=self._config.request_timeout_s):
                channel.allow_frames(_MAX_FRAME_BYTES)
                await self._answer_requests(channel, sender)
            else:
                logger.warning(
                    "refused a connection to the side channel: all %d are being answered",
                    self._config.max_num_connections,
                )
        except ProtocolError as error:
            logger.warning("dropped a connection to the side channel: %s", error)
        except _GONE:
            pass
        finally:
            self._places.leave(channel)

    async def _authenticate(self, channel: Channel) -> str:
        timeout_s = self._config.request_timeout_s
        challenge = Challenge(
            engine_id=self._name.engine_id, epoch=self._name.epoch, nonce=new_nonce()
        )
        await channel.send(challenge, timeout_s=timeout_s)
        hello = await channel.receive(timeout_s=timeout_s)
        if not isinstance(hello, Hello):
            raise ProtocolError(f"a hello was expected, not {type(hello).__name__}")
        if refusal := self._objection(challenge, hello):
            await channel.send(Refusal(reason=refusal), timeout_s=timeout_s)
            raise ProtocolError(refusal)
        proof = server_proof(self._config.key, challenge, hello)
        await channel.send(Welcome(proof=proof), timeout_s=timeout_s)
        return EngineName(engine_id=hello.engine_id, epoch=hello.epoch).peer_id

    def _objection(self, challenge: Challenge, hello: Hello) -> str:
        if hello.version != PROTOCOL_VERSION:
            return (
                f"it speaks version {hello.version} of the side channel, this engine speaks "
                f"{PROTOCOL_VERSION}"
            )
        if not is_proof(hello.proof, client_proof(self._config.key, challenge, hello)):
            return "the two engines do not have the same key"
        return ""

    async def _answer_requests(self, channel: Channel, sender: str) -> None:
        timeout_s = self._config.request_timeout_s
        idle_s = _IDLE_FACTOR * max(self._config.lease_s, timeout_s)
        # Who connects has something to ask.
        request = await channel.receive(timeout_s=timeout_s)
        while True:
            await channel.send(await self._reply(request, sender), timeout_s=timeout_s)
            # Its next request may be here already: let others have their turn before it.
            await asyncio.sleep(0)
            if not self._places.rest(channel):
                return
            request = await channel.receive(timeout_s=timeout_s, idle_s=idle_s)
            self._places.attend(channel)

    async def _reply(self, request: Message, sender: str) -> Message:
        try:
            return await self._handle(request, sender)
        except TransferError as error:
            return Refusal(reason=str(error))
        except Exception:
            logger.exception("the side channel could not answer a %s", type(request).__name__)
            return Refusal(reason="an internal error, which its log has")
