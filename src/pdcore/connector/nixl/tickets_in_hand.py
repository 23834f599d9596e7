"""The tickets that a decode engine was given: kept alive until they are used or given back."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pdcore.clock import Clock
from pdcore.connector.nixl.config import NixlConfig
from pdcore.connector.nixl.control import ControlThread
from pdcore.connector.nixl.driver import Fact, TicketDriver
from pdcore.connector.nixl.inbox import Inbox
from pdcore.connector.nixl.links import PeerLinks
from pdcore.connector.nixl.params import TransferParams
from pdcore.connector.nixl.params_reader import ParamsReader
from pdcore.connector.nixl.pull import Pull, PullState
from pdcore.connector.nixl.push.landing_desk import LandingDesk
from pdcore.request import Request

__all__ = ["TicketsInHand"]


class TicketsInHand:
    """One `Pull` for each ticket, from its request's arrival until it can be forgotten.

    The scheduler's thread owns it.

    Args:
        config: the connector's settings.
        links: the known peers.
        landings: what peers pushed ahead of their tickets.
        control: where drivers run.
        clock: whose seconds leases are counted in.
        notify: wakes the engine's loop.
    """

    def __init__(
        self,
        *,
        config: NixlConfig,
        links: PeerLinks,
        landings: LandingDesk,
        control: ControlThread,
        clock: Clock,
        notify: Callable[[], None],
    ) -> None:
        self._links = links
        self._landings = landings
        self._control = control
        self._clock = clock
        self._params = ParamsReader(config)
        self._pulls: dict[int, Pull] = {}
        self._by_request: dict[Request, Pull] = {}
        self._facts: Inbox[Fact] = Inbox(notify)

    def __len__(self) -> int:
        return len(self._pulls)

    def get(self, uid: int) -> Pull | None:
        """The ticket of a request, which may have ended."""
        return self._pulls.get(uid)

    def of(self, request: Request) -> Pull | None:
        """The ticket of a request that has not ended."""
        return self._by_request.get(request)

    def take(self, request: Request, uid: int) -> None:
        """Begin to renew a request's ticket, and shake hands with its engine.

        Raises:
            InvalidTransferParams: the ticket is not acceptable.
        """
        params = self._ticket_of(request)
        link = self._links.get(params)
        link.num_users += 1
        driver = TicketDriver(
            uid,
            params,
            link=link,
            clock=self._clock,
            tell=self._facts.put,
            landed=self._landings.wait,
        )
        pull = Pull(uid=uid, request=request, params=params, driver=driver)
        self._pulls[uid] = self._by_request[request] = pull
        self._control.spawn_later(driver.first_renewal_s, driver.keep)
        pull.peer = None if self._landings.want(params) else link.info
        if pull.peer is None:
            self._control.spawn(driver.introduce())

    def refuse(self, request: Request) -> None:
        """Give the ticket of a request back that is not taken, unless another has it as well.

        Raises:
            InvalidTransferParams: the ticket is not acceptable.
        """
        params = self._ticket_of(request)
        others = (pull.params for pull in self._pulls.values())
        if all(other.transfer_id != params.transfer_id for other in others):
            notice = self._links.get(params).release(
                params.transfer_id, "the decode engine refused its request"
            )
            self._control.spawn(notice, is_short=True)
            self._landings.refuse(params)

    def take_facts(self) -> Iterator[tuple[Pull, Fact]]:
        """What the control thread has learned since about tickets, forgotten ones left out."""
        for fact in self._facts.take():
            # Looked up one by one: what is made of a fact may have a ticket forgotten.
            pull = self._pulls.get(fact.uid)
            if pull is not None:
                yield pull, fact

    def request_ended(self, pull: Pull) -> None:
        """Nothing new is asked with a ticket; it stays until it is forgotten."""
        pull.is_live = False
        self._by_request.pop(pull.request, None)

    def give_back(self, pull: Pull, reason: str) -> None:
        """Renew a ticket no more, and tell its engine, unless it was used, that it will not be."""
        pull.driver.stop()
        self.drop_landing(pull)
        if not pull.is_returned:
            pull.is_returned = True
            notice = pull.driver.link.release(pull.params.transfer_id, reason)
            self._control.spawn(notice, is_short=True)

    def give_back_all(self, reason: str) -> None:
        """`give_back` every ticket."""
        for pull in tuple(self._pulls.values()):
            self.give_back(pull, reason)

    def drop_landing(self, pull: Pull) -> None:
        """Nothing that was pushed is needed for a pull; unless another one with the same ticket is
        reading it, when that one's end frees the slots."""
        push_id = pull.params.push_id
        if push_id and not any(
            it.params.push_id == push_id and it.state is PullState.READING
            for it in self._pulls.values()
        ):
            self._landings.drop(pull.params)

    def forget(self, pull: Pull) -> None:
        """The request has ended, and its ticket was used or given back."""
        del self._pulls[pull.uid]
        pull.driver.link.num_users -= 1

    def _ticket_of(self, request: Request) -> TransferParams:
        assert request.kv_transfer_params is not None
        return self._params.read(TransferParams, request.kv_transfer_params, request)
