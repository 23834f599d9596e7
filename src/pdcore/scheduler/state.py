"""The scheduler's record of one request."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from pdcore.connector.base import KVLoad
from pdcore.errors import IllegalTransition
from pdcore.kvcache.sequence import TokenSequence
from pdcore.request import TRANSITIONS, Request, RequestStatus
from pdcore.scheduler.grammar import GrammarMatcher

__all__ = ["RequestState", "move", "move_back"]

_HISTORY_LENGTH = 16


@attrs.define(eq=False, kw_only=True)
class RequestState:
    """What happens to a request from `add_request` to its finish event.

    While it has a row, its counters live in that row's columns; ``num_computed_tokens`` and
    ``block_ids`` here are used only without a row, between a load and the admission that follows.

    Args:
        uid: the scheduler's number for it, never reused; request_id: the application's.
        request: what was asked for.
        sequence: its tokens, without those in the row's tail buffer.
        num_prompt_tokens: how many of them are prompt.
        limit: the most tokens, prompt included, it can come to.
        status: where it is; changed by `move` alone.
        history: its last states, for errors.
        row: its row, or -1.
        queue_key: its place in the queue: the policy's key, and its place among equals.
        block_ids: blocks it has without a row, in order of position.
        num_computed_tokens: tokens whose KV is in ``block_ids``.
        num_local_tokens: of those, how many were found in the local cache.
        load: the load it waits for, while parked; or the last that its step was to have done.
        load_step: the step that started this load.
        attempt: how many loads were started for it.
        num_failed_loads: how many of them failed.
        num_lost_loads: how many were taken back with a step that failed.
        ask_connector: whether the connector is still asked for its KV.
        is_asking: whether the connector was asked and could not say yet.
        took_row_at: how many tokens it had when it last took another's row, or -1.
        num_late_tokens: tokens of steps that were in flight when it lost its row.
        matcher: its grammar, compiled.
    """

    uid: int
    request_id: str
    request: Request
    sequence: TokenSequence
    num_prompt_tokens: int
    limit: int
    limited_by_pool: bool
    arrival_time: float
    queue_key: tuple[Any, int]
    status: RequestStatus = RequestStatus.WAITING
    history: tuple[RequestStatus, ...] = ()
    row: int = -1
    block_ids: npt.NDArray[np.int32] | None = None
    num_computed_tokens: int = 0
    num_local_tokens: int = 0
    load: KVLoad | None = None
    load_step: int = 0
    attempt: int = 0
    num_failed_loads: int = 0
    num_lost_loads: int = 0
    ask_connector: bool = True
    is_asking: bool = False
    took_row_at: int = -1
    num_late_tokens: int = 0
    matcher: GrammarMatcher | None = None
    was_admitted: bool = False
    num_cached_tokens: int = 0
    num_external_tokens: int = 0
    num_preemptions: int = 0

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED


def move(state: RequestState, status: RequestStatus) -> None:
    """Change a request's status: the only place where that happens.

    Raises:
        IllegalTransition: the table `TRANSITIONS` does not connect the two.
    """
    if status not in TRANSITIONS[state.status]:
        history = " -> ".join(past.value for past in (*state.history, state.status))
        allowed = sorted(target.value for target in TRANSITIONS[state.status]) or ["nothing"]
        raise IllegalTransition(
            f"request {state.request_id!r} cannot become {status.value}: it went {history}, "
            f"from where it may become {', '.join(allowed)}"
        )
    state.history = (*state.history[1 - _HISTORY_LENGTH :], state.status)
    state.status = status


def move_back(state: RequestState) -> None:
    """Undo the last `move`."""
    state.status = state.history[-1]
    state.history = state.history[:-1]
