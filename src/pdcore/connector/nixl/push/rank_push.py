"""One push in the hands of a prefill engine's worker."""

from __future__ import annotations

from collections import deque

import attrs

from pdcore.connector.nixl.meta import PushTask
from pdcore.messages import PushReport

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

    def add(self, task: PushTask) -> None:
        """More is to be sent. A new attempt leaves nothing of the last one to be done."""
        if task.attempt != self.attempt:
            self.attempt, self.num_done = task.attempt, 0
            self.waiting.clear()
        if not self.cause:
            self.waiting.append(task)

    def give_up(self, cause: str) -> None:
        """Send nothing more. The first cause stands."""
        self.cause = self.cause or cause
        self.waiting.clear()

    def end_write(self, cause: str) -> None:
        """What was flying is there, or the cause says why not."""
        task, self.flying = self.flying, None
        assert task is not None
        if cause:
            self.was_cut = True
            self.give_up(cause)
        elif task.attempt == self.attempt and task.first == self.num_done:
            self.num_done += task.block_ids.size

    def report(self, rank: int) -> PushReport:
        """What became of it."""
        return PushReport(
            push_id=self.push_id,
            attempt=self.attempt,
            rank=rank,
            num_blocks=self.num_done,
            cause=self.cause,
            was_cut=self.was_cut,
        )
