"""What the scheduler asks its connector on behalf of others; no wrong answer stops the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pdcore.answers import check_answer, check_time
from pdcore.connector.base import SchedulerConnector
from pdcore.connector.stats import ConnectorStats
from pdcore.request import Request
from pdcore.scheduler.core import Core

__all__ = ["ask_stats", "ask_wakeup", "ask_what_it_waits_for", "ask_whether_pending"]

_AnswerT = TypeVar("_AnswerT")


def ask_wakeup(core: Core) -> float | None:
    """When the connector has something to do."""
    return _ask(core, "next_wakeup", lambda each: each.next_wakeup(), check_time, otherwise=None)


def ask_whether_pending(core: Core) -> bool:
    """Whether the connector owes an event."""
    return bool(_ask(core, "has_pending", lambda each: each.has_pending(), bool, otherwise=False))


def ask_what_it_waits_for(core: Core, request: Request) -> str | None:
    """What a parked request waits for, in words."""
    return _ask(
        core,
        "explain",
        lambda each: each.explain(request),
        lambda answer: check_answer(answer, str, may_be_none=True),
        otherwise=None,
    )


def ask_stats(core: Core) -> ConnectorStats:
    """What the connector counted."""
    return _ask(
        core,
        "stats",
        lambda each: each.stats(),
        lambda answer: check_answer(answer, ConnectorStats),
        otherwise=ConnectorStats(),
    )


def _ask(
    core: Core,
    name: str,
    question: Callable[[SchedulerConnector], _AnswerT],
    check: Callable[[_AnswerT], object],
    *,
    otherwise: _AnswerT,
) -> _AnswerT:
    """What the connector answers, if ``check`` raises nothing about it."""
    if core.connector is None:
        return otherwise
    try:
        answer = question(core.connector)
        check(answer)
    except Exception as error:
        core.complain(f"the connector's {name}() raised", error)
        return otherwise
    return answer
