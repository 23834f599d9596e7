"""Waiting for what a peer pushes."""

from __future__ import annotations

import asyncio

import pytest
from nixl_engines import a_request

from pdcore.clock import VirtualClock
from pdcore.connector.nixl.config import NixlConfig
from pdcore.connector.nixl.control import ControlThread
from pdcore.connector.nixl.engine_name import EngineName
from pdcore.connector.nixl.landing_desk import LandingDesk
from pdcore.connector.nixl.landings import LandingRegistry
from pdcore.connector.nixl.params import TransferParams
from pdcore.connector.nixl.protocol import PushEnded
from pdcore.connector.ticket_contents import prompt_digest

DIGEST = prompt_digest(a_request([1, 2, 3, 4, 5]))


def test_a_foreign_end_does_not_keep_the_thread_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second engine with the same leave is refused, and says that it ended; the push goes on."""
    clock = VirtualClock()
    registry = LandingRegistry(clock, num_slots=4, linger_s=1)
    desk = LandingDesk(
        name=EngineName(engine_id="d", epoch="1"),
        config=NixlConfig(block_size=4),
        clock=clock,
        address=("127.0.0.1", 1),
        control=ControlThread("unused"),
    )
    monkeypatch.setattr(desk, "_registry", registry)
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
        desk.answer(PushEnded(push_id="x"), "q:1")
        await asyncio.sleep(0.1)
        assert not waiting.done()
        desk.answer(PushEnded(push_id="x", ticket_id="t", num_blocks=1), params.peer_id)
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
