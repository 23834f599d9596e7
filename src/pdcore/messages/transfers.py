"""What workers say of KV transfers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import attrs

from pdcore.answers import is_integer, must_be, must_be_tuple

if TYPE_CHECKING:
    from pdcore.connector.stats import TransferStats

__all__ = [
    "LoadFailure",
    "PushReport",
    "TransferKey",
    "TransferReport",
    "are_failures",
    "are_keys",
    "are_names",
]


class TransferKey(NamedTuple):
    """Names one attempt to load one request's KV. Never reused, unlike request ids."""

    uid: int
    attempt: int


def _is_key(value: object) -> bool:
    """Whether a value names a load."""
    return isinstance(value, TransferKey) and all(map(is_integer, value))


def _vouched(num_tokens: int) -> int:
    return num_tokens if is_integer(num_tokens) else 0


@attrs.frozen(kw_only=True)
class LoadFailure:
    """A load that ended without all of its tokens.

    Args:
        transfer: which load.
        num_valid_tokens: tokens from the start of the prompt that are good, local ones included.
            What is no integer vouches for none: that a load failed is never lost.
        cause: what went wrong, for people.

    Raises:
        TransferError: ``transfer`` names no load.
    """

    transfer: TransferKey = attrs.field(validator=must_be("a TransferKey", _is_key))
    num_valid_tokens: int = attrs.field(converter=_vouched)
    cause: str = attrs.field(converter=str)


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


are_names = must_be_tuple("strings", lambda name: isinstance(name, str))
are_keys = must_be_tuple("TransferKeys", _is_key)
are_failures = must_be_tuple("LoadFailures", lambda failure: isinstance(failure, LoadFailure))
_are_measured = must_be_tuple(
    "TransferStats", lambda stats: _is_key(getattr(stats, "transfer", None))
)
_are_pushes = must_be_tuple("PushReports", lambda push: isinstance(push, PushReport))


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

    Raises:
        TransferError: something is of another type.
    """

    finished_sending: tuple[str, ...] = attrs.field(default=(), validator=are_names)
    finished_recving: tuple[TransferKey, ...] = attrs.field(default=(), validator=are_keys)
    failed: tuple[LoadFailure, ...] = attrs.field(default=(), validator=are_failures)
    measured: tuple[TransferStats, ...] = attrs.field(default=(), validator=_are_measured)
    pushed: tuple[PushReport, ...] = attrs.field(default=(), validator=_are_pushes)

    def __bool__(self) -> bool:
        return bool(self.finished_sending or self.finished_recving or self.failed or self.pushed)
