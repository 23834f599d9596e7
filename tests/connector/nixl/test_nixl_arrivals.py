"""A load is vouched for as soon as its last rank has it, and used only once that is reported."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import attrs
import pytest
from nixl_engines import until
from nixl_halves import PROMPT, Half, a_handshake, half

from pdcore.connector.base import KVLoad
from pdcore.connector.nixl.link import PeerLink
from pdcore.connector.nixl.notices import NoticeKind, NoticeSender
from pdcore.connector.nixl.protocol import Answer
from pdcore.connector.stats import TicketCounts
from pdcore.messages import TransferKey
from pdcore.request import Request

NUM_RANKS = 2


@pytest.fixture
def prefill() -> Iterator[Half]:
    """A prefill engine."""
    with half(handshakes=[a_handshake()] * NUM_RANKS) as made:
        yield made


@pytest.fixture
def decode() -> Iterator[Half]:
    """A decode engine of two ranks."""
    with half(handshakes=[a_handshake()] * NUM_RANKS) as made:
        yield made


class Reading:
    """A load that the workers have, and what they say of it."""

    def __init__(self, prefill: Half, decode: Half, asked: list[str]) -> None:
        self._prefill, self._decode, self._asked = prefill, decode, asked
        self.is_answer_held = False
        self.request = Request("d", PROMPT, kv_transfer_params=prefill.ticket())
        self.uid = decode.add(self.request)
        self.load: KVLoad = decode.load(self.request, self.uid)
        self.meta = decode.plan_with_read()
        assert self.meta.doorbell is not None
        self._senders = [NoticeSender(self.meta.doorbell, rank=rank) for rank in range(NUM_RANKS)]

    def say(
        self, rank: int, transfer: TransferKey | None = None, kind: NoticeKind = NoticeKind.ARRIVED
    ) -> None:
        """A rank says something, by default that its data is here; returns when it was heard."""
        self._senders[rank].send(kind, self.load.transfer if transfer is None else transfer)
        heard = self._decode.num_notices
        self._senders[rank].send(NoticeKind.REPORT)
        until(lambda: self._decode.num_notices > heard)

    @property
    def num_asked(self) -> int:
        """How often the peer was asked to vouch, as far as `say` has returned."""
        return len(self._asked)

    def until_vouched(self) -> None:
        """Wait for the peer's word to have come in."""
        tickets = self._decode.connector._parts.tickets

        def has_come() -> bool:
            self._decode.take_events()
            return tickets.get(self.uid).word is not None

        until(has_come)

    def close(self) -> None:
        for sender in self._senders:
            sender.close()


@pytest.fixture
def reading(prefill: Half, decode: Half, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reading]:
    """A load that both ranks are reading."""
    asked: list[str] = []
    accept = PeerLink.accept

    async def count(link: PeerLink, transfer_id: str, digest: str, read: str) -> Answer:
        asked.append(read)
        while made.is_answer_held:
            await asyncio.sleep(0.001)
        return await accept(link, transfer_id, digest, read)

    monkeypatch.setattr(PeerLink, "accept", count)
    made = Reading(prefill, decode, asked)
    yield made
    made.close()


def test_the_last_rank_has_the_peer_asked(decode: Half, reading: Reading) -> None:
    """Nobody asks while a rank is missing, whoever repeats itself; then the peer is asked, once,
    though the report is not here. The load is used after the report, without asking again."""
    reading.say(0)
    reading.say(0)
    assert reading.num_asked == 0
    reading.say(1)
    reading.until_vouched()
    reading.say(1)
    assert decode.received == []
    decode.workers_say(finished=reading.load)
    decode.take_events()
    assert decode.received == [reading.load.transfer]
    assert reading.num_asked == 1


def test_the_report_may_come_first(decode: Half, reading: Reading) -> None:
    """A notice that comes after the report changes nothing: the peer is asked once."""
    reading.say(1)
    decode.workers_say(finished=reading.load)
    reading.say(0)
    decode.until_event()
    assert decode.received == [reading.load.transfer]
    assert reading.num_asked == 1


def test_the_report_may_come_while_the_peer_is_asked(decode: Half, reading: Reading) -> None:
    """Between the question and its answer the report does not ask again, and ends nothing."""
    reading.is_answer_held = True
    reading.say(0)
    reading.say(1)
    decode.workers_say(finished=reading.load)
    reading.say(1, kind=NoticeKind.REPORT)
    assert reading.num_asked == 1
    decode.take_events()
    assert decode.received == []
    reading.is_answer_held = False
    decode.until_event()
    assert decode.received == [reading.load.transfer]


@pytest.mark.parametrize("other", ["uid", "attempt", "rank"])
def test_notices_of_others_do_not_count(reading: Reading, other: str) -> None:
    """Another load, another attempt, or a rank that is not there is not the one awaited."""
    uid, attempt = reading.load.transfer
    reading.say(0)
    if other == "rank":
        assert reading.meta.doorbell is not None
        reading._senders.append(NoticeSender(reading.meta.doorbell, rank=NUM_RANKS))
        reading.say(NUM_RANKS)
    else:
        named = TransferKey(uid + 1, attempt) if other == "uid" else TransferKey(uid, attempt + 1)
        reading.say(1, named)
    assert reading.num_asked == 0


def test_a_load_that_nobody_wants_is_not_asked_for(decode: Half, reading: Reading) -> None:
    """Once it is cancelled, its notices are ignored; its ticket goes back after the report."""
    decode.connector.cancel(reading.load.transfer)
    reading.say(0)
    reading.say(1)
    assert reading.num_asked == 0
    decode.workers_say(finished=reading.load)
    decode.take_events()
    assert decode.received == [reading.load.transfer]
    until(lambda: reading._prefill.connector.stats().tickets.num_released == 1)


def test_a_load_that_nobody_wants_is_still_helped_to_its_end(
    decode: Half, reading: Reading
) -> None:
    """Its blocks are kept until nothing writes to them, so its peer is called as for any other."""
    desk = reading._prefill.connector._parts.hand_overs
    decode.connector.cancel(reading.load.transfer)
    reading.say(0, kind=NoticeKind.NEEDS_PEER)
    until(desk.keep_workers_awake)
    decode.workers_say(failed=reading.load)
    decode.take_events()
    assert decode.connector._parts.pulls.arrivals._expected == {}


def test_a_load_cancelled_after_the_question_still_waits_for_its_report(
    decode: Half, reading: Reading
) -> None:
    """The peer's word does not end it: something may still be written to its blocks."""
    reading.say(0)
    reading.say(1)
    reading.until_vouched()
    decode.connector.cancel(reading.load.transfer)
    decode.take_events()
    assert decode.received == decode.failed == []
    decode.workers_say(finished=reading.load)
    decode.take_events()
    assert decode.received == [reading.load.transfer]
    assert decode.connector.stats().loads.num_cancelled == 1
    decode.connector.close()  # Whatever is said of the ticket has been said then.
    counts = TicketCounts(num_granted=1, num_accepted=1)
    assert reading._prefill.connector.stats().tickets == counts


def test_a_ticket_that_was_asked_for_is_not_tried_again(decode: Half, reading: Reading) -> None:
    """A load that fails after the question has used its ticket up: its blocks are gone there."""
    reading.say(0)
    reading.say(1)
    assert reading.num_asked == 1
    decode.workers_say(failed=reading.load)
    decode.take_events()
    assert [failure.transfer for failure in decode.failed] == [reading.load.transfer]
    assert decode.match(reading.request) == 0


def test_a_read_given_again_is_waited_for_again(decode: Half, reading: Reading) -> None:
    """What ranks said of a load before it was given to them once more does not count."""
    reading.say(0)
    decode.connector.rebuild_connector_meta(reading.meta)
    decode.plan_with_read()
    reading.say(1)
    assert reading.num_asked == 0
    reading.say(0)
    assert reading.num_asked == 1


def test_a_read_that_needs_its_peer_is_announced(reading: Reading) -> None:
    """A rank's call for help is passed on to the peer, which then has its workers look often."""
    desk = reading._prefill.connector._parts.hand_overs
    assert not desk.keep_workers_awake()
    reading.say(0, kind=NoticeKind.NEEDS_PEER)
    until(desk.keep_workers_awake)
    assert reading.num_asked == 0


def test_a_stranger_cannot_have_a_load_vouched_for(reading: Reading) -> None:
    """Without the engine's secret no notice counts, also not one from the right port."""
    assert reading.meta.doorbell is not None
    forged = attrs.evolve(reading.meta.doorbell, token=bytes(32))
    for rank in range(NUM_RANKS):
        sender = NoticeSender(forged, rank=rank)
        sender.send(NoticeKind.ARRIVED, reading.load.transfer)
        sender.close()
    reading.say(0)
    assert reading.num_asked == 0
