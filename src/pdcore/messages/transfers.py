"""What workers say of KV transfers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import attrs

if TYPE_CHECKING:
    from pdcore.connector.stats import TransferStats

__all__ = ["LoadFailure", "PushReport", "TransferKey", "TransferReport"]


class TransferKey(NamedTuple):
    """Names one attempt to load one request's KV. Never reused, unlike request ids."""

    uid: int
    attempt: int


@attrs.frozen(kw_only=True)
class LoadFailure:
    """A load that ended without all of its tokens.

    Args:
        transfer: which load.
        num_valid_tokens: tokens from the start of the prompt that are good, local ones included.
        cause: what went wrong, for people.
    """

    transfer: TransferKey
    num_valid_tokens: int
    cause: str


@attrs.frozen(kw_only=True)
class PushReport:
    """A rank sends nothing of a push any more.

    Args:
        push_id: which push; attempt: which beginning of it.
        rank: who says so.
        num_blocks: how many blocks, from the first on, arrived in whole.
        cause: why there are no more, for people; empty if all that was ordered arrived.
        was_cut: whether a write was ended by force, so that parts of it may still arrive.
    """

    push_id: str
    attempt: int
    rank: int
    num_blocks: int
    cause: str = ""
    was_cut: bool = False


@attrs.frozen(kw_only=True)
class TransferReport:
    """What a worker's connector has to say since its last report.

    Args:
        finished_sending: transfer ids of hand-overs whose blocks nobody reads any more.
        finished_recving: loads whose data is all there.
        failed: loads that ended otherwise. Once a load is in here, or in ``finished_recving``, the
            connector writes to its blocks no more.
        measured: what finished reads took, from connectors that measure.
        pushed: pushes that ended on a rank, from connectors that send KV ahead.
    """

    finished_sending: tuple[str, ...] = ()
    finished_recving: tuple[TransferKey, ...] = ()
    failed: tuple[LoadFailure, ...] = ()
    measured: tuple[TransferStats, ...] = ()
    pushed: tuple[PushReport, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.finished_sending or self.finished_recving or self.failed or self.pushed)
