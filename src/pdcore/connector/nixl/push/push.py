"""One push in the hands of a prefill engine: which of its request's blocks are complete."""

from __future__ import annotations

import attrs
import numpy as np

from pdcore.connector.base import FinishedBlocks
from pdcore.connector.nixl.meta import PeerInfo, PushTask
from pdcore.connector.nixl.push.params import PushParams
from pdcore.messages import NewRequestData, PushReport
from pdcore.request import Request

__all__ = ["Push"]

_NO_ROW = -1


@attrs.define(eq=False, kw_only=True)
class Push:
    """One request's push. The scheduler's thread owns it.

    A request keeps its blocks, and does not change those that are complete, from its start in a row
    until it loses that row. So each start is a new attempt, which sends everything again; only what
    the newest attempt sent is vouched for.

    Args:
        uid, request: the request.
        params: the leave to push.
        peer: the peer's staging memory, once it agreed.
        row: where the request runs, or -1.
        attempt: counts its starts; table: its blocks by position, since the newest one.
        num_complete: blocks from the first on that are complete once the newest plan that it ran
            in is done.
        num_ordered: how many of them the workers were told to send.
        has_orders: whether the workers were ever told anything.
        is_ending: whether nothing more is sent.
        is_wanted: whether what was ordered is still of use.
        ticket_id: the request's hand-over, once it ended with one.
        num_held: how many of the newest attempt's blocks that hand-over holds.
        keeps: names the hold that must last until nothing is sent any more, or empty.
        owns_hold: whether that hold is there for the push alone, and ends with it; else it is the
            hand-over's, which outlasts the push.
        reports: the ranks' reports, by rank.
    """

    uid: int
    request: Request
    params: PushParams
    peer: PeerInfo | None = None
    row: int = _NO_ROW
    attempt: int = 0
    table: dict[int, int] = attrs.field(factory=dict)
    num_complete: int = 0
    num_ordered: int = 0
    has_orders: bool = False
    is_ending: bool = False
    is_wanted: bool = True
    ticket_id: str = ""
    num_held: int = 0
    keeps: str = ""
    owns_hold: bool = False
    reports: dict[int, PushReport] = attrs.field(factory=dict)

    @property
    def push_id(self) -> str:
        return self.params.push_id

    def start(self, new: NewRequestData) -> None:
        """The request got a row, or the workers are told of it afresh."""
        self.row = new.row
        self.attempt += 1
        self.table = dict(enumerate(new.block_ids.tolist()))
        self.num_complete = self.num_ordered = 0

    def lose_row(self) -> None:
        """The request runs no more; what it sent may come from blocks that others get."""
        self.row = _NO_ROW
        self.attempt += 1
        self.num_complete = self.num_ordered = 0

    def compute(self, num_tokens: int, *, block_size: int) -> None:
        """After the plan that is being made, so many tokens have their KV."""
        num_prompt = self.request.num_prompt_tokens
        # The last block of the prompt is sent as it is, once nothing of the prompt is missing.
        num_blocks = num_tokens // block_size
        if num_tokens >= num_prompt:
            num_blocks = -(-num_prompt // block_size)
        self.num_complete = min(num_blocks, len(self.params.slots))

    def take_task(self) -> PushTask | None:
        """What can be sent and was not ordered yet; None if there is nothing."""
        if self.peer is None or self.is_ending or self.num_ordered >= self.num_complete:
            return None
        first = self.num_ordered
        end = next((at for at in range(first, self.num_complete) if at not in self.table), None)
        end = self.num_complete if end is None else end
        self.num_ordered = end
        self.has_orders = True
        return PushTask(
            push_id=self.push_id,
            attempt=self.attempt,
            peer=self.peer,
            first=first,
            block_ids=np.array([self.table[place] for place in range(first, end)], np.int32),
            slots=np.array(self.params.slots[first:end], np.int32),
        )

    def retake(self, task: PushTask) -> None:
        """A task never reached a worker: what it was to send is ordered again."""
        if task.attempt == self.attempt:
            self.num_ordered = min(self.num_ordered, task.first)

    def hand_over(self, ticket_id: str, blocks: FinishedBlocks) -> None:
        """The request ended with a hand-over of these blocks."""
        self.ticket_id = ticket_id
        for place, block_id in enumerate(blocks.block_ids.tolist()):
            if self.table.get(place) != block_id:
                break
            self.num_held = place + 1

    def num_vouched(self) -> int:
        """How many blocks, from the first on, are in their slots on every rank and held."""
        if not self.ticket_id or not self.reports:
            return 0
        if any(report.attempt != self.attempt for report in self.reports.values()):
            return 0
        return min(self.num_held, *(report.num_blocks for report in self.reports.values()))
