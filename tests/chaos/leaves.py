"""Leave to push: a proxy asks the decode engine for it before it sends a prompt to be prefilled."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from adversary import DECODES
from chaos_messages import CallOff, ExpectPush, Leave
from engine_process import EngineProcess
from fleet import Fleet
from timers import Timers
from verdict import Life

__all__ = ["Leaves"]


class Leaves:
    """Asks decode engines for leave to push, and calls off what the plan says.

    Args:
        fleet: the engines.
        timers: for what is called off later.
        answered: is told of each answer: the request and its leave, or None.
    """

    def __init__(
        self,
        fleet: Fleet,
        timers: Timers,
        *,
        answered: Callable[[Life, dict[str, Any] | None], None],
    ) -> None:
        self._fleet = fleet
        self._timers = timers
        self._answered = answered

    def ask(self, life: Life) -> EngineProcess | None:
        """Ask for a request, as the plan wants; return whom, or None if nobody is there."""
        engine = self._fleet.reachable(life.job.leave_from or life.job.decode, DECODES)
        if engine is not None:
            job = life.job
            engine.send(
                ExpectPush(job=job.number, num_tries=life.num_tries, prompt_token_ids=job.prompt)
            )
        return engine

    def take(self, engine: EngineProcess, life: Life, leave: Leave) -> None:
        """An engine answered. An answer that nobody waits for any more is called off at once."""
        is_awaited = life.stage == "leave" and life.num_tries == leave.num_tries
        if leave.push_to is not None:
            after_s = life.job.calls_off_after_s if is_awaited else 0.0
            if after_s is not None:
                self._timers.after(after_s, partial(self._call_off, engine.name, leave.push_to))
        if is_awaited:
            self._answered(life, leave.push_to)

    def _call_off(self, name: str, push_to: dict[str, Any]) -> None:
        # It may have begun a new life, which does not know the push.
        self._fleet[name].send(CallOff(push_to))
