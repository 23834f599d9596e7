"""The end of a push is told until it is heard, and that has its limits."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
from nixl_engines import until
from nixl_pushes import (
    PROMPT,
    WHOLE_ENGINES,
    SlowWire,
    begin,
    decode_engine,
    decodes,
    expect,
    finish,
    pushes,
    run_idle,
)
from nixl_whole_engine import NUM_BLOCKS, WholeEngine, run_until

from pdcore.connector.nixl.link import PeerLink
from pdcore.connector.nixl.protocol import PushEnded
from pdcore.connector.nixl.push import desk as push_desk
from pdcore.errors import InvalidTransferParams, PeerLost

pytestmark = WHOLE_ENGINES


class BadLine:
    """Loses what a prefill engine says of ends, until `mend`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._is_bad = True
        ask = PeerLink.ask

        async def ask_over_it(link: PeerLink, request: Any, reply_type: Any) -> Any:
            if isinstance(request, PushEnded) and self._is_bad:
                raise PeerLost("the line is bad")
            return await ask(link, request, reply_type)

        monkeypatch.setattr(PeerLink, "ask", ask_over_it)

    def mend(self) -> None:
        self._is_bad = False


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> BadLine:
    return BadLine(monkeypatch)


def test_news_of_an_end_wake_an_engine_that_rests(
    prefill: WholeEngine, decode: WholeEngine, line: BadLine
) -> None:
    """A loop that steps only while there are requests takes them in; then there is nothing."""
    begin(prefill, "a", PROMPT, expect(decode, PROMPT))
    prefill.scheduler.abort_requests(["a"])
    run_until(lambda: not prefill.scheduler.has_requests(), prefill)
    line.mend()
    until(prefill.scheduler.has_requests)
    assert pushes(prefill).num_ended == 0
    prefill.step()
    assert pushes(prefill).num_ended == 1
    assert not prefill.scheduler.has_requests()
    run_idle(decode)


def test_there_is_a_limit_to_ends_that_cannot_be_told(
    prefill: WholeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leave that names an engine which is gone costs a bounded amount of memory, and no request."""
    monkeypatch.setattr(push_desk, "_MAX_NUM_PUSHES", 3)
    with closing(decode_engine()) as decode:
        leaves = [expect(decode, PROMPT[:9]) for _ in range(8)]
    for i, push_to in enumerate(leaves):
        params = {"do_remote_decode": True, "push_to": push_to}
        prefill.add(f"a{i}", PROMPT[:9], max_tokens=1, params=params)
        run_until(lambda i=i: f"a{i}" in prefill.ends, prefill)
        assert prefill.ends[f"a{i}"].kv_transfer_params is not None
    assert len(prefill.connector._parts.pushes._untold) == 3
    assert pushes(prefill).num_refused >= 5


def test_leave_is_not_used_again_while_the_first_end_is_not_told(
    prefill: WholeEngine, decode: WholeEngine, line: BadLine
) -> None:
    """That end would free slots which the second request writes to."""
    push_to = expect(decode, PROMPT)
    begin(prefill, "a", PROMPT, push_to)
    prefill.scheduler.abort_requests(["a"])
    params = {"do_remote_decode": True, "push_to": push_to}
    with pytest.raises(InvalidTransferParams, match="in use"):
        prefill.add("b", PROMPT, max_tokens=1, params=params)
    line.mend()
    run_until(lambda: pushes(prefill).num_ended == 1, prefill, decode)
    begin(prefill, "c", PROMPT, push_to)
    assert (pushes(prefill).num_started, pushes(prefill).num_refused) == (1, 1)
    finish(prefill, "c", decode)
    run_idle(prefill, decode)


def test_the_end_of_a_push_does_not_end_its_ticket(
    prefill: WholeEngine, decode: WholeEngine, wire: SlowWire
) -> None:
    """Called off while the prompt was computed, it ends after the hand-over, whose blocks stay."""
    push_to = expect(decode, PROMPT)
    begin(prefill, "a", PROMPT, push_to)
    prefill.step()
    until(lambda: wire.num_posted == 1)
    decode.connector.call_off_push(push_to)
    prefill.scheduler.pause()
    run_until(lambda: prefill.connector._parts.pushes.awaits_reports, prefill)
    prefill.scheduler.resume()
    params = finish(prefill, "a")
    wire.clear()
    run_until(lambda: pushes(prefill).num_ended == 1, prefill, decode)
    for _ in range(3):
        prefill.step()
    assert prefill.num_free == NUM_BLOCKS - 1 - -(-len(PROMPT) // 4)
    decodes(decode, "a", PROMPT, params, prefill)
    run_idle(prefill, decode)
