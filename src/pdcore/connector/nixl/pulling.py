"""A decode engine's side of the scheduler half: loads from tickets."""

from __future__ import annotations

from collections.abc import Callable

from pdcore.connector.base import KVLoad
from pdcore.connector.load_tally import LoadTally
from pdcore.connector.nixl.arrivals import Arrivals
from pdcore.connector.nixl.config import NixlConfig
from pdcore.connector.nixl.control import ControlThread
from pdcore.connector.nixl.driver import (
    AcceptAnswered,
    Fact,
    Introduced,
    IntroductionFailed,
    TicketLost,
)
from pdcore.connector.nixl.meta import NixlMeta, ReadTask
from pdcore.connector.nixl.orders import WorkerOrders
from pdcore.connector.nixl.pull import Pull, PullState
from pdcore.connector.nixl.push.landing_desk import LandingDesk
from pdcore.connector.nixl.tickets_in_hand import TicketsInHand
from pdcore.errors import TransferError
from pdcore.messages import LoadFailure, TransferKey, TransferReport
from pdcore.request import Request

__all__ = ["PullDesk"]

_CANCELLED = "the load was cancelled before it began"


class PullDesk:
    """Turns tickets into loads, and vouches for a load only when the peer does.

    The scheduler's thread owns it. What the control thread learns comes in as facts about tickets,
    which `take_events` applies; so no state here is shared.

    Args:
        config: the connector's settings.
        tickets: what loads are made from.
        landings: what peers pushed ahead of their tickets.
        control: where drivers run.
        notify: wakes the engine's loop.
    """

    def __init__(
        self,
        *,
        config: NixlConfig,
        tickets: TicketsInHand,
        landings: LandingDesk,
        control: ControlThread,
        notify: Callable[[], None],
    ) -> None:
        self._config = config
        self._tickets = tickets
        self._landings = landings
        self._control = control
        self._notify = notify
        self._by_transfer: dict[TransferKey, Pull] = {}
        self._finished: list[TransferKey] = []
        self._failed: list[LoadFailure] = []
        self._orders = WorkerOrders()
        self.arrivals = Arrivals()
        self.tally = LoadTally()

    # What the scheduler asks.

    def num_matched_tokens(self, request: Request, num_local_tokens: int) -> int:
        """How many tokens beyond the local ones this request's ticket can bring."""
        pull = self._tickets.of(request)
        return 0 if pull is None else pull.num_tokens_beyond(num_local_tokens)

    def begin(self, load: KVLoad) -> None:
        """Start a load: with the next plan, or as soon as the peer is known."""
        pull = self._tickets.of(load.request)
        if pull is None or pull.num_tokens_beyond(load.num_local_tokens) == 0:
            raise TransferError(
                f"request {load.request.request_id!r} has no ticket that could be loaded"
            )
        pull.check(load, block_size=self._config.block_size)
        pull.load = load
        pull.is_cancelled = pull.is_asked = False
        pull.word = None
        pull.num_attempts += 1
        self._by_transfer[load.transfer] = pull
        self.tally.started()
        if pull.trouble:
            self._fail(pull, pull.trouble)
        elif pull.peer is not None:
            self._queue_read(pull)
        else:
            pull.state = PullState.SHAKING_HANDS
            self._control.spawn(pull.driver.introduce())

    def undo(self, load: KVLoad) -> None:
        """Forget a load whose plan never reached a worker."""
        pull = self._by_transfer.pop(load.transfer, None)
        if pull is None:
            return
        self._orders.drop(load.transfer)
        self.arrivals.forget(load.transfer)
        self.tally.undone()
        pull.load = None
        pull.num_attempts -= 1
        if pull.state is not PullState.DONE:
            pull.state = PullState.WAITING

    def cancel(self, transfer: TransferKey) -> None:
        """Nobody wants a load: report it once it is quiet, then give its ticket back."""
        pull = self._by_transfer.get(transfer)
        if pull is None or pull.is_cancelled:
            return
        pull.is_cancelled = True
        if pull.state is PullState.READING:
            self._stop_listening(pull)
            self._orders.cancel(transfer)
        elif pull.state in (PullState.SHAKING_HANDS, PullState.POSTED):
            self._orders.drop(transfer)
            self._fail(pull, _CANCELLED)

    def cut_off(self, transfer: TransferKey) -> None:
        """Stop everything from a load's peer by force."""
        pull = self._by_transfer.get(transfer)
        if pull is not None and pull.state is PullState.READING:
            self._orders.cut_off(pull.params.peer_id, "it did not finish a cancelled load in time")
            # Said again, in case the worker never heard of the load or of its end.
            self._orders.cancel(transfer)

    def finish(self, uid: int) -> None:
        """The request ended: give its ticket back, once nothing is read with it any more."""
        pull = self._tickets.get(uid)
        if pull is None:
            return
        self._tickets.request_ended(pull)
        if pull.transfer is not None and pull.transfer in self._by_transfer:
            self.cancel(pull.transfer)
        self._settle(pull)

    def note_admitted(self, uid: int) -> None:
        """The request runs. If it did so without its ticket, the ticket goes back at once."""
        pull = self._tickets.get(uid)
        if pull is not None and pull.state is PullState.WAITING:
            self._tickets.give_back(pull, "the decode engine did not need it")
            pull.state = PullState.DONE

    def explain(self, request: Request) -> str | None:
        """What a parked request waits for, and from whom."""
        pull = self._tickets.of(request)
        if pull is None or pull.state in (PullState.WAITING, PullState.DONE):
            return None
        where = pull.driver.link.where
        num_tokens = 0 if pull.load is None else pull.load.num_external_tokens
        if self._landings.is_landing(pull.params):
            return f"KV of {num_tokens} tokens that {where} still pushes"
        return f"KV of {num_tokens} tokens from {where}, which {pull.state.value}"

    # What goes to the workers, and what comes from them.

    def take_orders(self) -> NixlMeta | None:
        """The orders for the next plan; None when the workers need not hear of it."""
        if not (self._orders or self.num_reading):
            return None
        return self._orders.take(self._give_out)

    def retake_orders(self, meta: NixlMeta) -> None:
        """Orders were lost on the way: give them again."""
        for task in meta.reads:
            pull = self._by_transfer.get(task.transfer)
            if pull is None or pull.state is not PullState.READING:
                continue
            if pull.is_cancelled:
                self._fail(pull, _CANCELLED)
            else:
                self._queue_read(pull)
                self._notify()
        self.repeat_cancels(meta)

    def repeat_cancels(self, meta: NixlMeta) -> None:
        """The workers may have missed these cancellations and cut-offs: order them again."""
        for transfer in meta.cancels:
            if self._is_reading(transfer):
                self._orders.cancel(transfer)
        reading = {
            pull.params.peer_id
            for pull in self._by_transfer.values()
            if pull.state is PullState.READING
        }
        for order in meta.cut_offs:
            if order.peer_id in reading:
                self._orders.cut_off(order.peer_id, order.cause)

    def end_reads(self, meta: NixlMeta) -> None:
        """The workers may have missed these reads, and none may begin twice: have them end.

        A worker answers for a read that it never heard of as for one that it stops.
        """
        for task in meta.reads:
            if self._is_reading(task.transfer):
                self._orders.cancel(task.transfer)

    def hear_report(self, report: TransferReport) -> None:
        """Take what the workers say: a load that is all there still needs the peer's word."""
        for stats in report.measured:
            if self._is_reading(stats.transfer):
                self.tally.measured(stats)
        for transfer in report.finished_recving:
            if self._is_awaited(transfer):
                self._data_arrived(self._by_transfer[transfer])
        for failure in report.failed:
            if self._is_awaited(failure.transfer):
                pull = self._by_transfer[failure.transfer]
                self._control.call(pull.driver.link.forget)
                pull.peer = None
                # Once the peer was asked, the ticket is used up, whatever it says.
                self._stop_listening(pull)
                pull.is_returned = pull.is_returned or pull.is_asked
                self._fail(pull, failure.cause)

    def take_events(self) -> tuple[tuple[TransferKey, ...], tuple[LoadFailure, ...]]:
        """Apply what the control thread learned; return the loads that finished and failed."""
        for pull, fact in self._tickets.take_facts():
            self._apply(pull, fact)
        finished, self._finished = tuple(self._finished), []
        failed, self._failed = tuple(self._failed), []
        return finished, failed

    @property
    def num_reading(self) -> int:
        """How many loads the workers have."""
        return sum(pull.state is PullState.READING for pull in self._by_transfer.values())

    @property
    def has_orders(self) -> bool:
        """Whether the next plan has something for the workers."""
        return bool(self._orders)

    @property
    def has_pending(self) -> bool:
        """Whether a load is under way, or its end is not told yet."""
        return bool(self._by_transfer or self._finished or self._failed)

    # Inner workings.

    def _apply(self, pull: Pull, fact: Fact) -> None:
        match fact:
            case Introduced():
                pull.peer = fact.peer
                if pull.state is PullState.SHAKING_HANDS:
                    self._queue_read(pull)
            case IntroductionFailed():
                pull.trouble = fact.cause if fact.is_final else pull.trouble
                if pull.state is PullState.SHAKING_HANDS:
                    self._fail(pull, fact.cause)
            case TicketLost():
                self._ticket_lost(pull, fact)
            case AcceptAnswered():
                self._accept_answered(pull, fact)

    def _ticket_lost(self, pull: Pull, fact: TicketLost) -> None:
        if pull.state is not PullState.DONE:
            self.tally.expired()
        pull.trouble = pull.trouble or fact.cause
        if pull.state in (PullState.SHAKING_HANDS, PullState.POSTED):
            assert pull.transfer is not None
            self._orders.drop(pull.transfer)
            self._fail(pull, fact.cause)
        elif pull.state is PullState.READING and fact.is_peer_gone:
            self._orders.cut_off(pull.params.peer_id, fact.cause)

    def _accept_answered(self, pull: Pull, fact: AcceptAnswered) -> None:
        if fact.transfer != pull.transfer:
            return
        if pull.state is PullState.READING:
            pull.word = fact  # The report is on its way.
        elif pull.state is PullState.ACCEPTING:
            self._conclude(pull, fact)

    def _conclude(self, pull: Pull, fact: AcceptAnswered) -> None:
        """The workers have reported, and the peer has spoken."""
        accept_s = fact.accept_s
        pull.is_returned = fact.is_consumed
        if fact.cause:
            pull.trouble = fact.cause
            self._fail(pull, fact.cause, is_rejected=fact.is_consumed, accept_s=accept_s)
        else:
            self._end_load(pull, PullState.DONE, is_good=True, accept_s=accept_s)
            self._finished.append(fact.transfer)
            self._settle(pull)

    def _data_arrived(self, pull: Pull) -> None:
        assert pull.transfer is not None
        self._stop_listening(pull)
        if pull.is_cancelled and not pull.is_asked:
            # Nobody will look at the data, so nobody need vouch for it.
            transfer = pull.transfer
            self._end_load(pull, PullState.DONE, is_good=True)
            self._finished.append(transfer)
            self._settle(pull)
            self._notify()
            return
        pull.state = PullState.ACCEPTING
        if pull.word is not None:
            self._conclude(pull, pull.word)
            self._notify()
        elif not pull.is_asked:
            self._control.spawn(pull.driver.accept(pull.transfer))

    def _stop_listening(self, pull: Pull) -> None:
        """Let nobody ask for the newest load from now on, and note whether somebody did."""
        assert pull.transfer is not None
        pull.is_asked = self.arrivals.close(pull.transfer) or pull.is_asked

    def _fail(
        self, pull: Pull, cause: str, *, is_rejected: bool = False, accept_s: float | None = None
    ) -> None:
        assert pull.load is not None
        failure = LoadFailure(
            transfer=pull.load.transfer, num_valid_tokens=pull.load.num_local_tokens, cause=cause
        )
        is_over = pull.is_cancelled or bool(pull.trouble)
        self._end_load(
            pull,
            PullState.DONE if is_over else PullState.WAITING,
            is_good=False,
            is_rejected=is_rejected,
            accept_s=accept_s,
        )
        self._failed.append(failure)
        self._settle(pull)
        self._notify()

    def _end_load(
        self,
        pull: Pull,
        state: PullState,
        *,
        is_good: bool,
        is_rejected: bool = False,
        accept_s: float | None = None,
    ) -> None:
        assert pull.transfer is not None
        self._by_transfer.pop(pull.transfer, None)
        self.arrivals.forget(pull.transfer)
        pull.state = state
        self._tickets.drop_landing(pull)
        self.tally.ended(
            pull.transfer,
            is_good=is_good,
            is_cancelled=pull.is_cancelled,
            is_rejected=is_rejected,
            accept_s=accept_s,
        )

    def _settle(self, pull: Pull) -> None:
        """Give a ticket back that will not be used, and forget a request that is gone."""
        is_loading = pull.transfer is not None and pull.transfer in self._by_transfer
        if is_loading or self._tickets.get(pull.uid) is None:
            return
        if pull.state is PullState.DONE or not pull.is_live:
            self._tickets.give_back(pull, pull.trouble or "the request ended")
        if not pull.is_live:
            self._tickets.forget(pull)

    def _give_out(self, pull: Pull) -> ReadTask:
        pull.state = PullState.READING
        assert pull.transfer is not None
        self.arrivals.expect(pull.transfer, pull.driver)
        return pull.read_task(self._landings.take(pull.params))

    def _queue_read(self, pull: Pull) -> None:
        assert pull.transfer is not None
        assert pull.peer is not None
        block_size = pull.peer.block_size or self._config.block_size
        if pull.params.block_size != block_size:
            pull.trouble = (
                f"the ticket counts in blocks of {pull.params.block_size} tokens, but "
                f"{pull.peer.name} has blocks of {block_size}"
            )
            self._fail(pull, pull.trouble)
            return
        pull.state = PullState.POSTED
        self._orders.read(pull.transfer, pull)

    def _is_awaited(self, transfer: TransferKey) -> bool:
        """Whether a report about a load says something new; counts it if it does not."""
        is_awaited = self._is_reading(transfer)
        self.tally.reported(transfer, is_awaited=is_awaited)
        return is_awaited

    def _is_reading(self, transfer: TransferKey) -> bool:
        pull = self._by_transfer.get(transfer)
        return pull is not None and pull.state is PullState.READING
