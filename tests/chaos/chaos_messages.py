"""What the router and the engine processes tell each other. All of it is frozen and picklable."""

from __future__ import annotations

from typing import Any, Literal

import attrs

MAX_MODEL_LEN = 512


TicketNotice = Literal["Renew", "Reading", "Accept", "Release"]
"""From a decode engine."""
PushNotice = Literal["Claim", "Pushing", "PushEnded"]
"""From a prefill engine."""
Notice = TicketNotice | PushNotice


@attrs.frozen(kw_only=True)
class Timeouts:
    """How long an engine bears with what does not come; short, so that a run sees them all."""

    lease_s: float = 0.8
    request_timeout_s: float = 0.5
    load_timeout_s: float = 3.0
    quarantine_timeout_s: float = 1.5
    stall_timeout_s: float = 2.5


@attrs.frozen(kw_only=True)
class EngineSettings:
    """One engine.

    Args:
        name: to the router and to people.
        port: of its side channel; 0 takes a free one. A restart takes the same one again.
        block_size: tokens in a block.
        num_blocks: of its pool, the null block included.
        num_push_slots: blocks in its staging memory for pushes; 0 takes none.
        num_batched_tokens: how many it computes in a step.
        depth: plans under way.
        on_load_failure, max_load_retries: as `Limits` has them.
        timeouts: its limits in time.
        device_s: how long a forward pass takes.
        num_steps_per_fault: one step in so many fails on the worker; 0 means none does.
        seed: for its own draws.
        protection_off: the protection that is switched off, or empty.
    """

    name: str
    port: int = 0
    block_size: int = 8
    num_blocks: int = 161
    num_push_slots: int = 0
    num_batched_tokens: int = 128
    depth: int = 1
    on_load_failure: Literal["recompute", "fail"] = "recompute"
    max_load_retries: int = 0
    timeouts: Timeouts = attrs.field(factory=Timeouts)
    device_s: float = 0.002
    num_steps_per_fault: int = 500
    seed: int = 0
    protection_off: str = ""


@attrs.frozen(kw_only=True)
class TransferFault:
    """What befalls the first read of a request, or the first write of its push.

    Args:
        delay_s: the data lands so much later.
        is_lost: no completion ever comes.
        breaks: it fails as it is begun, and all that is under way to that peer with it.
    """

    delay_s: float = 0.0
    is_lost: bool = False
    breaks: bool = False


@attrs.frozen(kw_only=True)
class NoticeFault:
    """What befalls the next messages of one kind about one ticket or one push.

    Args:
        message: name of the message's class.
        kind: the request is lost, or its reply is, or it comes late, or twice.
        count: how many messages.
        delay_s: how late.
    """

    message: Notice
    kind: Literal["drop", "lose reply", "delay", "repeat"]
    count: int = 1
    delay_s: float = 0.0


# To an engine.


@attrs.frozen(kw_only=True)
class Submit:
    """Run a request; ``job`` names this life of its id."""

    job: int
    request_id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    deadline_s: float | None = None
    transfer_fault: TransferFault | None = None
    notice_faults: tuple[NoticeFault, ...] = ()


@attrs.frozen(kw_only=True)
class ExpectPush:
    """Give leave to push a prompt; ``job`` and ``num_tries`` name who asks."""

    job: int
    num_tries: int
    prompt_token_ids: tuple[int, ...]


@attrs.frozen
class CallOff:
    """A push that leave was given for is not wanted."""

    push_to: dict[str, Any]


@attrs.frozen
class Abort:
    """End a request."""

    request_id: str


@attrs.frozen
class Explain:
    """Say what a request waits for."""

    request_id: str


@attrs.frozen
class Settle:
    """Come to rest within so many seconds, and say what is left."""

    limit_s: float


@attrs.frozen
class Bye:
    """End."""


# From an engine.


@attrs.frozen(kw_only=True)
class Counts:
    """Totals of one life of an engine."""

    num_loads: int = 0
    num_transfers: int = 0
    num_bytes: int = 0
    num_failed_loads: int = 0
    num_recomputed_tokens: int = 0
    num_late_events: int = 0
    num_duplicates: int = 0
    num_quarantines: int = 0
    num_accepted: int = 0
    num_rejected: int = 0
    num_expired: int = 0
    num_released: int = 0
    num_preemptions: int = 0
    num_failed_steps: int = 0
    num_pushes: int = 0
    num_refused_pushes: int = 0
    num_push_restarts: int = 0
    num_expected: int = 0
    num_declined: int = 0
    num_landed: int = 0
    num_used: int = 0


@attrs.frozen(kw_only=True)
class Told:
    """What a step meant for a request.

    Args:
        job: which life of its id.
        token_ids: new ones.
        finish_reason, cause: why it ended; empty while it lives.
        kv_transfer_params: its ticket.
        num_pushed_blocks: of the KV that it ran on, blocks that were pushed; told at its end.
    """

    job: int
    token_ids: tuple[int, ...] = ()
    finish_reason: str = ""
    cause: str = ""
    kv_transfer_params: dict[str, Any] | None = None
    num_pushed_blocks: int = 0


@attrs.frozen(kw_only=True)
class Leave:
    """The answer to an `ExpectPush`; None when there is no room."""

    job: int
    num_tries: int
    push_to: dict[str, Any] | None


@attrs.frozen(kw_only=True)
class Progress:
    """The news of a step, and the totals so far."""

    told: tuple[Told, ...]
    counts: Counts
    misreads: tuple[str, ...] = ()


@attrs.frozen
class Ready:
    """The engine serves; its side channel has this port."""

    port: int


@attrs.frozen
class Explanation:
    """What a request waits for, in words."""

    words: str


@attrs.frozen(kw_only=True)
class Settled:
    """What is left once nothing should be; ``leaks`` is empty when all is as it should be."""

    leaks: tuple[str, ...]
    counts: Counts


@attrs.frozen
class Failed:
    """The engine ends by an error of its own."""

    cause: str
