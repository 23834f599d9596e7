"""Leave to push that was forged, damaged or passed on wrongly; notices that get lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import attrs
import pytest
from nixl_engines import Engine, a_request, until
from nixl_halves import a_handshake, half
from nixl_pushes import (
    PROMPT,
    WHOLE_ENGINES,
    begin,
    decode_engine,
    decodes,
    expect,
    finish,
    landings,
    num_read,
    prefill_engine,
    pushes,
    run_idle,
)
from nixl_whole_engine import WholeEngine, run_until

from pdcore.connector.nixl.link import PeerLink
from pdcore.connector.nixl.meta import PeerInfo
from pdcore.connector.nixl.protocol import Claim, Message, ProtocolError, PushEnded
from pdcore.connector.nixl.push.landing_desk import LandingDesk
from pdcore.connector.nixl.push.params import PushParams
from pdcore.connector.stats import LandingCounts
from pdcore.errors import InvalidTransferParams

pytestmark = WHOLE_ENGINES

KEY = b"k" * 16


@pytest.fixture(scope="module")
def prefill() -> Iterator[WholeEngine]:
    """A prefill engine without a key."""
    with closing(prefill_engine(lease_s=2)) as engine:
        yield engine


@pytest.fixture(scope="module")
def decode() -> Iterator[WholeEngine]:
    """A decode engine without a key; its caches are of no use to any test."""
    with closing(decode_engine(lease_s=1.0, request_timeout_s=1.0)) as engine:
        yield engine


@pytest.fixture(autouse=True)
def empty_cache(prefill: WholeEngine, decode: WholeEngine) -> Iterator[None]:
    """Every test begins and ends with all blocks and slots free, and nothing cached."""
    assert decode.scheduler.reset_prefix_cache()
    for engine in (prefill, decode):
        engine.ends.clear()
    yield
    run_idle(prefill, decode)


def add(engine: WholeEngine, push_to: Any, prompt: list[int] = PROMPT) -> None:
    engine.add("a", prompt, max_tokens=1, params={"do_remote_decode": True, "push_to": push_to})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"host": "10.1.2.3"}, "not allowed here"),
        ({"slots": []}, "slots is empty"),
        ({"slots": [1, 1]}, "names a slot twice"),
        ({"slots": [-1]}, "not an integer in"),
        ({"port": 0}, "not an integer in"),
        ({"version": 2}, "are of version 2"),
        ({"extra": 1}, "unknown 'extra'"),
        ({"expects_push": False}, "what the decode engine's expect_push"),
        ({"prompt_digest": "ab" * 32}, "belongs to another prompt"),
        ({"push_id": "x" * 300}, "characters"),
        ({"slots": list(range(200_000))}, "max_params_bytes"),
    ],
)
def test_leave_that_is_refused(
    prefill: WholeEngine, decode: WholeEngine, changes: dict[str, Any], words: str
) -> None:
    """What cannot be what a decode engine wrote is refused with its request."""
    push_to = expect(decode, PROMPT)
    with pytest.raises(InvalidTransferParams, match=words):
        add(prefill, push_to | changes)
    decode.connector.call_off_push(push_to)


def test_leave_that_is_used_twice(prefill: WholeEngine, decode: WholeEngine) -> None:
    """Two requests cannot push to the same slots."""
    push_to = expect(decode, PROMPT)
    begin(prefill, "a", PROMPT, push_to)
    with pytest.raises(InvalidTransferParams, match="in use by another request"):
        prefill.add(
            "b", PROMPT, max_tokens=1, params={"do_remote_decode": True, "push_to": push_to}
        )
    decodes(decode, "a", PROMPT, finish(prefill, "a", decode), prefill)


@pytest.mark.parametrize("changes", [{"slots": [0, 1, 2]}, {"slots": [900]}, {"push_id": "x"}])
def test_slots_that_were_not_agreed_on(
    prefill: WholeEngine, decode: WholeEngine, changes: dict[str, Any]
) -> None:
    """The decode engine refuses them; nothing is written, and all is read as without a push."""
    other = expect(decode, PROMPT[:9])
    assert other["slots"][0] in (0, 1, 2)
    refused, before = pushes(prefill).num_refused, num_read(decode)
    begin(prefill, "a", PROMPT, expect(decode, PROMPT) | changes)
    assert pushes(prefill).num_refused == refused + 1
    params = finish(prefill, "a", decode)
    assert params["push_id"] == ""
    decodes(decode, "a", PROMPT, params, prefill)
    assert num_read(decode) - before == -(-(len(PROMPT) - 1) // 4)
    decode.connector.call_off_push(other)


def test_a_second_engine_with_the_same_leave(prefill: WholeEngine, decode: WholeEngine) -> None:
    """Whoever comes first pushes; the other one's ticket brings nothing from the slots."""
    push_to = expect(decode, PROMPT)
    begin(prefill, "a", PROMPT, push_to)
    with closing(prefill_engine()) as second:
        begin(second, "a", PROMPT, push_to)
        assert pushes(second).num_refused == 1
        params = finish(second, "a", decode)
        # The first one's push, named by the second one's ticket.
        finish(prefill, "a", decode)
        used = landings(decode).num_used
        decodes(decode, "a", PROMPT, params | {"push_id": push_to["push_id"]}, second)
        assert landings(decode).num_used == used
        run_idle(second)


def test_leave_from_a_host_that_cannot_be_named(decode: WholeEngine) -> None:
    """Nothing is pushed, and nothing of the push is kept for a peer that can never be told."""
    with closing(prefill_engine(allowed_peers=["*.cluster.local"])) as engine:
        begin(engine, "a", PROMPT, expect(decode, PROMPT) | {"host": "a..cluster.local"})
        assert pushes(engine).num_refused == 1
        finish(engine, "a")
        run_until(lambda: pushes(engine).num_ended == 1, engine)
        assert not engine.connector._parts.pushes._untold


def test_signed_leave() -> None:
    """With a key, leave from anywhere is good if it is signed, and none is if it was changed."""
    with closing(Engine(key=KEY, push_staging_bytes=1 << 20)) as decode:
        push_to = decode.scheduler.expect_push(a_request(PROMPT))
        assert push_to is not None
        for name, value in push_to.items():
            changed = push_to | {name: value + value if isinstance(value, str | list) else 7}
            with pytest.raises(InvalidTransferParams):
                PushParams.from_dict(changed, key=KEY)
        far = attrs.evolve(PushParams.from_dict(push_to, key=KEY), host="10.1.2.3")
        assert PushParams.from_dict(far.to_dict(key=KEY), key=KEY) == far
        with pytest.raises(InvalidTransferParams, match="not signed"):
            PushParams.from_dict(far.to_dict(), key=KEY)


def test_another_shape_is_refused() -> None:
    """KV of another model is not pushed; the prefill goes on."""
    with (
        closing(Engine(fingerprint="other", push_staging_bytes=1 << 20)) as decode,
        closing(Engine()) as prefill,
    ):
        push_to = decode.scheduler.expect_push(a_request(PROMPT))
        request = a_request(PROMPT, {"do_remote_decode": True, "push_to": push_to})
        uid = prefill.add(request)
        prefill.step_until(lambda: prefill.scheduler.stats().pushes.num_refused)
        ticket = prefill.finish(request, uid, list(range(1, 13)), num_tokens=len(PROMPT))
        assert ticket["push_id"] == ""
        until(lambda: _has_all_slots(decode.scheduler.stats().landings))


def test_another_number_of_ranks_is_refused_in_words(caplog: pytest.LogCaptureFixture) -> None:
    """An engine that would write with two ranks hears why it may not from the one that has one."""
    caplog.set_level("INFO")
    with (
        closing(Engine(push_staging_bytes=1 << 20)) as decode,
        half(handshakes=[a_handshake()] * 2) as prefill,
    ):
        push_to = decode.scheduler.expect_push(a_request(PROMPT))
        prefill.add(a_request(PROMPT, {"do_remote_decode": True, "push_to": push_to}))
        until(lambda: prefill.take_events() or prefill.connector.stats().pushes.num_refused)
        assert "its claim names 2 ranks and this engine has 1" in caplog.text
        until(lambda: _has_all_slots(decode.scheduler.stats().landings))


def _has_all_slots(counts: LandingCounts) -> bool:
    return counts.num_free_slots == counts.num_slots


def test_an_engine_that_takes_no_pushes(prefill: WholeEngine, decode: WholeEngine) -> None:
    """A claim at an engine without staging memory is refused, and nothing comes of it."""
    push_to = expect(decode, PROMPT)
    with closing(Engine()) as other:
        host, port = other.scheduler.address
        name = other.scheduler._name
        wrong = {"host": host, "port": port, "engine_id": name.engine_id, "epoch": name.epoch}
        before = pushes(prefill).num_refused
        begin(prefill, "a", PROMPT, push_to | wrong)
        assert pushes(prefill).num_refused == before + 1
        decodes(decode, "a", PROMPT, finish(prefill, "a", decode), prefill)
    decode.connector.call_off_push(push_to)


@pytest.mark.parametrize("kind", [Claim, PushEnded])
def test_messages_that_get_lost_or_come_twice(
    prefill: WholeEngine, decode: WholeEngine, monkeypatch: pytest.MonkeyPatch, kind: type[Message]
) -> None:
    """The end is told until it is answered; a claim that is not answered costs a read."""
    answer, num_lost = LandingDesk.answer, 0

    async def answer_late(desk: LandingDesk, message: Any, sender: str) -> Message:
        nonlocal num_lost
        if isinstance(message, kind) and num_lost < 2:
            num_lost += 1
            # The first question gets lost, then an answer.
            if num_lost == 2:
                await answer(desk, message, sender)
            raise ProtocolError("lost")
        return await answer(desk, message, sender)

    monkeypatch.setattr(LandingDesk, "answer", answer_late)
    begin(prefill, "a", PROMPT, expect(decode, PROMPT))
    params = finish(prefill, "a", decode)
    used = landings(decode).num_used
    decodes(decode, "a", PROMPT, params, prefill)
    assert landings(decode).num_used == used + (kind is PushEnded)
    run_until(lambda: num_lost >= 1, prefill, decode)


def test_a_claim_that_comes_after_the_end(
    prefill: WholeEngine, decode: WholeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim that its own end has overtaken gets nothing."""
    claim = PeerLink.claim

    async def claim_late(link: PeerLink, message: Claim) -> PeerInfo:
        await asyncio.sleep(0.3)
        return await claim(link, message)

    monkeypatch.setattr(PeerLink, "claim", claim_late)
    add(prefill, expect(decode, PROMPT))
    prefill.scheduler.abort_requests(["a"])
    refused = landings(decode).num_refused
    run_until(lambda: landings(decode).num_refused > refused, prefill, decode)
    assert _has_all_slots(landings(decode))


def test_a_leave_fits_its_slots() -> None:
    """No more slots are set aside than the prompt's KV needs, its last token left out."""
    with closing(Engine(push_staging_bytes=8 * 4096)) as engine:
        for num_tokens, num_slots in ((1, None), (2, 1), (5, 1), (6, 2), (400, 4)):
            push_to = engine.scheduler.expect_push(a_request(list(range(num_tokens))))
            assert (push_to and len(push_to["slots"])) == num_slots
