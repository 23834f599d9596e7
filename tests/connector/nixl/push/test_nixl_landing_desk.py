"""Waiting for what a peer pushes, and looking after peers that do."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing

import attrs
import pytest
from nixl_engines import a_request, until

from pdcore.clock import VirtualClock
from pdcore.connector.nixl.config import NixlConfig
from pdcore.connector.nixl.control import ControlThread
from pdcore.connector.nixl.engine_name import EngineName
from pdcore.connector.nixl.memory import MemoryRegion
from pdcore.connector.nixl.meta import RankEndpoint
from pdcore.connector.nixl.params import TransferParams
from pdcore.connector.nixl.protocol import Claim, PushEnded
from pdcore.connector.nixl.push.landing_desk import LOOK_EVERY_S, LandingDesk
from pdcore.connector.nixl.push.landings import LandingRegistry
from pdcore.connector.nixl.push.life_sign import LifeSign, is_refused
from pdcore.connector.ticket_contents import prompt_digest
from pdcore.errors import TransferError

pytestmark = pytest.mark.timeout(60)

DIGEST = prompt_digest(a_request([1, 2, 3, 4, 5]))
ENDPOINTS = (
    RankEndpoint(
        agent_metadata=b"",
        region=MemoryRegion(
            address=1, num_blocks=4, bytes_per_block=8, mem_type="DRAM", device_id=0
        ),
        fingerprint="",
    ),
)
HOST = "127.0.0.1"


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def registry(clock: VirtualClock) -> LandingRegistry:
    """Four slots."""
    return LandingRegistry(clock, num_slots=4, linger_s=1, overdue_s=60)


@pytest.fixture
def control() -> Iterator[ControlThread]:
    """A thread for looks."""
    thread = ControlThread("looks")
    thread.start()
    yield thread
    thread.close()


@pytest.fixture
def desk(registry: LandingRegistry, clock: VirtualClock, control: ControlThread) -> LandingDesk:
    """A desk that has patience with hosts which do not answer."""
    desk = LandingDesk(
        name=EngineName(engine_id="d", epoch="1"),
        config=NixlConfig(block_size=4, request_timeout_s=30),
        clock=clock,
        address=(HOST, 1),
        control=control,
    )
    desk._registry = registry
    return desk


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that answers nobody, like one of a machine that is switched off."""
    with ExitStack() as stack:
        listener = stack.enter_context(closing(socket.socket()))
        listener.bind((HOST, 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        for _ in range(3):
            crowd = stack.enter_context(closing(socket.socket()))
            crowd.setblocking(False)
            crowd.connect_ex((HOST, port))
        until(lambda: asyncio.run(is_refused(HOST, port, timeout_s=0.2)) is None)
        yield port


@pytest.fixture
def closed_port() -> int:
    """A port on which nobody listens."""
    with closing(socket.socket()) as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


def a_claim(registry: LandingRegistry, push_id: str, port: int) -> Claim:
    """A claim of a push that is expected here."""
    slots = registry.expect(push_id, prompt_digest=DIGEST, max_num_slots=1, lease_s=30)
    return Claim(
        push_id=push_id,
        slots=slots,
        prompt_digest=DIGEST,
        life_host=HOST,
        life_ports=(port,),
    )


def claimed(registry: LandingRegistry, push_id: str, port: int) -> None:
    """A push of a writer, named like it, that was seen alive at a port."""
    claim = a_claim(registry, push_id, port)
    assert registry.claim(
        push_id,
        slots=claim.slots,
        prompt_digest=DIGEST,
        writer=push_id,
        life_host=HOST,
        life_ports=(port,),
        was_seen_alive=True,
    )


def test_a_silent_host_delays_no_other_proof_of_death(
    desk: LandingDesk,
    registry: LandingRegistry,
    clock: VirtualClock,
    control: ControlThread,
    silent_port: int,
    closed_port: int,
) -> None:
    """Whoever comes after it in the list of suspects is looked at just as soon."""
    claimed(registry, "silent", silent_port)
    claimed(registry, "dead", closed_port)
    clock.advance(30)
    assert [suspect.writer for suspect in registry.suspects()] == ["silent", "dead"]
    control.repeat(desk.watch, every_s=LOOK_EVERY_S)
    until(lambda: [suspect.writer for suspect in registry.suspects()] == ["silent"])


def test_a_writer_is_seen_before_it_may_write(
    desk: LandingDesk, registry: LandingRegistry, clock: VirtualClock
) -> None:
    """So that its death can be proven, however soon it dies."""
    with closing(LifeSign(HOST)) as sign:
        desk._endpoints = ENDPOINTS
        asyncio.run(desk.answer(a_claim(registry, "x", sign.port), "p:1"))
    clock.advance(30)
    assert [suspect.writer for suspect in registry.suspects()] == ["p:1"]


@pytest.mark.parametrize("num_ports", [0, 2, 4096])
def test_a_claim_names_as_many_ranks_as_there_are_here(
    desk: LandingDesk, registry: LandingRegistry, num_ports: int
) -> None:
    """Pushes are between equal shapes, so there is no reason to look at other numbers of ports."""
    desk._endpoints = ENDPOINTS
    with closing(socket.create_server((HOST, 0))) as listener:
        listener.setblocking(False)
        claim = a_claim(registry, "x", listener.getsockname()[1])
        claim = attrs.evolve(claim, life_ports=num_ports * claim.life_ports)
        with pytest.raises(TransferError, match=f"names {num_ports} ranks and this engine has 1"):
            asyncio.run(desk.answer(claim, "p:1"))
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert not registry.is_landing("x", writer="p:1")
    assert registry.counts().num_refused == 1


def test_a_writer_that_cannot_be_seen_is_a_warning(
    desk: LandingDesk,
    registry: LandingRegistry,
    closed_port: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It may push all the same; the log says once what that means."""
    desk._endpoints = ENDPOINTS
    for push_id in ("x", "y"):
        asyncio.run(desk.answer(a_claim(registry, push_id, closed_port), "p:1"))
        assert registry.is_landing(push_id, writer="p:1")
    (warning,) = caplog.messages
    assert f"p:1 at {HOST}" in warning
    assert str(closed_port) in warning


def test_slots_that_are_kept_for_too_long_are_a_warning(
    desk: LandingDesk,
    registry: LandingRegistry,
    clock: VirtualClock,
    control: ControlThread,
    silent_port: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log says once for whom they are kept, and what to do."""
    claimed(registry, "silent", silent_port)
    clock.advance(30)
    assert registry.counts().num_quarantined_slots == 1
    clock.advance(60)
    control.repeat(desk.watch, every_s=LOOK_EVERY_S)
    until(lambda: bool(caplog.messages))
    (warning,) = caplog.messages
    assert "1 staging slots are kept for engine silent" in warning
    assert "restart this engine" in warning


def test_a_foreign_end_does_not_keep_the_thread_busy(
    desk: LandingDesk, registry: LandingRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second engine with the same leave is refused, and says that it ended; the push goes on."""
    slots = registry.expect("x", prompt_digest=DIGEST, max_num_slots=1, lease_s=30)
    params = a_ticket(push_id="x")
    assert registry.claim("x", slots=slots, prompt_digest=DIGEST, writer=params.peer_id)
    num_looks = 0
    is_landing = desk.is_landing

    def look(params: TransferParams) -> bool:
        nonlocal num_looks
        num_looks += 1
        # Were it to look for ever, not even the end of this test would come.
        return num_looks < 10 and is_landing(params)

    monkeypatch.setattr(desk, "is_landing", look)

    async def live() -> None:
        waiting = asyncio.create_task(desk.wait(params))
        await asyncio.sleep(0)
        await desk.answer(PushEnded(push_id="x"), "q:1")
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await desk.answer(PushEnded(push_id="x", ticket_id="t", num_blocks=1), params.peer_id)
        await waiting

    asyncio.run(live())
    assert num_looks <= 3


def a_ticket(*, push_id: str) -> TransferParams:
    return TransferParams(
        engine_id="p",
        epoch="1",
        transfer_id="t",
        host="127.0.0.1",
        port=1,
        block_ids=(1, 2),
        generations=(0, 0),
        num_tokens=5,
        block_size=4,
        fingerprint="",
        tp_size=1,
        lease_s=30,
        prompt_digest=DIGEST,
        push_id=push_id,
    )
