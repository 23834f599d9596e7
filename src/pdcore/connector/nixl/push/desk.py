"""A prefill engine's side of pushes: blocks out as they become complete."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np

from pdcore.clock import Clock
from pdcore.connector.base import FinishedBlocks
from pdcore.connector.nixl.config import NixlConfig
from pdcore.connector.nixl.control import ControlThread
from pdcore.connector.nixl.inbox import Inbox
from pdcore.connector.nixl.links import PeerLinks
from pdcore.connector.nixl.meta import PushStop, PushTask
from pdcore.connector.nixl.params_reader import ParamsReader
from pdcore.connector.nixl.push.driver import PushDriver
from pdcore.connector.nixl.push.facts import Claimed, ClaimFailed, NotWanted, PushFact, PushTold
from pdcore.connector.nixl.push.params import PUSH_TO, PushParams
from pdcore.connector.nixl.push.push import Push
from pdcore.connector.stats import PushCounts
from pdcore.errors import InvalidTransferParams
from pdcore.messages import SchedulerOutput, TransferReport
from pdcore.request import Request

__all__ = ["PushDesk"]

logger = logging.getLogger(__name__)

_MAX_NUM_PUSHES = 4096
"""Under way, or ended and not told. The ends of pushes to an engine that is gone are told again and
again for minutes; who makes up leaves must not fill the memory with them."""


class PushDesk:
    """Orders the workers to send blocks as steps complete them, and vouches for what they sent.

    The scheduler's thread owns it. What the control thread learns comes in as facts, which
    `take_facts` applies. A push that goes wrong harms nobody: the peer reads what it lacks.

    Args:
        config: the connector's settings.
        links: the known peers.
        control: where drivers run.
        clock: whose seconds leases are counted in.
        notify: wakes the engine's loop.
        life_host: where the ranks can be seen to live.
    """

    def __init__(
        self,
        *,
        config: NixlConfig,
        links: PeerLinks,
        control: ControlThread,
        clock: Clock,
        notify: Callable[[], None],
        life_host: str,
    ) -> None:
        self._config = config
        self._links = links
        self._control = control
        self._clock = clock
        self._notify = notify
        self._life_host = life_host
        self._params = ParamsReader(config)
        self._pushes: dict[int, Push] = {}
        self._drivers: dict[int, PushDriver] = {}
        # Pushes that ended, until their peer knows it: uid -> push id.
        self._untold: dict[int, str] = {}
        self._facts: Inbox[PushFact] = Inbox(notify)
        self._released: list[str] = []
        self._counts: Counter[str] = Counter()
        self.life_ports: tuple[int, ...] = ()

    # What the scheduler says.

    def add(self, request: Request, uid: int) -> None:
        """Take a request's leave to push, if it has one, and claim the slots.

        Raises:
            InvalidTransferParams: the leave is not acceptable.
        """
        params = self._leave_of(request)
        if params is None:
            return
        if len(self._pushes) + len(self._untold) >= _MAX_NUM_PUSHES:
            self._counts["num_refused"] += 1
            logger.info("nothing is pushed for %s: too many pushes", request.request_id)
            return
        link = self._links.get(params)
        link.num_users += 1
        driver = PushDriver(
            uid,
            params,
            link=link,
            clock=self._clock,
            life_host=self._life_host,
            life_ports=self.life_ports,
            tell=self._facts.put,
        )
        self._pushes[uid] = Push(uid=uid, request=request, params=params)
        self._drivers[uid] = driver
        self._control.spawn(driver.keep())

    def plan(self, output: SchedulerOutput) -> tuple[tuple[PushTask, ...], tuple[PushStop, ...]]:
        """What the workers are to send after a plan's forward pass, and which pushes to end."""
        if not self._pushes:
            return (), ()
        live = [push for push in self._pushes.values() if not push.is_ending]
        running = self._follow(live, output) if live else []
        tasks = [task for push in running if (task := push.take_task()) is not None]
        stops = [
            PushStop(push_id=push.push_id, is_wanted=push.is_wanted)
            for push in self._pushes.values()
            if push.is_ending
        ]
        return tuple(tasks), tuple(stops)

    def retake(self, tasks: Iterable[PushTask]) -> None:
        """Orders were lost with a plan that no worker saw: give them again with the next plan that
        their requests run in. What stops pushes is said with every plan."""
        by_id = {push.push_id: push for push in self._pushes.values()}
        for task in tasks:
            if (push := by_id.get(task.push_id)) is not None:
                push.retake(task)

    def push_id_of(self, uid: int) -> str:
        """The push that sent parts of a request's KV ahead, or empty."""
        push = self._pushes.get(uid)
        is_of_use = push is not None and push.has_orders and not push.is_ending
        return push.push_id if push is not None and is_of_use else ""

    def finish(self, uid: int, blocks: FinishedBlocks, *, ticket_id: str) -> str:
        """The request ended. Returns a name under which its blocks must be held until they are no
        longer sent, or empty if nobody sends them or a ticket holds them."""
        push = self._pushes.get(uid)
        if push is None:
            return ""
        if ticket_id:
            push.keeps = ticket_id
        elif push.has_orders and blocks.block_ids.size:
            push.keeps, push.owns_hold = f"push {push.push_id}", True
        if ticket_id and not push.is_ending:
            push.hand_over(ticket_id, blocks)
        self._end(push, is_wanted=bool(ticket_id))
        return "" if ticket_id or uid not in self._pushes else push.keeps

    def hear_report(self, report: TransferReport) -> None:
        """Take what the workers say: a push has ended when it has on all ranks."""
        by_id = {push.push_id: push for push in self._pushes.values() if push.is_ending}
        for pushed in report.pushed:
            push = by_id.get(pushed.push_id)
            if push is None:
                continue
            # Said again, it may be that the rank has forgotten the push.
            push.reports.setdefault(pushed.rank, pushed)
            if len(push.reports) == len(self.life_ports):
                del by_id[push.push_id]
                self._conclude(push)

    def hold_back(self, released: Iterable[str]) -> tuple[str, ...]:
        """Which holds may go: those of ``released``, now or before, that nothing is sent from."""
        self._released += released
        if not self._released:
            return ()
        kept = {push.keeps for push in self._pushes.values()}
        free = tuple(name for name in self._released if name not in kept)
        self._released = [name for name in self._released if name in kept]
        return free

    def take_facts(self) -> None:
        """Apply what the control thread learned."""
        for fact in self._facts.take():
            self._apply(fact)

    @property
    def awaits_reports(self) -> bool:
        """Whether the workers must be asked for reports."""
        return any(push.is_ending for push in self._pushes.values())

    @property
    def has_pending(self) -> bool:
        """Whether blocks are held until nothing is sent from them, or news wait to be applied."""
        return bool(self._released or self._facts) or self.awaits_reports

    def counts(self) -> PushCounts:
        """What became of the pushes so far."""
        return PushCounts(**self._counts)

    def close(self) -> None:
        """The engine closes: its workers are closed by now, so nothing is sent any more."""
        for push in tuple(self._pushes.values()):
            del self._pushes[push.uid]
            self._say_end(push, ticket_id="", num_blocks=0, was_cut=True)

    # Inner workings.

    def _leave_of(self, request: Request) -> PushParams | None:
        push_to = (request.kv_transfer_params or {}).get(PUSH_TO)
        if push_to is None:
            return None
        params = self._params.read(PushParams, push_to, request)
        # While the peer has not heard of a push's end, that end could pass for this one's.
        in_use = {push.push_id for push in self._pushes.values()} | set(self._untold.values())
        if params.push_id in in_use:
            raise InvalidTransferParams(
                "push_to is in use by another request: ask expect_push() for each request"
            )
        return params

    def _follow(self, live: list[Push], output: SchedulerOutput) -> list[Push]:
        """Keep up with which blocks the requests have; return the pushes that run in this plan.

        What a plan says of a row holds if the plan runs, and only then. A plan that was taken back
        may have said other things, so what this one does not repeat is not relied on.
        """
        gone = set(output.finished_rows.tolist())
        given = {new.row: new.uid for new in output.scheduled_new_reqs}
        for push in live:
            if push.row in gone or given.get(push.row, push.uid) != push.uid:
                push.lose_row()
        by_uid = {push.uid: push for push in live}
        for new in output.scheduled_new_reqs:
            if (started := by_uid.get(new.uid)) is not None:
                self._counts["num_restarts"] += started.attempt > 0
                started.start(new)
        by_row = {push.row: push for push in live if push.row >= 0}
        changed = np.flatnonzero(np.isin(output.block_rows, list(by_row)))
        for at in changed.tolist():
            push = by_row[int(output.block_rows[at])]
            push.table[int(output.block_positions[at])] = int(output.block_ids[at])
        running = []
        for at in np.flatnonzero(np.isin(output.rows, list(by_row))).tolist():
            push = by_row[int(output.rows[at])]
            end = int(output.num_computed_tokens[at]) + int(output.num_scheduled_tokens[at])
            push.compute(end, block_size=self._config.block_size)
            running.append(push)
        return running

    def _apply(self, fact: PushFact) -> None:
        if isinstance(fact, PushTold):
            self._counts["num_ended"] += 1
            self._untold.pop(fact.uid, None)
            return
        push = self._pushes.get(fact.uid)
        if push is None or push.is_ending:
            return
        match fact:
            case Claimed():
                self._counts["num_started"] += 1
                push.peer = fact.peer
            case ClaimFailed():
                self._counts["num_refused"] += 1
                logger.info("nothing is pushed for %s: %s", push.request.request_id, fact.cause)
                self._end(push, is_wanted=False)
            case NotWanted():
                logger.info("no more is pushed for %s: %s", push.request.request_id, fact.cause)
                self._end(push, is_wanted=False)

    def _end(self, push: Push, *, is_wanted: bool) -> None:
        """Send nothing more; once nothing is sent any more, tell the peer."""
        push.is_wanted = push.is_wanted and is_wanted
        if not push.is_ending:
            push.is_ending = True
            if not push.has_orders:
                self._conclude(push)
            self._notify()

    def _conclude(self, push: Push) -> None:
        del self._pushes[push.uid]
        num_blocks = push.num_vouched() if push.is_wanted else 0
        self._counts["num_blocks"] += num_blocks
        self._say_end(
            push,
            ticket_id=push.ticket_id,
            num_blocks=num_blocks,
            was_cut=any(report.was_cut for report in push.reports.values()),
        )
        if push.owns_hold:
            self._released.append(push.keeps)
        self._notify()

    def _say_end(self, push: Push, *, ticket_id: str, num_blocks: int, was_cut: bool) -> None:
        driver = self._drivers.pop(push.uid)
        self._untold[push.uid] = push.push_id
        driver.link.num_users -= 1
        self._control.spawn(
            driver.end(ticket_id=ticket_id, num_blocks=num_blocks, was_cut=was_cut), is_short=True
        )
