"""What limits and the policy have to say about an admission."""

from __future__ import annotations

import operator

import numpy as np

from pdcore.connector.base import ExternalMatch
from pdcore.scheduler.base import Skip, SkipCode
from pdcore.scheduler.core import Core
from pdcore.scheduler.ending import fail_later
from pdcore.scheduler.plan import Plan
from pdcore.scheduler.policy import Admission, AdmissionContext, SchedulingPolicy
from pdcore.scheduler.running import running_view
from pdcore.scheduler.starting import Starting
from pdcore.scheduler.state import RequestState

__all__ = ["AdmissionRules"]


class AdmissionRules:
    """Asks the policy's hooks, and checks what they answer; knows the limits on who may start.

    A hook that the policy does not have costs nothing: its attribute here says so, and it is not
    asked. One that raises in `find_refusal` or `cap` ends the request that it was asked about, in
    the next step; in `order` it costs the step its order; `cap_load` and `choose_victim` pass it
    on.

    Attributes:
        may_refuse: whether `find_refusal` may have something against anybody.
        has_admit_hook: whether `ask_admit` may.
        may_cap: whether `cap` may answer less than it was asked about.
        may_cap_loads: the same of `cap_load`.
        may_displace: whether `choose_victim` may choose somebody.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        policy, limits = type(core.policy), core.limits
        self.has_admit_hook = policy.admit is not SchedulingPolicy.admit
        self._has_chunk_hook = policy.chunk is not SchedulingPolicy.chunk
        self.may_refuse = self.has_admit_hook or limits.max_loras is not None
        self.may_cap = (
            self._has_chunk_hook
            or limits.long_prefill_token_threshold > 0
            or not limits.enable_chunked_prefill
        )
        self.may_cap_loads = policy.load is not SchedulingPolicy.load
        self.may_displace = policy.displace is not SchedulingPolicy.displace

    def order(self, plan: Plan) -> list[RequestState]:
        """Those that wait, in the order that a dynamic policy has for this step."""
        view = self._core.waiting.view()
        if not view.states:
            return []
        try:
            answer = np.asarray(self._core.policy.order(view, plan.now)).tolist()
            order = list(map(operator.index, answer))
            if sorted(order) != list(range(len(view.states))):
                raise ValueError(f"order() did not return each of {len(view.states)} indices once")
        except Exception as error:
            self._core.complain("the policy's order() failed; steps go by arrival instead", error)
            self._core.counters.num_policy_errors += 1
            return list(self._core.waiting)
        return [view.states[index] for index in order]

    def find_refusal(
        self, state: RequestState, plan: Plan, starting: Starting, *, without: int = -1
    ) -> Skip | None:
        """Why limits or policy do not let a request in, or None.

        Args:
            state: the request.
            plan: the step's plan so far.
            starting: what was admitted and has no row yet.
            without: a row that the request would take, or -1.
        """
        refusal = self.find_adapter_refusal(state, starting, without=without)
        if refusal is None and self.has_admit_hook:
            refusal = self.ask_admit(state, plan, starting, num_leaving=int(without >= 0))
        return refusal

    def find_adapter_refusal(
        self, state: RequestState, starting: Starting, *, without: int = -1
    ) -> Skip | None:
        """Why a request would be one adapter too many, or None."""
        core, limits = self._core, self._core.limits
        lora = state.request.lora
        if limits.max_loras is not None and lora is not None:
            starting.run()
            # Also those that wait for a token in this step run with the others in the next.
            rows = core.table.running.tolist()
            active = {core.table.state(row).request.lora for row in rows if row != without}
            active.discard(None)
            if lora not in active and len(active) >= limits.max_loras:
                return Skip(
                    code=SkipCode.TOO_MANY_LORAS,
                    needed=1,
                    available=0,
                    waits_on=f"{sorted(active, key=str)}",
                )
        return None

    def ask_admit(
        self, state: RequestState, plan: Plan, starting: Starting, *, num_leaving: int
    ) -> Skip | None:
        """Why the policy does not let a request in, or None.

        ``num_leaving`` running requests would give way to it.
        """
        core = self._core
        context = AdmissionContext(
            now=plan.now,
            num_running=len(core.table) + len(starting) - num_leaving,
            num_free_blocks=core.manager.pool.num_free_blocks - starting.num_blocks,
            token_budget=plan.token_budget,
        )
        try:
            verdict = Admission(core.policy.admit(state.request, context))
        except Exception as error:
            return fail_later(core, state, "admit", error)
        if verdict is Admission.ADMIT:
            return None
        code = SkipCode.POLICY if verdict is Admission.SKIP else SkipCode.ADMISSION_CLOSED
        return Skip(code=code, waits_on=f"the policy, which said {verdict.value!r}")

    def cap(self, state: RequestState, num_tokens: int, plan: Plan) -> int | Skip:
        """How many of the tokens that a request lacks policy and limits let it compute."""
        core, limits = self._core, self._core.limits
        threshold = limits.long_prefill_token_threshold
        if threshold and len(core.requests) > 1:
            num_tokens = min(num_tokens, threshold)
        if self._has_chunk_hook and num_tokens > 1:
            try:
                answer = int(core.policy.chunk(state.request, num_tokens, plan.token_budget))
            except Exception as error:
                return fail_later(core, state, "chunk", error)
            num_tokens = max(1, min(answer, num_tokens))
        # One that gave way with more tokens than any step may have goes on in pieces all the same.
        is_whole = not limits.enable_chunked_prefill and num_tokens <= limits.max_num_batched_tokens
        if is_whole and num_tokens > plan.token_budget:
            core.closed = SkipCode.NO_TOKEN_BUDGET
            return Skip(
                code=SkipCode.ADMISSION_CLOSED, needed=num_tokens, available=plan.token_budget
            )
        return num_tokens

    def cap_load(self, state: RequestState, match: ExternalMatch, num_local_tokens: int) -> int:
        """How many of the tokens that the connector has the policy lets a request load. Raises
        what the hook raises."""
        answer = int(self._core.policy.load(state.request, match, num_local_tokens))
        return min(answer, match.num_tokens)

    def choose_victim(self, state: RequestState) -> int | None:
        """The row that the policy takes from a running request for this one, or None. Raises what
        the hook raises."""
        core, table = self._core, self._core.table
        rows = np.array([row for row in table.running.tolist() if self._may_be_taken(row)], np.intp)
        if not rows.size:
            return None
        index = core.policy.displace(state.request, running_view(core, rows))
        if index is None:
            return None
        index = operator.index(index)
        if not 0 <= index < rows.size:
            raise IndexError(f"it answered {index}, of {rows.size} running requests")
        return int(rows[index])

    def _may_be_taken(self, row: int) -> bool:
        """Not before whoever took it from somebody else has drawn a token."""
        table = self._core.table
        return table.num_tokens.item(row) > table.state(row).took_row_at
