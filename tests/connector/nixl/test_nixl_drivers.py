"""What nobody foresaw while a peer is talked to is told like any other failure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from nixl_engines import until
from nixl_halves import PROMPT, Half, half

from pdcore.connector.nixl.control import ControlThread
from pdcore.connector.nixl.link import PeerLink
from pdcore.connector.nixl.protocol import PushEnded, Pushing
from pdcore.connector.nixl.push.params import PushParams
from pdcore.connector.stats import PushCounts
from pdcore.connector.ticket_contents import prompt_digest
from pdcore.request import Request

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def prefill() -> Iterator[Half]:
    """A prefill engine."""
    with half() as made:
        yield made


@pytest.fixture
def decode() -> Iterator[Half]:
    """A decode engine."""
    with half() as made:
        yield made


async def _fail(*args: Any) -> Any:
    raise RuntimeError("a surprise")


def break_asking(monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    """Let every question of one kind raise what no driver expects; all others get a yes."""

    async def ask(link: PeerLink, request: Any, reply_type: Any) -> Any:
        if isinstance(request, kind):
            raise RuntimeError("a surprise")
        return reply_type(ok=True)

    monkeypatch.setattr(PeerLink, "ask", ask)


@pytest.mark.parametrize("method", ["describe", "accept"])
def test_a_load_fails_with_its_cause(
    prefill: Half, decode: Half, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """A handshake and a question whether the data is good: whoever waits for the answer hears."""
    request = Request("d", PROMPT, kv_transfer_params=prefill.ticket())
    if method == "describe":
        monkeypatch.setattr(PeerLink, method, _fail)
    uid = decode.add(request)
    load = decode.load(request, uid)
    if method == "accept":
        decode.plan_with_read()
        monkeypatch.setattr(PeerLink, method, _fail)
        decode.workers_say(finished=load)
    decode.until_event()
    assert decode.received == []
    assert "a surprise" in decode.failed[0].cause


def test_a_lease_that_is_not_renewed_is_lost(
    prefill: Half, decode: Half, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request is not offered KV that may be gone by the time it is read."""
    monkeypatch.setattr(PeerLink, "renew", _fail)
    request = Request("d", PROMPT, kv_transfer_params=prefill.ticket())
    uid = decode.add(request)
    pull = decode.connector._parts.tickets.get(uid)
    assert pull is not None
    until(lambda: decode.take_events() or pull.trouble)
    assert "a surprise" in pull.trouble


def leave_to_push(prefill: Half) -> dict[str, Any]:
    """Leave from an engine that is where this one is; nobody asks it."""
    host, port = prefill.connector.address
    return PushParams(
        engine_id="d",
        epoch="1",
        push_id="x",
        host=host,
        port=port,
        slots=(0, 1),
        block_size=4,
        lease_s=0.03,
        prompt_digest=prompt_digest(Request("p", PROMPT)),
    ).to_dict(key=None)


@pytest.mark.parametrize("stage", ["claim", "sign", "end"])
def test_a_push_leaves_nothing_behind(
    prefill: Half, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """A claim, a sign of life and the end of a push: it is over, and none is remembered."""

    async def claim(link: PeerLink, message: Any) -> Any:
        return None

    break_asking(monkeypatch, PushEnded if stage == "end" else Pushing)
    monkeypatch.setattr(PeerLink, "claim", _fail if stage == "claim" else claim)
    monkeypatch.setattr("pdcore.connector.nixl.push.driver._MAX_TELLING_S", 0.1)
    params = {"do_remote_decode": True, "push_to": leave_to_push(prefill)}
    request = Request("p", PROMPT, kv_transfer_params=params)
    uid = prefill.add(request)
    if stage == "end":
        prefill.end(request, uid)
    until(lambda: prefill.take_events() or prefill.connector.stats().pushes.num_ended)
    expected = PushCounts(num_ended=1, num_started=stage == "sign", num_refused=stage == "claim")
    assert prefill.connector.stats().pushes == expected
    desk = prefill.connector._parts.pushes
    assert (desk._pushes, desk._drivers, desk._untold) == ({}, {}, {})


def test_what_is_done_again_and_again_outlives_an_error() -> None:
    """Once it went wrong, it is done again all the same."""
    calls: list[int] = []

    def call() -> None:
        calls.append(len(calls))
        if len(calls) == 1:
            raise RuntimeError("a surprise")

    control = ControlThread("again")
    control.start()
    with closing(control):
        control.repeat(call, every_s=0.001)
        until(lambda: len(calls) > 2)
