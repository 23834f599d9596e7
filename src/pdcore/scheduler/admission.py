"""The pass over the queue: who gets a row, or starts to load, in this step."""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator

import numpy as np

from pdcore.connector.base import ExternalMatch
from pdcore.errors import OutOfBlocks
from pdcore.kvcache.manager import PrefixHit
from pdcore.request import RequestStatus
from pdcore.scheduler.base import Skip, SkipCode
from pdcore.scheduler.core import Core
from pdcore.scheduler.loading import Loading
from pdcore.scheduler.plan import Plan
from pdcore.scheduler.policy import Admission, AdmissionContext, SchedulingPolicy
from pdcore.scheduler.running import running_view
from pdcore.scheduler.state import RequestState, move
from pdcore.scheduler.waiting import WaitingTable

__all__ = ["AdmissionPass"]

logger = logging.getLogger(__name__)

_NO_HIT = PrefixHit(np.zeros(0, np.int32), 0)
_NO_MATCH = ExternalMatch(num_tokens=0)


class AdmissionPass:
    """Admits requests in the policy's order until one does not fit.

    Requests whose KV was loaded go first, since they hold blocks. Requests that wait for the
    outside are passed over. A request is admitted only when its whole sequence finds room, though
    it takes blocks chunk by chunk. Nobody is admitted in a step in which a request gave way.
    """

    def __init__(self, core: Core, loading: Loading) -> None:
        self._core = core
        self._loading = loading
        self._has_admit_hook = type(core.policy).admit is not SchedulingPolicy.admit
        self._has_chunk_hook = type(core.policy).chunk is not SchedulingPolicy.chunk
        self._has_load_hook = type(core.policy).load is not SchedulingPolicy.load
        self._has_displace_hook = type(core.policy).displace is not SchedulingPolicy.displace

    def run(self, plan: Plan) -> None:
        """Extend ``plan`` with the requests that start in this step."""
        core = self._core
        core.closed = SkipCode.NOT_REACHED
        if plan.preempted:
            core.closed = SkipCode.ADMISSION_CLOSED
            return
        if not (len(core.waiting) or len(core.landed)):
            return
        passed_over: list[tuple[WaitingTable, RequestState]] = []
        for queue, state in self._candidates(plan):
            if plan.token_budget <= 0:
                core.closed = SkipCode.NO_TOKEN_BUDGET
                break
            if core.table.is_full and not self._displace(state, plan):
                core.closed = SkipCode.NO_ROW
                break
            skip = self._consider(state, queue, plan)
            if skip is None:
                continue
            core.skips[state.uid] = skip
            if skip.code in (SkipCode.NO_BLOCKS, SkipCode.ADMISSION_CLOSED):
                break
            if state in queue:
                queue.remove(state)
                passed_over.append((queue, state))
        for queue, state in passed_over:
            queue.put_back(state)

    def _candidates(self, plan: Plan) -> Iterator[tuple[WaitingTable, RequestState]]:
        """The queue's requests in order; each must be taken out before the next is asked for."""
        core = self._core
        while (state := core.landed.peek()) is not None:
            yield core.landed, state
        if core.policy.dynamic:
            for state in self._dynamic_order(plan):
                yield core.waiting, state
            return
        while (state := core.waiting.peek()) is not None:
            yield core.waiting, state

    def _dynamic_order(self, plan: Plan) -> list[RequestState]:
        view = self._core.waiting.view()
        if not view.states:
            return []
        try:
            answer = np.asarray(self._core.policy.order(view, plan.now)).tolist()
            order = list(map(operator.index, answer))
            if sorted(order) != list(range(len(view.states))):
                raise ValueError(f"order() did not return each of {len(view.states)} indices once")
        except Exception:
            logger.exception("the policy's order() failed; this step goes by arrival")
            self._core.counters.num_policy_errors += 1
            return list(self._core.waiting)
        return [view.states[index] for index in order]

    def _displace(self, state: RequestState, plan: Plan) -> bool:
        """Let the policy take a row from a running request for an urgent one."""
        core = self._core
        if not self._has_displace_hook:
            return False
        rows = core.table.running.copy()
        try:
            if not self._could_run(state):
                return False
            index = core.policy.displace(state.request, running_view(core, rows))
            if index is not None:
                index = operator.index(index)
            if index is not None and not 0 <= index < rows.size:
                raise IndexError(f"it answered {index}, of {rows.size} running requests")
        except Exception as error:
            self._core.fail_later(state, "displace", error)
            return False
        if index is None:
            return False
        row = int(rows[index])
        if row in plan.admitted_rows or self._is_shared_in(row, plan):
            return False
        kept = plan.rows != row
        plan.token_budget += int(plan.num_tokens[~kept].sum())
        plan.rows, plan.num_tokens = plan.rows[kept], plan.num_tokens[kept]
        core.manager.pool.withdraw(plan.step_id, core.manager.row_blocks(row))
        core.preempt(core.table.state(row))
        plan.drop_vacated(core.table.states)
        return True

    def _could_run(self, state: RequestState) -> bool:
        """Whether a row is what a request lacks, and not its remote KV."""
        if state.num_late_tokens:
            return False
        _, match = self._find_computed(state)
        return match is not None and not (match.num_tokens and match.is_async)

    def _is_shared_in(self, row: int, plan: Plan) -> bool:
        """Whether what joined in this step shares blocks of a row, which may not be written yet."""
        core = self._core
        joined = [core.manager.row_blocks(other) for other in plan.admitted_rows]
        joined += [
            state.block_ids
            for state in core.parked.values()
            if state.parked_in_step == plan.step_id and state.block_ids is not None
        ]
        blocks = core.manager.row_blocks(row)
        return any(np.isin(blocks, others).any() for others in joined)

    def _consider(self, state: RequestState, queue: WaitingTable, plan: Plan) -> Skip | None:
        """Admit a request, or start its load; otherwise say why not."""
        if state.num_late_tokens:
            return Skip(
                code=SkipCode.WAITING_FOR_OUTPUT,
                needed=state.num_late_tokens,
                waits_on="tokens of steps that were in flight when it was preempted",
            )
        refusal = self._refused(state, plan)
        if refusal is not None:
            return refusal
        try:
            hit, match = self._find_computed(state)
        except Exception as error:
            return self._core.fail_later(state, "get_num_new_matched_tokens", error)
        if match is None:
            return self._ask_later(state, plan)
        if match.num_tokens and match.is_async:
            return self._loading.park(state, queue, plan, hit, match)
        return self._admit(state, queue, plan, hit, match)

    def _ask_later(self, state: RequestState, plan: Plan) -> Skip:
        """The connector does not know yet. It has as long to find out as a load may take."""
        core = self._core
        if not state.is_asking:
            state.is_asking = True
            core.alarms.set(("ask", state.uid), plan.now + core.limits.load_timeout_s)
        return Skip(code=SkipCode.CONNECTOR_NOT_READY, waits_on="the connector to find external KV")

    def _refused(self, state: RequestState, plan: Plan) -> Skip | None:
        core, limits = self._core, self._core.limits
        lora = state.request.lora
        if limits.max_loras is not None and lora is not None:
            rows, _ = plan.all_rows()
            active = {core.table.state(row).request.lora for row in rows.tolist()} - {None}
            if lora not in active and len(active) >= limits.max_loras:
                return Skip(
                    code=SkipCode.TOO_MANY_LORAS,
                    needed=1,
                    available=0,
                    waits_on=f"{sorted(active, key=str)}",
                )
        if not self._has_admit_hook:
            return None
        context = AdmissionContext(
            now=plan.now,
            num_running=len(core.table),
            num_free_blocks=core.manager.pool.num_free_blocks,
            token_budget=plan.token_budget,
        )
        try:
            verdict = Admission(core.policy.admit(state.request, context))
        except Exception as error:
            return self._core.fail_later(state, "admit", error)
        if verdict is Admission.ADMIT:
            return None
        code = SkipCode.POLICY if verdict is Admission.SKIP else SkipCode.ADMISSION_CLOSED
        return Skip(code=code, waits_on=f"the policy, which said {verdict.value!r}")

    def _find_computed(self, state: RequestState) -> tuple[PrefixHit, ExternalMatch | None]:
        """What need not be computed: found locally, and beyond that by the connector."""
        core = self._core
        if state.block_ids is not None:
            # It was loaded before: its blocks are its own, and nobody is asked again.
            return _NO_HIT, _NO_MATCH
        hit = core.manager.get_computed_blocks(state.sequence)
        if core.connector is None or not state.ask_connector:
            return hit, _NO_MATCH
        match = core.connector.get_num_new_matched_tokens(state.request, hit.num_tokens)
        if match is None or not match.num_tokens:
            return hit, match
        num_tokens = match.num_tokens
        if self._has_load_hook:
            answer = int(core.policy.load(state.request, match, hit.num_tokens))
            num_tokens = min(answer, match.num_tokens)
        # At least one token is computed here, or there would be nothing to draw from.
        num_tokens = min(num_tokens, len(state.sequence) - 1 - hit.num_tokens)
        return hit, ExternalMatch(num_tokens=max(num_tokens, 0), is_async=match.is_async)

    def _admit(
        self,
        state: RequestState,
        queue: WaitingTable,
        plan: Plan,
        hit: PrefixHit,
        match: ExternalMatch,
    ) -> Skip | None:
        num_external = match.num_tokens
        num_computed = hit.num_tokens + num_external
        held = state.block_ids
        if held is not None:
            hit, num_computed = (
                PrefixHit(held, state.num_computed_tokens),
                state.num_computed_tokens,
            )
        num_tokens = self._chunk(state, len(state.sequence) - num_computed, plan)
        if isinstance(num_tokens, Skip):
            return num_tokens
        try:
            blocks = self._allocate(state, hit, num_computed + num_tokens)
        except OutOfBlocks as error:
            return Skip(code=SkipCode.NO_BLOCKS, needed=error.needed, available=error.available)
        if num_external:
            load = self._loading.begin(state, hit, blocks, num_external)
            if isinstance(load, Skip):
                return load
            self._loading.count(state, num_external)
        self._core.leave(state, queue)
        self._start(state, plan, hit, blocks, num_computed, num_tokens)
        return None

    def _allocate(self, state: RequestState, hit: PrefixHit, num_tokens: int) -> np.ndarray:
        """Blocks for a request's first step; those it holds already are its own."""
        core, manager = self._core, self._core.manager
        if state.block_ids is None:
            return manager.allocate_slots(
                hit,
                num_tokens,
                must_fit_tokens=len(state.sequence),
                chunk=core.limits.max_num_batched_tokens,
            )
        more = manager.blocks_for(num_tokens) - hit.block_ids.size
        return np.concatenate((hit.block_ids, manager.pool.allocate(max(more, 0))))

    def _chunk(self, state: RequestState, num_tokens: int, plan: Plan) -> int | Skip:
        """How many of the tokens that a request lacks it computes in this step."""
        core, limits = self._core, self._core.limits
        threshold = limits.long_prefill_token_threshold
        if threshold and len(core.requests) > 1:
            num_tokens = min(num_tokens, threshold)
        if self._has_chunk_hook and num_tokens > 1:
            try:
                answer = int(core.policy.chunk(state.request, num_tokens, plan.token_budget))
            except Exception as error:
                return self._core.fail_later(state, "chunk", error)
            num_tokens = max(1, min(answer, num_tokens))
        if not limits.enable_chunked_prefill and num_tokens > plan.token_budget:
            core.closed = SkipCode.NO_TOKEN_BUDGET
            return Skip(
                code=SkipCode.ADMISSION_CLOSED, needed=num_tokens, available=plan.token_budget
            )
        return min(num_tokens, plan.token_budget)

    def _start(
        self,
        state: RequestState,
        plan: Plan,
        hit: PrefixHit,
        blocks: np.ndarray,
        num_computed: int,
        num_tokens: int,
    ) -> None:
        """Give a request its row and put it into the plan."""
        core, manager = self._core, self._core.manager
        before = (
            state.block_ids,
            state.num_computed_tokens,
            state.was_admitted,
            state.num_cached_tokens,
        )
        counters = (
            core.counters.num_prefix_queried_tokens,
            core.counters.num_prefix_hit_tokens,
        )
        num_hit = hit.num_tokens if state.block_ids is None else state.num_local_tokens
        if not state.was_admitted:
            state.num_cached_tokens = num_hit
        if manager.enable_prefix_caching:
            core.counters.num_prefix_queried_tokens += len(state.sequence)
            core.counters.num_prefix_hit_tokens += num_hit
        row = core.table.assign(state, num_computed=num_computed, step=plan.step_id)
        num_published = min(num_computed // manager.block_size, hit.block_ids.size)
        manager.bind(row, blocks, num_published=num_published)
        state.block_ids = None
        state.num_computed_tokens = 0
        state.was_admitted = True
        move(state, RequestStatus.RUNNING)
        plan.admitted_rows.append(row)
        plan.admitted_tokens.append(num_tokens)
        plan.token_budget -= num_tokens

        def undo() -> None:
            state.status = state.history.pop()
            core.table.take_back(row)
            (
                state.block_ids,
                state.num_computed_tokens,
                state.was_admitted,
                state.num_cached_tokens,
            ) = before
            (
                core.counters.num_prefix_queried_tokens,
                core.counters.num_prefix_hit_tokens,
            ) = counters

        core.record(undo)
        end = num_computed + num_tokens
        if manager.enable_prefix_caching and end // manager.block_size > num_published:
            manager.publish(row, state.sequence, end, step=plan.step_id)
