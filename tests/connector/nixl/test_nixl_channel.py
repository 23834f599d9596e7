"""Frames on one connection of the side channel."""

from __future__ import annotations

import asyncio
import socket
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcore.connector.nixl.channel import Channel
from pdcore.connector.nixl.protocol import Answer, Message, Release, Renew, encode

MAX_FRAME_BYTES = 4096


def framed(messages: list[Message]) -> bytes:
    """Messages as the wire has them."""
    texts = [encode(message) for message in messages]
    return b"".join(len(text).to_bytes(4, "big") + text for text in texts)


async def connected() -> tuple[Channel, socket.socket]:
    """A channel, and the plain socket of its peer."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    _, channel = await asyncio.get_running_loop().create_connection(
        lambda: Channel(max_frame_bytes=MAX_FRAME_BYTES), sock=ours
    )
    return channel, theirs


names = st.text("abc", min_size=1, max_size=200)
messages = st.lists(
    st.builds(Renew, transfer_id=names)
    | st.builds(Release, transfer_id=names, reason=st.text("xyz", max_size=300))
    | st.builds(Answer, ok=st.booleans()),
    min_size=1,
    max_size=8,
)


@given(messages=messages, cuts=st.lists(st.integers(0, 3000), max_size=12))
@settings(deadline=None, max_examples=50)
def test_messages_come_in_order_however_they_are_cut(
    messages: list[Message], cuts: list[int]
) -> None:
    """Pieces of any size, also empty ones and several messages in one, give what was sent; after
    them the closed connection is told as such."""
    data = framed(messages)
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})

    async def receive_all() -> None:
        channel = Channel(max_frame_bytes=MAX_FRAME_BYTES)

        async def feed() -> None:
            for start, end in pairwise(edges):
                channel.data_received(data[start:end])
                await asyncio.sleep(0)
            channel.connection_lost(None)

        feeding = asyncio.create_task(feed())
        for message in messages:
            assert await channel.receive(timeout_s=5) == message
        with pytest.raises(EOFError):
            await channel.receive(timeout_s=5)
        await feeding

    asyncio.run(receive_all())


def test_a_message_that_does_not_end_is_not_waited_for_long() -> None:
    """``idle_s`` is for the beginning; once there is a byte, ``timeout_s`` counts."""

    async def receive_a_part() -> None:
        channel, theirs = await connected()
        loop = asyncio.get_running_loop()
        loop.call_later(0.1, theirs.send, framed([Renew(transfer_id="t")])[:3])
        began = loop.time()
        with pytest.raises(TimeoutError):
            await channel.receive(timeout_s=0.2, idle_s=30)
        assert 0.25 < loop.time() - began < 20
        channel.close()
        theirs.close()

    asyncio.run(receive_a_part())


def test_silence_ends_after_the_idle_time() -> None:
    """Nothing at all is waited for ``idle_s``, which may be longer than ``timeout_s``."""

    async def receive_nothing() -> None:
        channel, theirs = await connected()
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(TimeoutError):
            await channel.receive(timeout_s=0.01, idle_s=0.2)
        assert loop.time() - began > 0.15
        channel.close()
        theirs.close()

    asyncio.run(receive_nothing())


def test_a_sender_that_nobody_hears_out_has_to_wait() -> None:
    """What is sent ahead stays in the sender's hands beyond a frame or so, and none of it is lost
    when somebody listens."""
    message = Release(transfer_id="t", reason="x" * 400)
    frame = framed([message])
    num_sent = 20 * (1 << 20) // len(frame)

    async def flood() -> None:
        channel, theirs = await connected()
        theirs.setblocking(False)
        loop = asyncio.get_running_loop()
        sending = asyncio.create_task(loop.sock_sendall(theirs, frame * num_sent))
        await asyncio.sleep(0.1)
        assert not sending.done()
        assert len(channel._received) < (1 << 20)
        for _ in range(num_sent):
            assert await channel.receive(timeout_s=5) == message
        await sending
        channel.close()
        theirs.close()

    asyncio.run(flood())


def test_larger_frames_may_be_allowed_later() -> None:
    """What was sent ahead of the leave, and held up, comes through after it."""
    message = Release(transfer_id="t", reason="x" * 500)
    frame = framed([message])

    async def send_ahead() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_connection(lambda: Channel(max_frame_bytes=100), sock=ours)
        await loop.sock_sendall(theirs, framed([Renew(transfer_id="t")]) + frame[:-1])
        assert await channel.receive(timeout_s=5) == Renew(transfer_id="t")
        await asyncio.sleep(0.05)
        channel.allow_frames(MAX_FRAME_BYTES)
        await loop.sock_sendall(theirs, frame[-1:])
        assert await channel.receive(timeout_s=5) == message
        channel.close()
        theirs.close()

    asyncio.run(send_ahead())


def test_a_peer_that_takes_nothing_is_not_sent_to_for_ever() -> None:
    """`send` waits for room until its time is up."""
    message = Release(transfer_id="t", reason="x" * 500)

    async def fill() -> None:
        channel, theirs = await connected()
        while channel._may_send:
            sending = asyncio.create_task(channel.send(message, timeout_s=0.2))
            await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            await sending
        channel.close()
        theirs.close()

    asyncio.run(fill())


def test_a_sender_goes_on_when_there_is_room() -> None:
    """A send that had to wait ends as soon as the peer takes what was sent."""
    message = Release(transfer_id="t", reason="x" * 500)

    async def fill_and_drain() -> None:
        channel, theirs = await connected()
        theirs.setblocking(False)
        loop = asyncio.get_running_loop()
        while channel._may_send:
            sending = asyncio.create_task(channel.send(message, timeout_s=30))
            await asyncio.sleep(0)
        assert not sending.done()
        while not sending.done():
            await loop.sock_recv(theirs, 1 << 16)
        await sending
        channel.close()
        theirs.close()

    asyncio.run(fill_and_drain())


def test_what_was_sent_arrives_though_the_connection_is_closed() -> None:
    """`send` returns when the message is out of its sender's hands, however slow the peer is."""
    message = Release(transfer_id="t", reason="x" * 500)

    async def send_and_close() -> None:
        channel, theirs = await connected()
        theirs.setblocking(False)
        sent = 0
        assert channel._transport is not None
        while not channel._transport.get_write_buffer_size():
            sending = asyncio.create_task(channel.send(message, timeout_s=30))
            await asyncio.sleep(0)
            sent += 1
        sending.add_done_callback(lambda _: channel.close())
        received = bytearray()
        while part := await asyncio.get_running_loop().sock_recv(theirs, 1 << 16):
            received += part
        assert received == sent * framed([message])
        theirs.close()

    asyncio.run(send_and_close())


def test_nothing_is_sent_on_a_connection_that_was_closed() -> None:
    """It is an error at once, also before the event loop has noticed."""

    async def send_late() -> None:
        channel, theirs = await connected()
        channel.close()
        for _ in range(2):
            with pytest.raises(ConnectionResetError):
                await channel.send(Renew(transfer_id="t"), timeout_s=5)
            await asyncio.sleep(0.01)
        theirs.close()

    asyncio.run(send_late())
