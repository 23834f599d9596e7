"""More who want to be connected to the side channel than it has places for, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcore.connector.nixl.channel import Channel
from pdcore.connector.nixl.client import PeerClient
from pdcore.connector.nixl.config import NixlConfig
from pdcore.connector.nixl.engine_name import EngineName
from pdcore.connector.nixl.places import Places
from pdcore.connector.nixl.protocol import Answer, Message, Renew
from pdcore.connector.nixl.server import SideChannelServer, bind
from pdcore.errors import PeerLost

pytestmark = pytest.mark.timeout(120)

HOST = "127.0.0.1"
NAME = EngineName(engine_id="p", epoch="1")
NUM_PLACES = 3


class Desk:
    """Answers every request with its name; those that are told to wait, once they may go on.

    Attributes:
        begun: what it was asked, in order.
        may_go_on: set when those that wait may be answered.
    """

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.may_go_on = asyncio.Event()

    async def answer(self, request: Message, sender: str) -> Message:
        assert isinstance(request, Renew)
        self.begun.append(request.transfer_id)
        if request.transfer_id.startswith("slow"):
            await self.may_go_on.wait()
        return Answer(ok=True, reason=request.transfer_id)

    async def until_begun(self, number: int) -> None:
        """Wait until so many requests have come."""
        while len(self.begun) < number:
            await asyncio.sleep(0.001)


class Crowd:
    """A served side channel with few places, and those who come to it."""

    def __init__(self, port: int, desk: Desk, places: Places, config: NixlConfig) -> None:
        self._port, self._config = port, config
        self.desk, self.places = desk, places
        self._clients: list[PeerClient] = []
        self._writers: list[asyncio.StreamWriter] = []

    def client(self) -> PeerClient:
        """An honest engine."""
        name = EngineName(engine_id=f"d{len(self._clients)}", epoch="1")
        made = PeerClient(HOST, self._port, peer=NAME, name=name, config=self._config)
        self._clients.append(made)
        return made

    async def stranger(self) -> asyncio.StreamReader:
        """Somebody who connects and says nothing; returned once the server has said its word."""
        reader, writer = await asyncio.open_connection(HOST, self._port)
        self._writers.append(writer)
        size = int.from_bytes(await reader.readexactly(4), "big")
        await reader.readexactly(size)
        return reader

    def close(self) -> None:
        for client in self._clients:
            client.close()
        for writer in self._writers:
            writer.transport.abort()


@asynccontextmanager
async def crowd(**changes: Any) -> AsyncIterator[Crowd]:
    """Serve a side channel with three places."""
    settings = {"max_num_connections": NUM_PLACES, "request_timeout_s": 30.0}
    config = NixlConfig(**{"block_size": 4} | settings | changes)
    listener, desk = bind(HOST, 0), Desk()
    server = SideChannelServer(listener, name=NAME, config=config, handle=desk.answer)
    await server.start()
    made = Crowd(listener.getsockname()[1], desk, server._places, config)
    try:
        yield made
    finally:
        desk.may_go_on.set()
        made.close()
        await server.close()


@asynccontextmanager
async def crowd_of(there: Crowd, *, patience_s: float) -> AsyncIterator[list[PeerClient]]:
    """As many engines as may wait, who wait for less time than the server does."""
    config = attrs.evolve(there._config, request_timeout_s=patience_s)
    names = (EngineName(engine_id=f"i{number}", epoch="1") for number in range(NUM_PLACES))
    clients = [PeerClient(HOST, there._port, peer=NAME, name=name, config=config) for name in names]
    try:
        yield clients
    finally:
        for client in clients:
            client.close()


def run(live: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(live(), 60))


async def is_answered(client: PeerClient, what: str = "quick") -> bool:
    reply = await client.ask(Renew(transfer_id=what))
    return reply == Answer(ok=True, reason=what)


def only_idle_channel(client: PeerClient) -> Channel:
    (channel,) = client._idle
    return channel


def test_idle_peers_make_room() -> None:
    """Four times as many engines as places are served, one after the other and all at once, again
    and again, though each keeps its connection for as long as it may."""

    async def live() -> None:
        async with crowd() as there:
            clients = [there.client() for _ in range(4 * NUM_PLACES)]
            for _ in range(3):
                for client in clients:
                    assert await is_answered(client)
                assert all(await asyncio.gather(*map(is_answered, clients)))

    run(live)


def test_the_one_that_was_idle_for_longest_goes() -> None:
    """Whoever asked since keeps its connection."""

    async def live() -> None:
        async with crowd() as there:
            first, second, third, fourth = (there.client() for _ in range(4))
            for client in (first, second, third, first):
                assert await is_answered(client)
            kept = [only_idle_channel(client) for client in (third, first)]
            dropped = only_idle_channel(second)
            assert await is_answered(fourth)
            with pytest.raises(EOFError):
                await dropped.receive(timeout_s=30)
            for client, channel in zip((third, first), kept, strict=True):
                assert await is_answered(client)
                assert only_idle_channel(client) is channel

    run(live)


def test_whoever_is_being_answered_keeps_its_connection() -> None:
    """Neither a flood of strangers nor more engines than there are places push it out."""

    async def live() -> None:
        async with crowd() as there:
            answers = [
                asyncio.create_task(is_answered(there.client(), f"slow {number}"))
                for number in range(NUM_PLACES - 1)
            ]
            await there.desk.until_begun(NUM_PLACES - 1)
            for _ in range(5 * NUM_PLACES):
                await there.stranger()
                assert await is_answered(there.client())
            assert not any(answer.done() for answer in answers)
            there.desk.may_go_on.set()
            assert all(await asyncio.gather(*answers))
            assert there.desk.begun.count("slow 0") == 1

    run(live)


def test_strangers_do_not_push_out_idle_peers() -> None:
    """Who has not shown the key takes the places of such alone, of the oldest first."""

    async def live() -> None:
        async with crowd() as there:
            clients = [there.client() for _ in range(NUM_PLACES)]
            for client in clients:
                assert await is_answered(client)
            channels = [only_idle_channel(client) for client in clients]
            strangers = [await there.stranger() for _ in range(5 * NUM_PLACES)]
            for stranger in strangers[:-NUM_PLACES]:
                with pytest.raises((EOFError, ConnectionResetError)):
                    await stranger.readexactly(1)
            assert not any(stranger.at_eof() for stranger in strangers[-NUM_PLACES:])
            for client, channel in zip(clients, channels, strict=True):
                assert await is_answered(client)
                assert only_idle_channel(client) is channel
            assert await is_answered(there.client())

    run(live)


def test_when_all_are_being_answered_the_next_waits() -> None:
    """It is served as soon as one is done, which then makes room."""

    async def live() -> None:
        async with crowd() as there:
            answers = [
                asyncio.create_task(is_answered(there.client(), f"slow {number}"))
                for number in range(NUM_PLACES)
            ]
            await there.desk.until_begun(NUM_PLACES)
            late = [asyncio.create_task(is_answered(there.client(), "late")) for _ in range(2)]
            while there.places._num_waiting < len(late):
                await asyncio.sleep(0.001)
            assert "late" not in there.desk.begun
            there.desk.may_go_on.set()
            assert all(await asyncio.gather(*answers, *late))

    run(live)


def test_a_place_is_not_waited_for_longer_than_for_an_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its engine is told nothing, as by a peer that is too busy, and the log says why."""

    async def live() -> None:
        async with crowd(request_timeout_s=0.5) as there:
            answers = [
                asyncio.create_task(there.client().ask(Renew(transfer_id=f"slow {number}")))
                for number in range(NUM_PLACES)
            ]
            await there.desk.until_begun(NUM_PLACES)
            with pytest.raises(PeerLost, match="did not answer within"):
                await there.client().ask(Renew(transfer_id="late"))
            while not caplog.messages:
                await asyncio.sleep(0.001)
            await asyncio.gather(*answers, return_exceptions=True)

    run(live)
    assert caplog.messages[0].endswith("all 3 are being answered")


def test_whoever_has_gone_waits_no_more() -> None:
    """Those who lose patience, as many as may wait, leave no trace: the next may wait in their
    place, and nobody who is served has to make room for them."""

    async def live() -> None:
        async with crowd() as there, crowd_of(there, patience_s=0.2) as impatient:
            answers = [
                asyncio.create_task(is_answered(there.client(), f"slow {number}"))
                for number in range(NUM_PLACES)
            ]
            await there.desk.until_begun(NUM_PLACES)
            for client in impatient:
                with pytest.raises(PeerLost, match="did not answer within"):
                    await client.ask(Renew(transfer_id="impatient"))
            while there.places._num_waiting:
                await asyncio.sleep(0.001)
            late = asyncio.create_task(is_answered(there.client(), "late"))
            while there.places._num_waiting != 1:
                await asyncio.sleep(0.001)
            there.desk.may_go_on.set()
            assert all(await asyncio.gather(*answers, late))
            assert "impatient" not in there.desk.begun

    run(live)


def test_no_more_wait_than_there_are_places() -> None:
    """One more is turned away, and comes again."""

    async def live() -> None:
        async with crowd() as there:
            clients = [there.client() for _ in range(2 * NUM_PLACES + 1)]
            answers = [
                asyncio.create_task(is_answered(client, f"slow {number}"))
                for number, client in enumerate(clients[:NUM_PLACES])
            ]
            await there.desk.until_begun(NUM_PLACES)
            late = [asyncio.create_task(is_answered(client)) for client in clients[NUM_PLACES:]]
            while there.places._num_waiting < NUM_PLACES:
                await asyncio.sleep(0.001)
            for _ in range(50):
                assert there.places._num_waiting <= NUM_PLACES
                await asyncio.sleep(0.001)
            there.desk.may_go_on.set()
            assert all(await asyncio.gather(*answers, *late))

    run(live)


def test_who_asks_many_things_at_once_holds_up_nobody() -> None:
    """Others are answered between two of its requests."""

    async def live() -> None:
        async with crowd() as there:
            pipe = await there.client()._connect()
            for _ in range(500):
                await pipe.send(Renew(transfer_id="pipe"), timeout_s=30)
            assert await is_answered(there.client(), "other")
            assert there.desk.begun.index("other") < 500

    run(live)


def test_a_peer_that_shows_the_key_and_asks_nothing_is_dropped_soon() -> None:
    """Not only after the time that one may be idle between two requests."""

    async def live() -> None:
        async with crowd(request_timeout_s=0.2, lease_s=600.0) as there:
            silent = await there.client()._connect()
            with pytest.raises(EOFError):
                await silent.receive(timeout_s=30)

    run(live)


class Guest(Channel):
    """A channel without a connection that knows whether it was closed."""

    def __init__(self) -> None:
        super().__init__(max_frame_bytes=1)
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


class Life:
    """Places, and all who ever came: each a stranger, idle, busy or gone, the longest so first."""

    def __init__(self) -> None:
        self.places = Places(NUM_PLACES)
        self.stage: dict[Guest, str] = {}

    async def happen(self, event: str, number: int) -> None:
        """Let somebody do something, if there is anybody who can."""
        wanted = {"seat": "stranger", "ask": "idle", "answer": "busy"}.get(event)
        can = [guest for guest, now in self.stage.items() if wanted in (None, now)]
        if event == "come":
            guest = Guest()
            self.places.greet(guest)
            self._move(guest, "stranger")
        elif can:
            await self._act(event, can[number % len(can)])

    async def _act(self, event: str, guest: Guest) -> None:
        if event == "seat":
            is_full = self.num("busy") == NUM_PLACES
            has_place = await self.places.seat(guest, timeout_s=0.0 if is_full else 30)
            assert has_place is not is_full
            self._move(guest, "busy" if has_place else "gone")
        elif event == "ask":
            self.places.attend(guest)
            self._move(guest, "busy")
        elif event == "answer":
            assert self.places.rest(guest)
            self._move(guest, "idle")
        else:
            self.places.leave(guest)
            self._move(guest, "gone")

    def _move(self, guest: Guest, stage: str) -> None:
        self.stage.pop(guest, None)
        self.stage[guest] = stage

    def num(self, *stages: str) -> int:
        return sum(now in stages for now in self.stage.values())

    def pushed_out(self) -> list[Guest]:
        """Who was closed without having gone; they have now."""
        closed = [guest for guest, now in self.stage.items() if guest.is_closed and now != "gone"]
        for guest in closed:
            self.stage[guest] = "gone"
        return closed


EVENTS = ["come", "seat", "ask", "answer", "leave"]


@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0))))
@settings(max_examples=200, deadline=None)
def test_places_whatever_happens(events: list[tuple[str, int]]) -> None:
    """There are never more peers or strangers than places. If there would be, the oldest stranger
    goes, or the peer that is idle for longest, and else nobody. In the end all places are free."""

    async def live() -> None:
        life = Life()
        for event, number in events:
            await life.happen(event, number)
            expected = []
            for stages in (("stranger",), ("idle", "busy")):
                if life.num(*stages) > NUM_PLACES:
                    expected.append(next(it for it, now in life.stage.items() if now == stages[0]))
            assert life.pushed_out() == expected
        for guest in life.stage:
            life.places.leave(guest)
        assert life.places._free._value == NUM_PLACES

    asyncio.run(live())
