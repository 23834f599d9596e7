"""The plan of a run: its requests, and what befalls them and the engines. All of it from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Literal

import attrs
from chaos_messages import Notice, NoticeFault, PushNotice, TicketNotice, Timeouts, TransferFault

__all__ = ["DECODES", "PREFILLS", "EngineFault", "Job", "Plan", "make_plan"]

PREFILLS = ("P0", "P1")
DECODES = ("D0", "D1")

_VOCAB = 32_000
_TIMES = Timeouts()
_SCENARIO_LENGTH = 120
_TICKET_NOTICES: tuple[TicketNotice, ...] = ("Renew", "Reading", "Accept", "Release")
_PUSH_NOTICES: tuple[PushNotice, ...] = ("Claim", "Pushing", "PushEnded")
_NOTICE_FAULTS: tuple[Literal["drop", "lose reply", "delay", "repeat"], ...] = (
    "drop",
    "lose reply",
    "delay",
    "repeat",
)


@attrs.frozen(kw_only=True)
class Job:
    """One request, and what befalls it.

    Args:
        number: its place in the plan.
        request_id: its id; a job that follows another may have that one's.
        prompt, max_tokens, cache_salt: what is asked.
        stops_at: end it with a stop token at this place of its solo run, or None.
        prefill, decode: which engines.
        starts_after_s: seconds after it is its turn.
        holds_ticket_s: the client comes to the decode engine so much later.
        meets: jobs with the same number here come to the decode engine together.
        abort_at: in which stage the client gives up, or empty; abort_after_s: how long into it.
        is_walked_out: the client never comes to the decode engine.
        follows: the job that must have ended before this one is decoded, or None.
        deadline_s: in each of the engines, or None.
        is_pushed: the prefill engine may send what it computes ahead.
        leave_from: which decode engine gives leave to; empty is ``decode``.
        calls_off_after_s: the decode engine hears so much after its leave that no request comes.
        read_fault, write_fault, notice_faults: on the way.
        is_watched: the adversary is after this one, and leaves its engines alone until it ended.
    """

    number: int
    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    prefill: str
    decode: str
    cache_salt: str | None = None
    stops_at: int | None = None
    starts_after_s: float = 0.0
    holds_ticket_s: float = 0.0
    meets: int | None = None
    abort_at: Literal["", "prefill", "decode"] = ""
    abort_after_s: float = 0.0
    is_walked_out: bool = False
    follows: int | None = None
    deadline_s: float | None = None
    is_pushed: bool = False
    leave_from: str = ""
    calls_off_after_s: float | None = None
    read_fault: TransferFault | None = None
    write_fault: TransferFault | None = None
    notice_faults: tuple[NoticeFault, ...] = ()
    is_watched: bool = False


@attrs.frozen(kw_only=True)
class EngineFault:
    """What befalls an engine when the job ``at`` has begun.

    Args:
        engine: which.
        kind: killed and started anew after ``seconds``, or stopped for so long.
    """

    at: int
    engine: str
    kind: Literal["kill", "stop"]
    seconds: float


@attrs.frozen(kw_only=True)
class Plan:
    """What a run does."""

    seed: int
    jobs: tuple[Job, ...]
    engine_faults: tuple[EngineFault, ...]


def make_plan(seed: int, num_requests: int) -> Plan:
    """Draw a plan. It holds each directed scenario at least once, room permitting."""
    maker = _Maker(random.Random(seed))
    jobs = maker.jobs(num_requests)
    return Plan(seed=seed, jobs=jobs, engine_faults=maker.engine_faults(len(jobs)))


class _Maker:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._jobs: list[Job] = []
        self._prefixes = [self._tokens(rng.choice((16, 40, 64, 96, 160))) for _ in range(6)]

    def jobs(self, num_requests: int) -> tuple[Job, ...]:
        scenarios: list[Callable[[], None]] = [
            self._lapsed_ticket,
            self._late_write,
            self._crowd,
            self._id_again,
            self._lost_completion,
            self._walk_out,
            self._late_push,
            self._push_crowd,
            self._broken_pushes,
        ]
        first = scenarios.copy()
        self._rng.shuffle(first)
        while len(self._jobs) < num_requests:
            for _ in range(self._rng.randrange(3, 7)):
                self._plain()
            if first:
                first.pop()()
            elif self._rng.random() < 0.5:
                self._rng.choice(scenarios)()
        return tuple(self._jobs[:num_requests])

    def engine_faults(self, num_jobs: int) -> tuple[EngineFault, ...]:
        """About one for each 15 jobs, but none at the very end, where nobody would notice."""
        rng, faults = self._rng, []
        at = rng.randrange(4, 12)
        while at < num_jobs - 3:
            kind: Literal["kill", "stop"] = rng.choice(("kill", "stop"))
            seconds = rng.uniform(0.0, 0.5) if kind == "kill" else rng.uniform(0.2, 2.5)
            engine = rng.choice(PREFILLS + DECODES)
            faults.append(EngineFault(at=at, engine=engine, kind=kind, seconds=seconds))
            at += rng.randrange(8, 22)
        return tuple(faults)

    def _tokens(self, length: int) -> tuple[int, ...]:
        return tuple(self._rng.randrange(_VOCAB) for _ in range(length))

    def _add(self, **options: object) -> Job:
        number = len(self._jobs)
        defaults: dict[str, object] = {
            "number": number,
            "request_id": f"r{number}",
            "max_tokens": self._rng.randrange(2, 25),
            "prefill": self._rng.choice(PREFILLS),
            "decode": self._rng.choice(DECODES),
        }
        job = Job(**(defaults | options))  # type: ignore[arg-type]
        self._jobs.append(job)
        return job

    # Requests of all sorts, with whatever may befall any of them.

    def _plain(self) -> None:
        rng = self._rng
        notice_faults = self._notice_faults(_TICKET_NOTICES)
        push_options: dict[str, object] = {}
        if self._falls(0.5):
            push_options = self._push_options()
            notice_faults += self._notice_faults(_PUSH_NOTICES)
        abort_at: Literal["", "prefill", "decode"] = ""
        if self._falls(0.10):
            abort_at = rng.choice(("prefill", "decode"))
        self._add(
            prompt=self._prompt(),
            max_tokens=rng.choice((1, rng.randrange(2, 25))),
            cache_salt="tenant" if self._falls(0.15) else None,
            stops_at=rng.choice((0, 1, 3)) if self._falls(0.15) else None,
            abort_at=abort_at,
            abort_after_s=rng.uniform(0.0, 0.15),
            deadline_s=rng.uniform(0.05, 0.5) if self._falls(0.04) else None,
            holds_ticket_s=rng.uniform(0.1, 1.5) if self._falls(0.05) else 0.0,
            read_fault=self._slow_transfer(),
            notice_faults=notice_faults,
            **push_options,
        )

    def _push_options(self) -> dict[str, object]:
        rng = self._rng
        fault = TransferFault(is_lost=True) if self._falls(0.03) else self._slow_transfer()
        return {
            "is_pushed": True,
            # The other one may have blocks of another size, and then takes no pushes.
            "decode": DECODES[0] if self._falls(0.5) else rng.choice(DECODES),
            "leave_from": rng.choice(DECODES) if self._falls(0.08) else "",
            "calls_off_after_s": rng.uniform(0.0, 0.2) if self._falls(0.08) else None,
            "write_fault": fault,
        }

    def _slow_transfer(self) -> TransferFault | None:
        delay_s = self._rng.uniform(0.02, 0.4)
        return TransferFault(delay_s=delay_s) if self._falls(0.15) else None

    def _falls(self, probability: float) -> bool:
        return self._rng.random() < probability

    def _prompt(self) -> tuple[int, ...]:
        rng = self._rng
        kind = rng.randrange(10)
        if kind == 0:
            return self._tokens(rng.randrange(1, 9))
        if kind == 1:
            return self._tokens(rng.randrange(150, 300))
        if kind == 2 and self._jobs:
            return rng.choice(self._jobs).prompt
        prefix = rng.choice(self._prefixes)
        cut = rng.choice((len(prefix), rng.randrange(1, len(prefix) + 1)))
        return prefix[:cut] + self._tokens(rng.randrange(0, 60))

    def _notice_faults(self, notices: Sequence[Notice]) -> tuple[NoticeFault, ...]:
        rng = self._rng
        if not self._falls(0.25):
            return ()
        fault = NoticeFault(
            message=rng.choice(notices),
            kind=rng.choice(_NOTICE_FAULTS),
            count=rng.choice((1, 1, 3)),
            delay_s=rng.uniform(0.02, 0.45),
        )
        return (fault,)

    # Scenarios: what goes wrong only if several things happen in one order.

    def _long(self) -> tuple[int, ...]:
        return self._tokens(_SCENARIO_LENGTH + self._rng.randrange(32))

    def _lapsed_ticket(self) -> None:
        """The client comes late, no renewal gets through, and P has long had other use for the
        blocks. Only P knows; D's own count of the lease began when the client came."""
        rng = self._rng
        prefill, late_s = rng.choice(PREFILLS), 2 * _TIMES.lease_s + rng.uniform(0.0, 0.3)
        silence = (NoticeFault(message="Renew", kind="drop", count=50),)
        for _ in range(2):
            self._add(
                prompt=self._long(),
                prefill=prefill,
                holds_ticket_s=late_s,
                notice_faults=silence,
                is_watched=True,
            )
        for index in range(11):
            self._add(
                prompt=self._long(),
                max_tokens=2,
                prefill=prefill,
                starts_after_s=_TIMES.lease_s + 0.06 * index,
            )

    def _late_write(self) -> None:
        """A read is aborted under way. Its blocks look best to whoever comes next, who still uses
        them when the read lands; and others then find what was cached there."""
        rng = self._rng
        prefill, decode = rng.choice(PREFILLS), rng.choice(DECODES)
        where = {"prefill": prefill, "decode": decode, "is_watched": True}
        aborted = [
            self._add(
                prompt=self._long(),
                abort_at="decode",
                abort_after_s=0.25,
                read_fault=TransferFault(delay_s=0.6),
                **where,
            )
            for _ in range(2)
        ]
        users = [
            self._add(prompt=self._long(), max_tokens=150, follows=job.number, **where)
            for job in aborted
        ]
        where["is_watched"] = False
        for job in users * 2:
            self._add(prompt=job.prompt, max_tokens=2, starts_after_s=1.0, **where)

    def _crowd(self) -> None:
        """More comes to one D at once than its pool holds, and all of it to be read."""
        meets, decode = len(self._jobs), self._rng.choice(DECODES)
        for index in range(10):
            self._add(
                prompt=self._tokens(160),
                prefill=PREFILLS[index % 2],
                decode=decode,
                meets=meets,
                read_fault=TransferFault(delay_s=0.15),
            )

    def _id_again(self) -> None:
        """The client gives up and asks something else under the same id. The proxy sends it to the
        same D by way of another P; the first read ends while the second is under way. At both
        Ds, since much has to go on meanwhile as it should."""
        for decode in DECODES:
            self._ask_twice(self._rng.sample(PREFILLS, 2), decode)

    def _ask_twice(self, prefills: list[str], decode: str) -> None:
        first = self._add(
            prompt=self._long(),
            prefill=prefills[0],
            decode=decode,
            abort_at="decode",
            abort_after_s=0.3,
            read_fault=TransferFault(delay_s=1.1),
            is_watched=True,
        )
        self._add(
            prompt=self._long(),
            prefill=prefills[1],
            decode=decode,
            request_id=first.request_id,
            follows=first.number,
            read_fault=TransferFault(delay_s=1.8),
            is_watched=True,
        )

    def _lost_completion(self) -> None:
        """The data lands and nobody is told; others read from the same peer meanwhile."""
        where = {"prefill": self._rng.choice(PREFILLS), "decode": self._rng.choice(DECODES)}
        self._add(prompt=self._long(), read_fault=TransferFault(is_lost=True), **where)
        for _ in range(2):
            self._add(prompt=self._long(), **where)

    def _walk_out(self) -> None:
        """The client takes its ticket and is never seen again."""
        self._add(prompt=self._long(), is_walked_out=True)

    def _late_push(self) -> None:
        """A push is called off while a write of it is under way. Others come at once, whose pushes
        end soon, and whose data waits in its slots until that write lands."""
        rng = self._rng
        where = {"prefill": rng.choice(PREFILLS), "decode": DECODES[0], "is_pushed": True}
        for _ in range(3):
            self._add(
                prompt=self._long(),
                is_walked_out=True,
                calls_off_after_s=0.1,
                write_fault=TransferFault(delay_s=0.6),
                is_watched=True,
                **where,
            )
        for _ in range(3):
            self._add(
                prompt=self._long(),
                starts_after_s=0.2,
                holds_ticket_s=0.5,
                is_watched=True,
                **where,
            )

    def _broken_pushes(self) -> None:
        """A write fails, and with it what else is under way to that engine. What is in the slots
        then is nobody's KV."""
        where = {"prefill": self._rng.choice(PREFILLS), "decode": DECODES[0], "is_pushed": True}
        for _ in range(3):
            self._add(prompt=self._long(), write_fault=TransferFault(breaks=True), **where)

    def _push_crowd(self) -> None:
        """Leave is asked for more than there are slots; some of it is never used."""
        for index in range(10):
            self._add(
                prompt=self._long(),
                prefill=PREFILLS[index % 2],
                decode=DECODES[0],
                is_pushed=True,
                is_walked_out=index % 3 == 0,
                write_fault=TransferFault(delay_s=0.15),
            )
