"""Asking one of several connectors something, so that its faults stay its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from pdcore.answers import check_answer
from pdcore.connector.base import ConnectorEvents
from pdcore.connector.stats import ConnectorStats

__all__ = ["are_events", "are_stats", "are_words", "ask"]

logger = logging.getLogger(__name__)

are_events = partial(check_answer, kind=ConnectorEvents)
are_stats = partial(check_answer, kind=ConnectorStats)
are_words = partial(check_answer, kind=str, may_be_none=True)

_AnswerT = TypeVar("_AnswerT")


def ask(
    name: str,
    method: Callable[..., _AnswerT],
    *args: Any,
    otherwise: _AnswerT,
    check: Callable[[_AnswerT], object] = lambda answer: None,
) -> _AnswerT:
    """What a connector says; one that raises, or answers nonsense, takes nobody else down.

    Args:
        name: of the connector, for the log.
        method: what to call, with ``args``.
        otherwise: what to take for its answer if that fails.
        check: raises for an answer that is none.
    """
    try:
        answer = method(*args)
        check(answer)
    except Exception:
        logger.exception("connector %r raised in %s()", name, method.__name__)
        return otherwise
    return answer
