"""Notices from workers to their scheduler half."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nixl_engines import until

from pdcore.connector.nixl import notices
from pdcore.connector.nixl.doorbell import DoorbellListener, ring
from pdcore.connector.nixl.notices import Notice, NoticeKind, NoticeListener, NoticeSender
from pdcore.messages import TransferKey

ids = st.integers(0, 2**63 - 1)


@pytest.fixture(scope="module")
def listener() -> Iterator[NoticeListener]:
    """A scheduler half's end."""
    with closing(NoticeListener("127.0.0.1")) as made:
        yield made


@given(kind=st.sampled_from(NoticeKind), uid=ids, attempt=ids, rank=st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_notice_comes_as_it_was_sent(
    listener: NoticeListener, kind: NoticeKind, uid: int, attempt: int, rank: int
) -> None:
    """All of its words survive the way, and it is taken once."""
    with closing(NoticeSender(listener.address, rank=rank)) as sender:
        sender.send(kind, TransferKey(uid, attempt))
    assert until(listener.take) == [Notice(kind, rank, TransferKey(uid, attempt))]
    assert listener.take() == []


def _one_datagram() -> bytes:
    """What a sender sends, as the wire has it, and a listener's key with it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as wire:
        wire.bind(("127.0.0.1", 0))
        wire.settimeout(5)
        with closing(NoticeListener("127.0.0.1")) as other:
            address = type(other.address)(
                host="127.0.0.1", port=wire.getsockname()[1], token=bytes(32)
            )
        with closing(NoticeSender(address, rank=1)) as sender:
            sender.send(NoticeKind.ARRIVED, TransferKey(7, 2))
        return wire.recv(1000)


@given(change=st.integers(0, 8 * 37 - 1) | st.integers(-40, -1), data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_changed_notice_is_none(change: int, data: st.DataObject) -> None:
    """One flipped bit, or another length, and it is dropped; the untouched one is taken."""
    sent = _one_datagram()
    if change < 0:
        size = data.draw(st.integers(0, 80).filter(lambda n: n != len(sent)))
        changed = (sent + bytes(80))[:size]
    else:
        changed = bytearray(sent)
        changed[change // 8] ^= 1 << change % 8
    with closing(NoticeListener("127.0.0.1")) as listener:
        listener._key = bytes(32)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            for text in (changed, sent):
                stranger.sendto(text, ("127.0.0.1", listener.address.port))
        assert until(listener.take) == [Notice(NoticeKind.ARRIVED, 1, TransferKey(7, 2))]


class Flood:
    """A socket on which there is always one more datagram."""

    def __init__(self) -> None:
        self.num_taken = 0

    def recv(self, size: int) -> bytes:
        self.num_taken += 1
        assert self.num_taken < 10_000, "they are taken for ever"
        return bytes(size)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("kind", [NoticeListener, DoorbellListener])
def test_a_flood_does_not_keep_the_thread(
    kind: type[NoticeListener] | type[DoorbellListener], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever sends faster than can be taken has no more than a share of the thread's time."""
    with closing(kind("127.0.0.1")) as listener:
        listener._socket.close()
        monkeypatch.setattr(listener, "_socket", Flood())
        assert not listener.take()


def test_what_is_left_is_taken_with_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of one call loses nothing."""
    monkeypatch.setattr(notices, "MAX_AT_ONCE", 2)
    with closing(NoticeListener("127.0.0.1")) as listener:
        with closing(NoticeSender(listener.address, rank=0)) as sender:
            for uid in range(5):
                sender.send(NoticeKind.ARRIVED, TransferKey(uid, 1))
        taken: list[int] = []

        def take() -> bool:
            taken.extend(notice.transfer.uid for notice in listener.take())
            return len(taken) == 5

        until(take)
        assert taken == list(range(5))


def test_nobody_listening_is_no_error() -> None:
    """A sender outlives its listener, and can be closed."""
    with closing(NoticeListener("127.0.0.1")) as listener:
        address = listener.address
    with closing(NoticeSender(address, rank=0)) as sender:
        for _ in range(3):
            sender.send(NoticeKind.REPORT)
    sender.send(NoticeKind.REPORT)


def test_a_worker_with_many_files_open_hears_its_doorbell() -> None:
    """Descriptors beyond 1023, which `select` cannot take, are waited for as any other."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("this process may not open so many files")
    with ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1024):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        listener = stack.enter_context(closing(DoorbellListener("127.0.0.1")))
        assert listener.fileno() > 1023
        assert listener.wait(0.0) is None
        assert listener.wait(0.01) is None
        ring(listener.address, 3.0)
        assert listener.wait(5.0) == 3.0
        ring(listener.address, 2.0)
        assert until(lambda: listener.wait(0.0005)) == 2.0
