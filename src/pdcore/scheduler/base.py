"""The scheduler's interface: what an engine loop may rely on."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Literal

import attrs

from pdcore.checks import check_choice, check_count, check_flag, check_positive, check_share
from pdcore.connector.stats import ConnectorStats
from pdcore.errors import ConfigError
from pdcore.messages import (
    GrammarBitmask,
    ModelRunnerOutput,
    RequestOutput,
    SchedulerOutput,
    StepResult,
    TransferReport,
)
from pdcore.request import Request, RequestStatus

__all__ = ["Limits", "RequestHandle", "Scheduler", "SchedulerStats", "Skip", "SkipCode"]


@attrs.frozen(kw_only=True)
class Limits:
    """The bounds that a scheduler keeps to.

    Args:
        max_num_seqs: rows, so how many requests run at once.
        max_num_batched_tokens: tokens in one step.
        max_model_len: tokens of one request, prompt and output together.
        enable_chunked_prefill: whether a prompt may be computed over several steps. Without it, a
            prompt longer than ``max_num_batched_tokens`` is refused when it is added; only what a
            preempted request of more tokens than that computes again is cut in pieces.
        long_prefill_token_threshold: the most tokens of one request in one step while there are
            other requests; 0 means no cap.
        max_num_parked: how many requests may wait for remote KV at once.
        max_loras: how many different adapters may run in one step; None means no limit.
        vocab_size: prompts with ids at or above it are refused; None checks nothing.
        load_timeout_s: how long a request waits for remote KV before the load counts as failed.
        max_load_retries: how often a failed load may be tried again.
        on_load_failure: whether a request whose loads failed is computed here or fails.
        grammar_timeout_s: how long a request waits for its grammar before it ends with ``error``.
        quarantine_timeout_s: how long a cancelled load may keep blocks before its peer is
            cut off.
        max_quarantined_share: what share of the pool cancelled loads may keep at once. Above it the
            peers of the oldest are cut off as soon as the workers, told to end them, have not.

    Raises:
        ConfigError: a bound is of the wrong type or out of its range, or two contradict each other.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 4096
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    max_num_parked: int = 256
    max_loras: int | None = None
    vocab_size: int | None = None
    load_timeout_s: float = 60.0
    max_load_retries: int = 0
    on_load_failure: Literal["recompute", "fail"] = "recompute"
    grammar_timeout_s: float = 60.0
    quarantine_timeout_s: float = 60.0
    max_quarantined_share: float = 0.5

    def __attrs_post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_num_parked"):
            check_count(name, getattr(self, name))
        for name in ("long_prefill_token_threshold", "max_load_retries"):
            check_count(name, getattr(self, name), at_least=0)
        for name in ("max_loras", "vocab_size"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        for name in ("load_timeout_s", "grammar_timeout_s", "quarantine_timeout_s"):
            check_positive(name, getattr(self, name))
        check_flag("enable_chunked_prefill", self.enable_chunked_prefill)
        check_share("max_quarantined_share", self.max_quarantined_share)
        check_choice("on_load_failure", self.on_load_failure, ("recompute", "fail"))
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than "
                f"max_num_seqs={self.max_num_seqs}, so not every running request could decode "
                "in one step. Raise the first or lower the second."
            )


@attrs.frozen(slots=False)
class RequestHandle:
    """Names one request for good, unlike its id, which may be used again after it ended."""

    request_id: str
    uid: int


class SkipCode(enum.Enum):
    """Why a request did not run in the last step."""

    RAN = "ran"
    UNKNOWN = "unknown"
    NOT_REACHED = "not_reached"
    PAUSED = "paused"
    NO_TOKEN_BUDGET = "no_token_budget"
    NO_ROW = "no_row"
    NO_BLOCKS = "no_blocks"
    PREEMPTED_THIS_STEP = "preempted_this_step"
    ADMISSION_CLOSED = "admission_closed"
    WAITING_FOR_OUTPUT = "waiting_for_output"
    WAITING_FOR_GRAMMAR = "waiting_for_grammar"
    WAITING_FOR_REMOTE_KVS = "waiting_for_remote_kvs"
    TOO_MANY_PARKED = "too_many_parked"
    TOO_MANY_LORAS = "too_many_loras"
    CONNECTOR_NOT_READY = "connector_not_ready"
    POLICY = "policy"


@attrs.frozen(kw_only=True)
class Skip:
    """Why a request did not run in the last step.

    Args:
        code: the reason.
        needed, available: of what the code names (blocks, tokens, rows); 0 where it makes no sense.
        waits_on: in words, the outside event that would let it go on, or None.
    """

    code: SkipCode
    needed: int = 0
    available: int = 0
    waits_on: str | None = None


@attrs.frozen(kw_only=True)
class SchedulerStats:
    """A snapshot. Gauges first, then counters since the scheduler was made.

    Args:
        num_running, num_waiting, num_parked: requests in each state now.
        num_in_flight: plans whose result is not in.
        num_held_for_peers: hand-overs whose blocks are kept.
        num_free_blocks, num_usable_blocks: of the pool.
        num_steps, num_scheduled_tokens, num_preemptions, num_finished: totals.
        num_prefix_queried_tokens, num_prefix_hit_tokens: at admissions, of the local prefix cache.
        num_external_tokens: tokens that connectors brought.
        num_failed_loads, num_recomputed_tokens: loads that requests waited for in vain, and what
            that cost. A connector counts by how a load ended: one that is called off at its
            deadline has failed here, and was cancelled there.
        num_late_events: connector events that were late, repeated or unknown.
        num_policy_errors: calls of array hooks that raised.
        num_cut_off_loads: cancelled loads that were stopped by force, because of their age or of
            how many blocks were in quarantine.
        num_quarantined_blocks, max_num_quarantined_blocks: blocks in quarantine now, and how many
            may be before the oldest loads are cut off.
        connector: what became of hand-overs and loads, as the connector counts it.
    """

    num_running: int
    num_waiting: int
    num_parked: int
    num_in_flight: int
    num_held_for_peers: int
    num_free_blocks: int
    num_usable_blocks: int
    num_quarantined_blocks: int
    max_num_quarantined_blocks: int
    num_steps: int
    num_scheduled_tokens: int
    num_preemptions: int
    num_finished: int
    num_prefix_queried_tokens: int
    num_prefix_hit_tokens: int
    num_external_tokens: int
    num_failed_loads: int
    num_recomputed_tokens: int
    num_cut_off_loads: int
    num_late_events: int
    num_policy_errors: int
    connector: ConnectorStats = attrs.field(factory=ConnectorStats)


class Scheduler(ABC):
    """Decides, step by step, which tokens are computed. One thread owns it.

    The loop calls `schedule`, runs the plan, and calls `update_from_output` with the result. It may
    call `schedule` again before the result is in; results must come back in the order of plans.
    Everything else may be called between any two of these.
    """

    @abstractmethod
    def add_request(self, request: Request) -> RequestHandle:
        """Put a request into the queue.

        Raises:
            DuplicateRequest: an unfinished request has this id, which is unharmed; or one whose
                end no `StepResult` and no `drain` has delivered yet.
            InvalidRequest: it can never fit; the message gives the numbers.
        """

    @abstractmethod
    def abort_requests(self, requests: Iterable[str | RequestHandle]) -> None:
        """End requests with ``abort``. Unknown and finished ones are ignored.

        Each gives exactly one finish event, in the next `StepResult` or from `drain`.
        """

    @property
    @abstractmethod
    def in_flight(self) -> tuple[SchedulerOutput, ...]:
        """The plans whose result is not in, the oldest first."""

    @abstractmethod
    def schedule(self) -> SchedulerOutput:
        """Take in outside events and deadlines, then plan the running rows, then admit.

        The plan may have no tokens and still carry connector work and finished rows.

        Raises:
            SchedulerStalled: work exists that nothing can advance: a fault of a part, not of load.
        """

    @abstractmethod
    def get_grammar_bitmask(self, output: SchedulerOutput) -> GrammarBitmask | None:
        """The tokens that structured rows of a plan may draw; None when there are no such rows.

        Meant to be called while the model runs.
        """

    @abstractmethod
    def update_from_output(
        self, output: SchedulerOutput, model_output: ModelRunnerOutput
    ) -> StepResult:
        """Take in the result of the oldest plan in flight.

        Raises:
            OutputOrder: ``output`` is not the oldest plan in flight.
            OutputMismatch: ``model_output`` does not answer the plan; nothing has changed, and the
                right result may still be given.
        """

    @abstractmethod
    def abandon(
        self,
        output: SchedulerOutput,
        *,
        dispatched: bool = False,
        transfer_report: TransferReport | None = None,
    ) -> None:
        """Take back the newest plan in flight.

        Args:
            output: the newest plan.
            dispatched: whether a worker may have begun it. If not, all is as before it was made.
                If so, its rows are computed again and told to the workers afresh; blocks that it
                may have written lose their keys; its victims stay preempted.
            transfer_report: what the workers' connectors had to say in a result of the plan that is
                given up with it: connectors do not say it again. None when there is no result.

        Raises:
            OutputOrder: ``output`` is not the newest plan in flight.
        """

    @abstractmethod
    def drain(self) -> tuple[RequestOutput, ...]:
        """Return finish events that no `StepResult` has carried yet, and forget them."""

    @abstractmethod
    def has_requests(self) -> bool:
        """Whether anything is unfinished, in flight, held for a peer, or not yet told.

        A loop that serves for ever steps while this or `has_work` is true: when the last request
        has ended, one more step tells the workers so.
        """

    @abstractmethod
    def has_work(self) -> bool:
        """Whether a step now could do something; False means that only time or an outside event
        (see `next_wakeup`) can change anything."""

    @abstractmethod
    def next_wakeup(self) -> float | None:
        """When the next deadline falls, in seconds on the scheduler's clock; None without one."""

    @abstractmethod
    def status(self, request_id: str) -> RequestStatus | None:
        """Where an unfinished request is in its life; None when the id is unknown or finished."""

    @abstractmethod
    def explain(self, request_id: str) -> Skip:
        """Why a request did not run in the last step."""

    @abstractmethod
    def pause(self) -> None:
        """Plan no tokens until `resume`. Outside events and deadlines are still taken in."""

    @abstractmethod
    def resume(self) -> None:
        """Undo `pause`."""

    @abstractmethod
    def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        """Drop every cached prefix, for instance after new weights.

        Args:
            preempt_running: preempt every running request first, so that nothing computed before
                is used again.

        Returns:
            True when everything was dropped; False when a block is in use, and nothing was changed.
        """

    @abstractmethod
    def stats(self) -> SchedulerStats:
        """A snapshot for metrics."""

    @abstractmethod
    def check(self) -> None:
        """Audit everything; raise `InvariantBroken` with what is wrong."""

    @abstractmethod
    def fingerprint(self) -> bytes:
        """A digest of the state that decides future plans; leaves out epochs and generations."""
