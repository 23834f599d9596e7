"""The pass over the queue: who gets a row, or starts to load, in this step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pdcore.answers import check_answer
from pdcore.connector.base import ExternalMatch
from pdcore.errors import OutOfBlocks
from pdcore.kvcache.manager import PrefixHit
from pdcore.scheduler.admission_rules import AdmissionRules
from pdcore.scheduler.base import Skip, SkipCode
from pdcore.scheduler.core import Core
from pdcore.scheduler.ending import fail_later
from pdcore.scheduler.loading import Loading
from pdcore.scheduler.plan import Plan
from pdcore.scheduler.starting import Starting
from pdcore.scheduler.state import RequestState
from pdcore.scheduler.waiting import WaitingTable

__all__ = ["AdmissionPass"]

_NO_HIT = PrefixHit(np.zeros(0, np.int32), 0)
_NO_ROW = Skip(code=SkipCode.NO_ROW)
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
        self._rules = AdmissionRules(core)

    def run(self, plan: Plan) -> None:
        """Extend ``plan`` with the requests that start in this step."""
        core = self._core
        core.closed = SkipCode.NOT_REACHED
        if plan.preempted:
            core.closed = SkipCode.ADMISSION_CLOSED
            return
        if not (len(core.waiting) or len(core.landed)):
            return
        self._starting = Starting(core, plan)
        self._num_free_rows = core.table.num_free_rows
        self._note_who_leaves()
        self._name_ahead(plan)
        passed_over: list[tuple[WaitingTable, RequestState]] = []
        try:
            for queue, state in self._candidates(plan):
                if plan.token_budget <= 0:
                    core.closed = SkipCode.NO_TOKEN_BUDGET
                    break
                skip = None if self._num_free_rows else self._find_row(state, plan)
                if skip is _NO_ROW:
                    core.closed = SkipCode.NO_ROW
                    break
                skip = skip or self._consider(state, queue, plan)
                if skip is None:
                    continue
                core.skips[state.uid] = skip
                if skip.code in (SkipCode.NO_BLOCKS, SkipCode.ADMISSION_CLOSED):
                    break
                if state in queue:
                    passed_over.append((queue, state))
                    queue.remove(state)
            self._starting.run()
        finally:
            _put_back(passed_over)

    def _note_who_leaves(self) -> None:
        """From here on, remember who starts, to put them all back at once if the plan is undone."""
        left: list[tuple[WaitingTable, RequestState]] = []
        self._left = left
        self._core.record(lambda: _put_back(left))

    def _name_ahead(self, plan: Plan) -> None:
        """Compute the prefix keys of those that are probably admitted, which is cheaper at once."""
        core = self._core
        num_rows, first = core.table.num_free_rows, core.waiting.peek()
        if num_rows < 2 or len(core.waiting) < 2 or not core.manager.enable_prefix_caching:
            return
        if first is None or first.sequence.keys:
            return
        sequences, num_tokens = [], 0
        for state in core.waiting.front(num_rows):
            if num_tokens >= plan.token_budget:
                break
            if not state.sequence.keys:
                sequences.append(state.sequence)
                num_tokens += len(state.sequence)
        if len(sequences) > 1:
            core.manager.name_blocks(sequences)

    def _find_row(self, state: RequestState, plan: Plan) -> Skip | None:
        """Let the policy take a row from somebody else when none is free; otherwise say why not.

        With `_NO_ROW` nobody behind it is looked at either: it has no other claim on a row.
        """
        rules = self._rules
        if not rules.may_displace:
            return _NO_ROW
        # First, since it costs less than to ask whose row it may have, and many may be skipped.
        if rules.has_admit_hook:
            refusal = rules.ask_admit(state, plan, self._starting, num_leaving=1)
            if refusal is not None:
                return refusal
        self._starting.run()
        skip = self._displace(state, plan)
        self._num_free_rows = self._core.table.num_free_rows
        return skip

    def _candidates(self, plan: Plan) -> Iterator[tuple[WaitingTable, RequestState]]:
        """The queue's requests in order; each must be taken out before the next is asked for."""
        core = self._core
        while (state := core.landed.peek()) is not None:
            yield core.landed, state
        if core.policy.dynamic:
            for state in self._rules.order(plan):
                yield core.waiting, state
            return
        while (state := core.waiting.peek()) is not None:
            yield core.waiting, state

    def _displace(self, state: RequestState, plan: Plan) -> Skip | None:
        """Let the policy take a row from a running request for an urgent one."""
        core, rules = self._core, self._rules
        try:
            row = rules.choose_victim(state) if self._could_run(state) else None
        except Exception as error:
            return fail_later(core, state, "displace", error)
        if row is None:
            return _NO_ROW
        refusal = rules.find_adapter_refusal(state, self._starting, without=row)
        if refusal is not None:
            return refusal
        if row in plan.admitted_rows or self._is_shared_in(row, plan):
            return _NO_ROW
        kept = plan.rows != row
        plan.token_budget += int(plan.num_tokens[~kept].sum())
        plan.rows, plan.num_tokens = plan.rows[kept], plan.num_tokens[kept]
        core.manager.pool.withdraw(plan.step_id, core.manager.tables.row_blocks(row))
        core.preempt(core.table.state(row))
        # The one that gave way may start again in this step, and is in the queue before that.
        self._note_who_leaves()
        plan.drop_vacated(core.table.states)
        before, state.took_row_at = state.took_row_at, len(state.sequence)
        core.record(lambda: setattr(state, "took_row_at", before))
        return None

    def _could_run(self, state: RequestState) -> bool:
        """Whether a row is what a request lacks, and not its remote KV."""
        if state.num_late_tokens:
            return False
        match = self._find_external(state, self._find_local(state))
        return match is not None and not (match.num_tokens and match.is_async)

    def _is_shared_in(self, row: int, plan: Plan) -> bool:
        """Whether what joined in this step shares blocks of a row, which may not be written yet."""
        core = self._core
        joined = [core.manager.tables.row_blocks(other) for other in plan.admitted_rows]
        joined += [
            state.block_ids
            for state in core.parked.values()
            if state.load_step == plan.step_id and state.block_ids is not None
        ]
        blocks = core.manager.tables.row_blocks(row)
        return any(np.isin(blocks, others).any() for others in joined)

    def _consider(self, state: RequestState, queue: WaitingTable, plan: Plan) -> Skip | None:
        """Admit a request, or start its load; otherwise say why not."""
        if state.num_late_tokens:
            return Skip(
                code=SkipCode.WAITING_FOR_OUTPUT,
                needed=state.num_late_tokens,
                waits_on="tokens of steps that were in flight when it was preempted",
            )
        rules = self._rules
        if rules.may_refuse:
            refusal = rules.find_refusal(state, plan, self._starting)
            if refusal is not None:
                return refusal
        hit = self._find_local(state)
        if self._core.connector is None:
            return self._admit(state, queue, plan, hit, 0)
        try:
            match = self._find_external(state, hit)
        except Exception as error:
            return fail_later(self._core, state, "get_num_new_matched_tokens", error)
        if match is None:
            return self._ask_later(state, plan)
        if match.num_tokens and match.is_async:
            self._starting.run()
            return self._loading.park(state, queue, hit, match)
        return self._admit(state, queue, plan, hit, match.num_tokens)

    def _ask_later(self, state: RequestState, plan: Plan) -> Skip:
        """The connector does not know yet. It has as long to find out as a load may take."""
        core = self._core
        if not state.is_asking:
            state.is_asking = True
            core.alarms.set(("ask", state.uid), plan.now + core.limits.load_timeout_s)
        return Skip(code=SkipCode.CONNECTOR_NOT_READY, waits_on="the connector to find external KV")

    def _find_local(self, state: RequestState) -> PrefixHit:
        """What need not be computed, since the cache has it."""
        if state.block_ids is not None:
            return _NO_HIT
        return self._starting.find_hit(state.sequence)

    def _find_external(self, state: RequestState, hit: PrefixHit) -> ExternalMatch | None:
        """What the connector has beyond that; nobody is asked again after a load."""
        core = self._core
        if core.connector is None or not state.ask_connector or state.block_ids is not None:
            return _NO_MATCH
        match = core.connector.get_num_new_matched_tokens(state.request, hit.num_tokens)
        check_answer(match, ExternalMatch, may_be_none=True)
        if match is None or not match.num_tokens:
            return match
        num_tokens = match.num_tokens
        if self._rules.may_cap_loads:
            num_tokens = self._rules.cap_load(state, match, hit.num_tokens)
        # At least one token is computed here, or there would be nothing to draw from.
        num_tokens = min(num_tokens, len(state.sequence) - 1 - hit.num_tokens)
        return ExternalMatch(num_tokens=max(num_tokens, 0), is_async=match.is_async)

    def _admit(
        self,
        state: RequestState,
        queue: WaitingTable,
        plan: Plan,
        hit: PrefixHit,
        num_external: int,
    ) -> Skip | None:
        held = state.block_ids
        num_computed = state.num_computed_tokens if held is not None else hit.num_tokens
        num_computed += num_external
        num_tokens = len(state.sequence) - num_computed
        if self._rules.may_cap:
            capped = self._rules.cap(state, num_tokens, plan)
            if isinstance(capped, Skip):
                return capped
            num_tokens = capped
        num_tokens = min(num_tokens, plan.token_budget)
        try:
            if held is not None:
                self._start_landed(state, held, num_computed, num_tokens)
            else:
                skip = self._start_waiting(state, hit, num_computed, num_tokens, num_external)
                if skip is not None:
                    return skip
        except OutOfBlocks as error:
            return Skip(code=SkipCode.NO_BLOCKS, needed=error.needed, available=error.available)
        self._left.append((queue, state))
        queue.remove(state)
        self._num_free_rows -= 1
        self._core.stop_asking(state)
        return None

    def _start_landed(
        self, state: RequestState, held: np.ndarray, num_computed: int, num_tokens: int
    ) -> None:
        """Start a request whose KV was loaded: the blocks that it holds are its own.

        These come first, so no blocks are promised to others yet.
        """
        manager = self._core.manager
        more = max(manager.blocks_for(num_computed + num_tokens) - held.size, 0)
        self._starting.add(
            state,
            blocks=np.concatenate((held, manager.pool.allocate(more))),
            num_computed=num_computed,
            num_tokens=num_tokens,
            num_hit_tokens=state.num_local_tokens,
            num_published=min(num_computed // manager.block_size, held.size),
        )

    def _start_waiting(
        self,
        state: RequestState,
        hit: PrefixHit,
        num_computed: int,
        num_tokens: int,
        num_external: int,
    ) -> Skip | None:
        """Start a request from what is cached, and from what the connector brings in this step."""
        core, manager, starting = self._core, self._core.manager, self._starting
        end, room = num_computed + num_tokens, len(state.sequence)
        chunk = core.limits.max_num_batched_tokens
        if not num_computed:
            reserved = starting.num_blocks
            num_fresh = manager.check_room(
                hit, end, must_fit_tokens=room, chunk=chunk, num_reserved=reserved
            )
            starting.add(state, num_tokens=num_tokens, num_fresh_blocks=num_fresh)
            return None
        if num_external:
            # The connector is told of these blocks, and may look at the pool.
            starting.run()
        assert not starting.num_blocks
        blocks = manager.allocate_slots(hit, end, must_fit_tokens=room, chunk=chunk)
        if num_external:
            load = self._loading.begin(state, hit, blocks, num_external)
            if isinstance(load, Skip):
                return load
            self._loading.within_step(state, load, num_external)
        starting.add(
            state,
            blocks=blocks,
            num_computed=num_computed,
            num_tokens=num_tokens,
            num_hit_tokens=hit.num_tokens,
            num_published=min(num_computed // manager.block_size, hit.block_ids.size),
        )
        return None


def _put_back(places: list[tuple[WaitingTable, RequestState]]) -> None:
    for queue, state in places:
        queue.put_back(state)
