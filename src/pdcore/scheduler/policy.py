"""Scheduling policies: who goes first, who waits, who gives way.

Subclass `SchedulingPolicy` and override the hooks you need. The scheduler itself guards token
budget, blocks and the progress of what runs, so no hook can break those.
"""

from __future__ import annotations

import enum
import math
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from pdcore.connector.base import ExternalMatch
from pdcore.messages import StepResult
from pdcore.request import Request
from pdcore.scheduler.waiting import WaitingView

__all__ = [
    "FCFS",
    "Admission",
    "AdmissionContext",
    "DeadlineFirst",
    "Priority",
    "RunningView",
    "SchedulingPolicy",
    "ShortestPromptFirst",
]


class Admission(enum.Enum):
    """A policy's word on a request that could be admitted."""

    ADMIT = "admit"
    SKIP = "skip"
    """Not now; look at the next one."""
    STOP = "stop"
    """Not now, and nobody behind it either."""


@attrs.frozen(kw_only=True)
class AdmissionContext:
    """How full the engine is when a request could be admitted.

    Args:
        now: seconds on the scheduler's clock.
        num_running: rows in use.
        num_free_blocks: of the pool.
        token_budget: tokens left in this step.
    """

    now: float
    num_running: int
    num_free_blocks: int
    token_budget: int


@attrs.frozen(kw_only=True, eq=False)
class RunningView:
    """The running requests as columns, in running order.

    Args:
        requests: one for each entry.
        priority: int64; arrival_time: float64.
        num_tokens, num_computed_tokens, num_blocks: int64.
    """

    requests: tuple[Request, ...]
    priority: npt.NDArray[np.int64]
    arrival_time: npt.NDArray[np.float64]
    num_tokens: npt.NDArray[np.int64]
    num_computed_tokens: npt.NDArray[np.int64]
    num_blocks: npt.NDArray[np.int64]


class SchedulingPolicy:
    """The hooks, each with a default. A hook that is not overridden costs nothing.

    Override them in a class: a function that is put on an instance instead is not looked for. Which
    ones a class has is settled when the scheduler is made.

    A hook that takes one request and raises ends that request with ``error``. A hook that takes
    columns and raises costs one step in first-come-first-served order, and is counted in
    ``SchedulerStats.num_policy_errors``; the log has each kind of failure once.

    Attributes:
        dynamic: whether `order` decides anew in every step, instead of `key` once.
    """

    dynamic: bool = False

    def key(self, request: Request) -> Any:
        """Return what requests are sorted by, smallest first; equals in order of arrival.

        Called when a request joins the queue. Keys of all requests must be comparable.
        """
        return 0

    def order(self, waiting: WaitingView, now: float) -> npt.NDArray[np.intp]:
        """Return the indices of ``waiting`` in the order of admission; only if `dynamic`."""
        raise NotImplementedError("a dynamic policy overrides order()")

    def admit(self, request: Request, context: AdmissionContext) -> Admission:
        """Say whether a request may be admitted now."""
        return Admission.ADMIT

    def chunk(self, request: Request, num_tokens: int, token_budget: int) -> int:
        """Say how many of ``num_tokens`` prompt tokens to compute in this step.

        Called for requests that lack more than one token; the answer is cut to
        1..min(num_tokens, token_budget).
        """
        return num_tokens

    def victim(self, running: RunningView) -> int:
        """Return the index of the request that gives way when blocks are short."""
        return len(running.requests) - 1

    def displace(self, request: Request, running: RunningView) -> int | None:
        """Return the index of a running request that a waiting one may take the row of, or None.

        ``running`` leaves out those that took their row themselves and have drawn nothing since: so
        each row that is taken yields a token, and no two requests take it from each other for ever.
        """
        return None

    def load(self, request: Request, match: ExternalMatch, num_local_tokens: int) -> int:
        """Say how many of the external tokens to load; 0 computes them here instead."""
        return match.num_tokens

    def observe(self, result: StepResult) -> None:
        """See every step's result, for policies that keep count."""


class FCFS(SchedulingPolicy):
    """First come, first served; the last to start gives way first. The defaults of all hooks."""


class Priority(SchedulingPolicy):
    """Lowest ``Request.priority`` first, then the earliest; the reverse gives way.

    Args:
        displace: whether a request may also take the row of a less urgent one when all rows are
            taken. Equal priorities never displace each other.
    """

    def __init__(self, *, displace: bool = False) -> None:
        self._displace = displace

    def key(self, request: Request) -> Any:
        return (request.priority, request.arrival_time, request.request_id)

    def victim(self, running: RunningView) -> int:
        worst = np.flatnonzero(running.priority == running.priority.max())
        return int(worst[np.argmax(running.arrival_time[worst])])

    def displace(self, request: Request, running: RunningView) -> int | None:
        if not self._displace:
            return None
        index = self.victim(running)
        return index if running.priority[index] > request.priority else None


class DeadlineFirst(SchedulingPolicy):
    """The nearest ``Request.deadline`` first; those without one last, in order of arrival."""

    def key(self, request: Request) -> Any:
        return math.inf if request.deadline is None else request.deadline

    def victim(self, running: RunningView) -> int:
        keys = np.array([self.key(request) for request in running.requests])
        # The last of the least urgent, so that equals give way as under FCFS.
        return keys.size - 1 - int(np.argmax(keys[::-1]))


class ShortestPromptFirst(SchedulingPolicy):
    """Short prompts first: the lowest mean waiting time, at the expense of long prompts."""

    def key(self, request: Request) -> Any:
        return request.num_prompt_tokens
