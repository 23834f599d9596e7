"""Who may stay connected to the side channel when there is not room for all."""

from __future__ import annotations

import asyncio

from pdcore.connector.nixl.channel import Channel

__all__ = ["Places"]


class Places:
    """A number of places for peers, and as many for strangers, who have not shown the key.

    Strangers push out strangers alone, the oldest first. A peer that comes takes the place of the
    one that has been idle for longest; one that is being answered keeps its place. When all are,
    the next to be done makes room.

    The event loop's thread owns it.

    Args:
        num_places: how many peers may be connected at once.
    """

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._free = asyncio.Semaphore(num_places)
        self._num_waiting = 0
        self._strangers: dict[Channel, None] = {}
        # Those that wait for a request, the longest idle first.
        self._idle: dict[Channel, None] = {}
        self._busy: set[Channel] = set()

    def greet(self, stranger: Channel) -> None:
        """Somebody connected."""
        if len(self._strangers) >= self._num_places:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.close()
        self._strangers[stranger] = None

    async def seat(self, channel: Channel, *, timeout_s: float) -> bool:
        """A stranger has shown the key: give it a place, as one that is being answered.

        Returns:
            Whether there is one for it within the time.
        """
        self._strangers.pop(channel, None)
        if self._num_waiting >= self._num_places:
            return False
        if self._idle and self._free.locked():
            self._dismiss(next(iter(self._idle)))
        has_place = await self._wait(channel, timeout_s)
        if has_place:
            self._busy.add(channel)
        return has_place

    def rest(self, channel: Channel) -> bool:
        """A peer has been answered. Returns whether it may stay for its next request."""
        if self._num_waiting:
            return False
        self._busy.discard(channel)
        self._idle[channel] = None
        return True

    def attend(self, channel: Channel) -> None:
        """A peer has sent a request, which is being answered until `rest`."""
        if channel in self._idle:
            del self._idle[channel]
            self._busy.add(channel)

    def leave(self, channel: Channel) -> None:
        """A connection has ended, whoever it was. May be called twice."""
        self._strangers.pop(channel, None)
        if channel in self._idle or channel in self._busy:
            self._idle.pop(channel, None)
            self._busy.discard(channel)
            self._free.release()

    async def _wait(self, channel: Channel, timeout_s: float) -> bool:
        """Take a free place, or the next one that is, as long as the one it is for is there."""
        taking = asyncio.ensure_future(self._free.acquire())
        leaving = asyncio.ensure_future(channel.wait_closed())
        self._num_waiting += 1
        try:
            await asyncio.wait(
                (taking, leaving), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            self._num_waiting -= 1
            for task in (taking, leaving):
                task.cancel()  # Of one that is done, that changes nothing.
        return taking.done() and not taking.cancelled()

    def _dismiss(self, channel: Channel) -> None:
        # A request of it that is on its way is lost with the connection; its sender repeats it.
        self.leave(channel)
        channel.close()

    def __repr__(self) -> str:
        return (
            f"<Places {len(self._strangers)} strangers, {len(self._idle)} idle, "
            f"{len(self._busy)} being answered, {self._num_waiting} waiting>"
        )
