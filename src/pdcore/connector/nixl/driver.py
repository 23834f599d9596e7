"""Keeps one ticket alive and asks for its acceptance, on the control thread."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import attrs

from pdcore.clock import Clock
from pdcore.connector.nixl.client import PeerRestarted
from pdcore.connector.nixl.link import PeerLink
from pdcore.connector.nixl.meta import PeerInfo
from pdcore.connector.nixl.params import TransferParams
from pdcore.errors import HandshakeRefused, PeerLost
from pdcore.messages import TransferKey

__all__ = [
    "AcceptAnswered",
    "Fact",
    "Introduced",
    "IntroductionFailed",
    "TicketDriver",
    "TicketLost",
]

logger = logging.getLogger(__name__)

_FIRST_RENEWAL_S = 0.02
_FIRST_RENEWAL_SHARE = 0.02
"""Of the lease."""


@attrs.frozen(kw_only=True)
class Introduced:
    """The peer's KV memory is known."""

    uid: int
    peer: PeerInfo


@attrs.frozen(kw_only=True)
class IntroductionFailed:
    """The handshake went wrong; ``is_final`` when trying again cannot help."""

    uid: int
    cause: str
    is_final: bool


@attrs.frozen(kw_only=True)
class TicketLost:
    """The ticket cannot be used any more; ``is_peer_gone`` when the peer is to blame."""

    uid: int
    cause: str
    is_peer_gone: bool


@attrs.frozen(kw_only=True)
class AcceptAnswered:
    """The peer vouches for a load, or ``cause`` says why not, ``accept_s`` after it was asked."""

    uid: int
    transfer: TransferKey
    cause: str
    is_consumed: bool
    accept_s: float


Fact = Introduced | IntroductionFailed | TicketLost | AcceptAnswered


class TicketDriver:
    """Talks to the peer about one ticket and tells the scheduler's thread what came of it.

    Args:
        uid: the request's internal number.
        params: the ticket.
        link: to the peer.
        clock: whose seconds the lease is counted in.
        tell: takes facts; called on the control thread.
        landed: waits until what the peer pushes for the ticket is here, or given up.
    """

    def __init__(
        self,
        uid: int,
        params: TransferParams,
        *,
        link: PeerLink,
        clock: Clock,
        tell: Callable[[Fact], None],
        landed: Callable[[TransferParams], Awaitable[None]],
    ) -> None:
        self._uid = uid
        self._params = params
        self._link = link
        self._clock = clock
        self._tell = tell
        self._landed = landed
        self._is_over = False
        self._leased_until = clock.now() + params.lease_s

    @property
    def link(self) -> PeerLink:
        return self._link

    def stop(self) -> None:
        """Renew no more."""
        self._is_over = True

    async def introduce(self) -> None:
        """Shake hands with the peer, wait for what it pushes, and tell how that went."""
        try:
            await self._landed(self._params)
            peer = await self._link.describe()
        except (HandshakeRefused, PeerRestarted) as error:
            self._tell(IntroductionFailed(uid=self._uid, cause=str(error), is_final=True))
        except PeerLost as error:
            self._tell(IntroductionFailed(uid=self._uid, cause=str(error), is_final=False))
        except Exception as error:
            logger.exception("the handshake with %s failed", self._link.where)
            cause = f"an internal error of the handshake: {error!r}"
            self._tell(IntroductionFailed(uid=self._uid, cause=cause, is_final=False))
        else:
            self._tell(Introduced(uid=self._uid, peer=peer))

    @property
    def first_renewal_s(self) -> float:
        """When to begin to `keep`, in seconds from the ticket's arrival: a load that begins at once
        is often over by then."""
        return min(_FIRST_RENEWAL_S, _FIRST_RENEWAL_SHARE * self._params.lease_s)

    async def keep(self) -> None:
        """Renew the lease until `stop`, and tell when that fails for good."""
        try:
            while not self._is_over:
                pause_s = await self._renew()
                if pause_s is None:
                    return
                await asyncio.sleep(pause_s)
        except Exception as error:
            logger.exception("renewing a lease at %s failed", self._link.where)
            self._give_up(f"the lease is not renewed: {error!r}", is_peer_gone=False)

    async def announce(self) -> None:
        """Ask the peer's workers to look often for a read, which needs their answers to end."""
        if not self._is_over:
            await self._link.announce(self._params.transfer_id)

    async def accept(self, transfer: TransferKey) -> None:
        """Ask the peer to vouch for what was read, and tell what it says."""
        self.stop()
        asked_at = self._clock.now()
        cause, is_consumed = "", True
        try:
            answer = await self._link.accept(
                self._params.transfer_id,
                self._params.contents.digest(),
                f"{transfer.uid}-{transfer.attempt}",
            )
            if not answer.ok:
                cause = f"{self._link.where} does not vouch for the data: {answer.reason}"
        except (PeerLost, HandshakeRefused) as error:
            cause, is_consumed = f"nobody vouches for the data: {error}", False
        except Exception as error:
            logger.exception("asking %s to vouch failed", self._link.where)
            cause, is_consumed = f"nobody vouches for the data: {error!r}", False
        self._tell(
            AcceptAnswered(
                uid=self._uid,
                transfer=transfer,
                cause=cause,
                is_consumed=is_consumed,
                accept_s=self._clock.now() - asked_at,
            )
        )

    async def _renew(self) -> float | None:
        """Renew once; return how long to wait before the next time, or None when it is over."""
        try:
            answer = await self._link.renew(self._params.transfer_id)
        except (HandshakeRefused, PeerRestarted) as error:
            self._give_up(str(error), is_peer_gone=isinstance(error, PeerRestarted))
            return None
        except PeerLost as error:
            if self._clock.now() < self._leased_until:
                return min(1.0, self._params.lease_s / 10)
            self._give_up(f"the lease could not be renewed in time: {error}", is_peer_gone=True)
            return None
        if not answer.ok:
            self._give_up(f"{self._link.where}: {answer.reason}", is_peer_gone=False)
            return None
        self._leased_until = self._clock.now() + answer.remaining_s
        return max(0.01, answer.remaining_s / 3)

    def _give_up(self, cause: str, *, is_peer_gone: bool) -> None:
        if not self._is_over:
            self._tell(TicketLost(uid=self._uid, cause=cause, is_peer_gone=is_peer_gone))
