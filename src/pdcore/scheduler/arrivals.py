"""Requests that arrive: checked, shown to the connector, and put into their queue."""

from __future__ import annotations

import logging
import sys
from concurrent.futures import Future
from typing import Any

from pdcore.errors import DuplicateRequest, InvalidTransferParams, RequestError
from pdcore.kvcache.sequence import TokenSequence
from pdcore.request import Request, RequestStatus
from pdcore.scheduler.base import RequestHandle
from pdcore.scheduler.core import Core
from pdcore.scheduler.ending import fail
from pdcore.scheduler.policy import SchedulingPolicy
from pdcore.scheduler.state import RequestState, move
from pdcore.scheduler.validate import policy_key, refuse_what_cannot_fit

__all__ = ["Arrivals"]

logger = logging.getLogger(__name__)


class Arrivals:
    """Takes new requests in, or refuses them and leaves no trace."""

    def __init__(self, core: Core) -> None:
        self._core = core
        capacity = core.manager.capacity_tokens(chunk=core.limits.max_num_batched_tokens)
        # The last token needs no KV.
        self._pool_limit = sys.maxsize if capacity is None else capacity + 1
        # Prompts up to here need no closer look.
        self._most_tokens = 0 if core.limits.vocab_size is not None else _most_tokens(core)
        self._has_key_hook = type(core.policy).key is not SchedulingPolicy.key
        self._num_added = 0

    def add(self, request: Request) -> RequestHandle:
        """Queue a request, or let its grammar be compiled first.

        Raises:
            RequestError: it cannot be served, or its id is in use; whoever holds KV for it is told,
                unless the id is only waiting for the end of its last request to be delivered.
        """
        if request.request_id in self._core.undelivered:
            # Whoever holds KV for it is not told: it comes again.
            raise DuplicateRequest(
                f"the end of the last request {request.request_id!r} was not delivered yet, and "
                "would seem to be that of this one; take the next StepResult, or drain(), before"
            )
        try:
            return self._add(request)
        except RequestError:
            self._tell_refused(request)
            raise

    def _add(self, request: Request) -> RequestHandle:
        core = self._core
        if request.request_id in core.uids:
            status = core.requests[core.uids[request.request_id]].status
            raise DuplicateRequest(
                f"request {request.request_id!r} is still {status.value}; use another id, or abort "
                "that one first"
            )
        is_structured = request.sampling.structured_output is not None
        if is_structured or request.num_prompt_tokens > self._most_tokens:
            refuse_what_cannot_fit(core, request)
        now = core.clock.now()
        request = request.arriving_at(now)
        key = policy_key(core, request) if self._has_key_hook else 0
        self._num_added += 1
        uid = self._num_added
        if core.connector is not None:
            core.connector.request_added(request, uid)
        state = self._new_state(request, uid, key)
        core.requests[uid] = state
        core.uids[request.request_id] = uid
        if request.deadline is not None:
            core.alarms.set(("request", uid), request.deadline)
        core.is_quiet = False
        if is_structured:
            self._compile(state, now)
        else:
            core.enqueue(state)
        return RequestHandle(request.request_id, uid)

    def _new_state(self, request: Request, uid: int, key: Any) -> RequestState:
        num_prompt_tokens = request.num_prompt_tokens
        limit = min(
            num_prompt_tokens + request.sampling.max_tokens, self._core.limits.max_model_len
        )
        limited_by_pool = self._pool_limit < limit
        assert request.arrival_time is not None
        return RequestState(
            uid=uid,
            request_id=request.request_id,
            request=request,
            sequence=TokenSequence(
                request.prompt_token_ids, cache_salt=request.cache_salt, lora=request.lora
            ),
            num_prompt_tokens=num_prompt_tokens,
            limit=self._pool_limit if limited_by_pool else limit,
            limited_by_pool=limited_by_pool,
            arrival_time=request.arrival_time,
            queue_key=(key, 0),
        )

    def _compile(self, state: RequestState, now: float) -> None:
        core = self._core
        assert core.grammar is not None
        move(state, RequestStatus.WAITING_FOR_GRAMMAR)
        try:
            future = core.grammar.compile(state.request)
            if not isinstance(future, Future):
                raise TypeError(f"compile() returned {future!r:.80}, which is no Future")
            core.compiling[state.uid] = future
        except Exception as error:
            fail(core, state, f"its grammar could not be compiled: {error!r}")
            return
        core.alarms.set(("grammar", state.uid), now + core.limits.grammar_timeout_s)

    def _tell_refused(self, request: Request) -> None:
        """Who holds KV for a request that is refused need not wait for it."""
        connector = self._core.connector
        if connector is None or request.kv_transfer_params is None:
            return
        try:
            connector.request_refused(request)
        except InvalidTransferParams as error:
            logger.debug("request %s was refused with a bad ticket: %s", request.request_id, error)
        except Exception:
            logger.exception("the connector's request_refused(%s) raised", request.request_id)


def _most_tokens(core: Core) -> int:
    """How many tokens any prompt may have, whatever else is asked for."""
    limits, manager = core.limits, core.manager
    most = min(limits.max_model_len - 1, manager.pool.num_usable_blocks * manager.block_size)
    return most if limits.enable_chunked_prefill else min(most, limits.max_num_batched_tokens)
