"""Notices that are captured and sent again: later, in any order, or to another engine."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import attrs
import pytest
from nixl_engines import until
from nixl_whole_engine import NUM_BLOCKS, WholeEngine, prompts, run_until

from pdcore.connector.nixl.agent import TransferAgent
from pdcore.connector.nixl.meta import NixlMeta
from pdcore.connector.nixl.notices import Notice, NoticeKind, NoticeSender
from pdcore.connector.stats import LoadCounts
from pdcore.messages import TransferKey
from pdcore.request import Request

pytestmark = [
    pytest.mark.nixl,
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("no_errors"),
]

HOST = "127.0.0.1"
NUM_LOADS = 4
MARKER = TransferKey(2**62, 0)


class Relay:
    """Stands between an engine's workers and its scheduler half, and keeps what they send.

    Attributes:
        seen: every datagram so far.
        is_held: whether live ones are kept from the scheduler half.
    """

    def __init__(self, port: int) -> None:
        self._target = (HOST, port)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((HOST, 0))
        self.port = self._socket.getsockname()[1]
        self.seen: list[bytes] = []
        self.is_held = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def send(self, datagrams: list[bytes]) -> None:
        for data in datagrams:
            self._socket.sendto(data, self._target)

    def close(self) -> None:
        if self._thread.is_alive():
            self._socket.sendto(b"", (HOST, self.port))
            self._thread.join()
            self._socket.close()

    def _run(self) -> None:
        while data := self._socket.recv(1000):
            self.seen.append(data)
            if not self.is_held:
                self.send([data])


class TappedEngine(WholeEngine):
    """A decode engine whose notices go through a relay.

    Attributes:
        heard: the notices that its scheduler half took for its workers'.
    """

    def __init__(self) -> None:
        super().__init__()
        parts, add_doorbell = self.connector._parts, self.connector._with_doorbell
        self.relay = Relay(parts.notices.address.port)
        address = attrs.evolve(parts.notices.address, port=self.relay.port)
        self.heard: list[Notice] = []
        hear = parts.pulls.arrivals.hear

        def note(notice: Notice) -> Any:
            self.heard.append(notice)
            return hear(notice)

        def divert(orders: NixlMeta) -> NixlMeta:
            return attrs.evolve(add_doorbell(orders), doorbell=address)

        parts.pulls.arrivals.hear = note
        self.connector._with_doorbell = divert

    def replay(self, datagrams: list[bytes], rng: random.Random) -> None:
        """Send captured datagrams in any order, some more than once; return when all were heard."""
        self.relay.send(rng.choices(datagrams, k=2 * len(datagrams)))
        self.relay.send(rng.sample(datagrams, k=len(datagrams)))
        marker = attrs.evolve(self.connector._parts.notices.address, port=self.relay.port)
        heard = len(self.heard)
        with closing(NoticeSender(marker, rank=0)) as sender:
            sender.send(NoticeKind.REPORT, MARKER)
        until(lambda: any(notice.transfer == MARKER for notice in self.heard[heard:]))

    def close(self) -> None:
        super().close()
        self.relay.close()


class Gate:
    """Lets no read of this process begin while it is shut."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._is_open = threading.Event()
        self._is_open.set()
        post_read = TransferAgent.post_read

        def post_later(agent: TransferAgent, *ids: Any) -> Any:
            assert self._is_open.wait(60)
            return post_read(agent, *ids)

        monkeypatch.setattr(TransferAgent, "post_read", post_later)

    def shut(self) -> None:
        self._is_open.clear()

    def open(self) -> None:
        self._is_open.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open()


@pytest.fixture
def prefill() -> Iterator[WholeEngine]:
    """A prefill engine whose tickets last."""
    with closing(WholeEngine(lease_s=60)) as engine:
        yield engine


def begin(decode: TappedEngine, prefill: WholeEngine, name: str, *, seed: int) -> list[Request]:
    """Give some prompts' tickets to a decode engine."""
    requests = []
    for i, prompt in enumerate(prompts(NUM_LOADS, seed=seed)):
        params = prefill.prefill(f"{name}{i}", prompt, decode)
        requests.append(decode.add(f"{name}{i}", prompt, max_tokens=5, params=params))
    return requests


def until_ended(decode: TappedEngine, prefill: WholeEngine, requests: list[Request]) -> None:
    """See the requests end with the tokens of solo runs, and with all of their KV loaded."""
    names = [request.request_id for request in requests]
    run_until(lambda: decode.ends.keys() >= set(names), decode, prefill)
    for request in requests:
        assert decode.tokens[request.request_id] == decode.runner.solo_tokens(request)
        end = decode.ends[request.request_id]
        assert end.num_external_tokens == request.num_prompt_tokens - 1


def are_being_read(decode: TappedEngine, requests: list[Request]) -> bool:
    reasons = [decode.scheduler.explain(request.request_id) for request in requests]
    return all(reason and "being read" in (reason.waits_on or "") for reason in reasons)


def use_up_free_blocks(prefill: WholeEngine) -> None:
    """Have every block that nobody holds written anew."""
    for i, prompt in enumerate(prompts(12, seed=99, shared=60)):
        prefill.add(f"other{i}", prompt[::-1], max_tokens=1)
        run_until(lambda i=i: f"other{i}" in prefill.ends, prefill)


def counts(engine: WholeEngine) -> Any:
    return engine.scheduler.stats().connector


@pytest.mark.parametrize("source", ["itself", "its former life", "another engine"])
def test_old_notices_have_nobody_vouch_for_what_is_not_here(
    prefill: WholeEngine, gate: Gate, source: str
) -> None:
    """While nothing of a load is here, every notice that ever was is sent again. Its ticket stays
    as it is, though the peer would give its blocks to others at once, and the load ends well."""
    rng = random.Random(3)
    with ExitStack() as stack:
        first = stack.enter_context(closing(TappedEngine()))
        until_ended(first, prefill, begin(first, prefill, "a", seed=1))
        # Their number is not that of the loads: what is heard late needs no second word.
        until(lambda: len(first.relay.seen) >= NUM_LOADS)
        if source == "its former life":
            first.close()
        decode = first if source == "itself" else stack.enter_context(closing(TappedEngine()))
        before = counts(prefill).tickets.num_accepted
        assert before == NUM_LOADS
        gate.shut()
        requests = begin(decode, prefill, "b", seed=2)
        run_until(lambda: are_being_read(decode, requests), decode, prefill)
        decode.replay(first.relay.seen, rng)
        use_up_free_blocks(prefill)
        assert counts(prefill).tickets.num_accepted == before
        gate.open()
        until_ended(decode, prefill, requests)
        num_loads = NUM_LOADS * (2 if source == "itself" else 1)
        expected = LoadCounts(num_started=num_loads, num_finished=num_loads)
        assert counts(decode).loads == expected
        run_until(lambda: prefill.num_free == decode.num_free == NUM_BLOCKS - 1, prefill, decode)


@pytest.mark.parametrize("seed", range(3))
def test_notices_in_any_order_and_number(prefill: WholeEngine, seed: int) -> None:
    """Of all that workers have said so far, anything comes at any time, several times or never:
    loads take longer, and that is all."""
    rng = random.Random(seed)
    with closing(TappedEngine()) as decode:
        decode.relay.is_held = True
        everything: list[Request] = []
        for number in range(3):
            requests = begin(decode, prefill, f"{number}-", seed=10 * seed + number)
            everything += requests

            def shuffle() -> bool:
                seen = decode.relay.seen
                decode.relay.send(rng.choices(seen, k=rng.randrange(4)) if seen else [])
                return decode.ends.keys() >= {it.request_id for it in requests}  # noqa: B023

            run_until(shuffle, decode, prefill)
            until_ended(decode, prefill, requests)
        run_until(lambda: prefill.num_free == decode.num_free == NUM_BLOCKS - 1, prefill, decode)
        num_loads = len(everything)
        assert counts(decode).loads == LoadCounts(num_started=num_loads, num_finished=num_loads)
        assert counts(prefill).tickets.num_accepted == num_loads
        assert len(decode.heard) > num_loads
