"""Talks to a decode engine about one push, on the control thread."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from pdcore.clock import Clock
from pdcore.connector.nixl.client import PeerRestarted
from pdcore.connector.nixl.link import PeerLink
from pdcore.connector.nixl.protocol import Answer, Claim, PushEnded, Pushing
from pdcore.connector.nixl.push.facts import Claimed, ClaimFailed, NotWanted, PushFact, PushTold
from pdcore.connector.nixl.push.params import PushParams
from pdcore.errors import HandshakeRefused, PeerLost

__all__ = ["PushDriver"]

logger = logging.getLogger(__name__)

_MAX_TELLING_S = 600.0
_MAX_PAUSE_S = 5.0


class PushDriver:
    """Asks a peer for its slots, tells it that this engine lives, and when the push has ended.

    Args:
        uid: the request's internal number.
        params: the leave to push.
        link: to the peer.
        clock: whose seconds the lease is counted in.
        life_host, life_ports: where this engine's ranks can be seen to live.
        tell: takes facts; called on the control thread.
    """

    def __init__(
        self,
        uid: int,
        params: PushParams,
        *,
        link: PeerLink,
        clock: Clock,
        life_host: str,
        life_ports: tuple[int, ...],
        tell: Callable[[PushFact], None],
    ) -> None:
        self._uid = uid
        self._params = params
        self._link = link
        self._clock = clock
        self._life_host = life_host
        self._life_ports = life_ports
        self._tell = tell
        self._is_over = False
        self._has_leave = False

    @property
    def link(self) -> PeerLink:
        return self._link

    async def keep(self) -> None:
        """Claim the slots, then give signs of life until the end is told or the peer says no."""
        try:
            await self._claim_and_keep()
        except Exception as error:
            logger.exception("a push to %s failed", self._link.where)
            uid, cause = self._uid, f"an internal error: {error!r}"
            has_leave = self._has_leave
            self._tell(
                NotWanted(uid=uid, cause=cause) if has_leave else ClaimFailed(uid=uid, cause=cause)
            )

    async def end(self, *, ticket_id: str, num_blocks: int, was_cut: bool) -> None:
        """Tell the peer that nothing is written any more, again and again until it is heard.

        A peer that cannot be told keeps the slots in quarantine, so it is tried for ten minutes.
        One that hears of the end before the claim refuses the claim.
        """
        self._is_over = True
        message = PushEnded(
            push_id=self._params.push_id,
            ticket_id=ticket_id,
            num_blocks=num_blocks,
            was_cut=was_cut,
        )
        await self._say_until_heard(message)
        self._tell(PushTold(uid=self._uid))

    async def _claim_and_keep(self) -> None:
        try:
            peer = await self._link.claim(
                Claim(
                    push_id=self._params.push_id,
                    slots=self._params.slots,
                    prompt_digest=self._params.prompt_digest,
                    life_host=self._life_host,
                    life_ports=self._life_ports,
                )
            )
        except (HandshakeRefused, PeerLost) as error:
            self._tell(ClaimFailed(uid=self._uid, cause=str(error)))
            return
        self._has_leave = True
        self._tell(Claimed(uid=self._uid, peer=peer))
        heard_at = self._clock.now()
        while True:
            await asyncio.sleep(self._params.lease_s / 3)
            if self._is_over:
                return
            try:
                answer = await self._link.ask(Pushing(push_id=self._params.push_id), Answer)
            except (HandshakeRefused, PeerRestarted) as error:
                cause = str(error)
            except PeerLost as error:
                if self._clock.now() - heard_at < self._params.lease_s:
                    continue
                cause = str(error)
            else:
                heard_at, cause = self._clock.now(), "" if answer.ok else answer.reason
            if cause:
                self._tell(NotWanted(uid=self._uid, cause=cause))
                return

    async def _say_until_heard(self, message: PushEnded) -> None:
        deadline, pause_s = self._clock.now() + _MAX_TELLING_S, 0.05
        while True:
            try:
                await self._link.ask(message, Answer)
                return
            except (HandshakeRefused, PeerLost) as error:
                trouble: Exception = error
                is_gone = isinstance(error, PeerRestarted)
                if is_gone or (isinstance(error, HandshakeRefused) and not self._has_leave):
                    return
            except Exception as error:
                trouble = error
            if self._clock.now() >= deadline:
                logger.warning("the end of a push could not be told: %r", trouble)
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
