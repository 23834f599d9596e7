"""One push in the hands of a prefill engine's worker."""

from __future__ import annotations

from collections import deque

import attrs

from pdcore.connector.nixl.meta import PushTask

__all__ = ["RankPush"]


@attrs.define(eq=False, kw_only=True)
class RankPush:
    """What this rank knows of one push.

    Args:
        serial: names its writes to the writer.
        attempt: the newest beginning that blocks were ordered of.
        num_done: how many blocks of it, from the first on, arrived.
        waiting: what is still to be sent, in order.
        flying: what is being written, or None.
        cause: why nothing more is sent, or empty.
        was_cut: whether a write ended by force.
        must_report: whether its end was asked for.
    """

    push_id: str
    serial: int
    attempt: int = 0
    num_done: int = 0
    waiting: deque[PushTask] = attrs.field(factory=deque)
    flying: PushTask | None = None
    cause: str = ""
    was_cut: bool = False
    must_report: bool = False
