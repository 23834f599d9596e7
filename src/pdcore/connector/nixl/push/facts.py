"""What the control thread learns about a push, and tells the scheduler's thread."""

from __future__ import annotations

import attrs

from pdcore.connector.nixl.meta import PeerInfo

__all__ = ["ClaimFailed", "Claimed", "NotWanted", "PushFact", "PushTold"]


@attrs.frozen(kw_only=True)
class Claimed:
    """The peer agreed; this is its staging memory."""

    uid: int
    peer: PeerInfo


@attrs.frozen(kw_only=True)
class ClaimFailed:
    """The peer did not agree, or could not be asked."""

    uid: int
    cause: str


@attrs.frozen(kw_only=True)
class NotWanted:
    """The peer wants no more of it, or is gone."""

    uid: int
    cause: str


@attrs.frozen(kw_only=True)
class PushTold:
    """The peer knows of the end, or will never know."""

    uid: int


PushFact = Claimed | ClaimFailed | NotWanted | PushTold
