"""What a prefill engine sends of a prompt, and what of it it vouches for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from nixl_engines import a_request

from pdcore.connector.base import FinishedBlocks
from pdcore.connector.nixl.meta import PeerInfo
from pdcore.connector.nixl.push.params import PushParams
from pdcore.connector.nixl.push.push import Push
from pdcore.messages import NewRequestData, PushReport
from pdcore.request import FinishReason, SamplingParams

PROMPT = list(range(14))
BLOCKS = [7, 8, 9, 10]


def a_push(num_slots: int = 4) -> Push:
    params = PushParams(
        engine_id="d",
        epoch="1",
        push_id="x",
        host="127.0.0.1",
        port=1,
        slots=tuple(range(20, 20 + num_slots)),
        block_size=4,
        lease_s=5,
        prompt_digest="ab" * 32,
    )
    return Push(uid=1, request=a_request(PROMPT), params=params)


def started(num_slots: int = 4, block_ids: list[int] = BLOCKS) -> Push:
    """A push whose request has a row, and whose peer agreed."""
    push = a_push(num_slots)
    push.peer = PeerInfo(peer_id="d:1", name="d", ranks=())
    push.start(row_of(block_ids))
    return push


def row_of(block_ids: list[int]) -> NewRequestData:
    return NewRequestData(
        row=3,
        epoch=0,
        uid=1,
        request_id="r",
        token_ids=np.array(PROMPT, np.int32),
        num_prompt_tokens=len(PROMPT),
        num_computed_tokens=0,
        block_ids=np.array(block_ids, np.int32),
        sampling=SamplingParams(),
    )


def ordered(push: Push, num_tokens: int) -> list[tuple[int, int]]:
    """Pairs of block and slot that go out once so many tokens are computed."""
    push.compute(num_tokens, block_size=4)
    task = push.take_task()
    if task is None:
        return []
    return list(zip(task.block_ids.tolist(), task.slots.tolist(), strict=True))


def ended(push: Push, block_ids: list[int] = BLOCKS) -> None:
    push.hand_over(
        "t",
        FinishedBlocks(
            block_ids=np.array(block_ids, np.int32),
            generations=np.zeros(len(block_ids), np.int64),
            num_tokens=len(PROMPT),
            finish_reason=FinishReason.LENGTH,
        ),
    )


def report(push: Push, *, rank: int = 0, **changes: Any) -> None:
    fields: dict[str, Any] = {"attempt": push.attempt, "num_blocks": 4}
    push.reports[rank] = PushReport(push_id="x", rank=rank, **fields | changes)


def test_blocks_go_out_once_and_when_they_are_complete() -> None:
    """A chunk sends what it completed; the tail goes with the last token of the prompt."""
    push = started()
    assert ordered(push, 3) == []
    assert ordered(push, 9) == [(7, 20), (8, 21)]
    assert ordered(push, 9) == []
    assert ordered(push, 13) == [(9, 22)]
    assert ordered(push, 14) == [(10, 23)]


def test_no_more_blocks_than_slots() -> None:
    """What has no slot is not sent."""
    assert ordered(started(num_slots=2), 14) == [(7, 20), (8, 21)]


def test_what_is_complete_before_the_peer_agrees_goes_out_later() -> None:
    """Nothing is sent before, and nothing is left out then."""
    push = started()
    peer, push.peer = push.peer, None
    assert ordered(push, 9) == []
    push.peer = peer
    assert ordered(push, 12) == [(7, 20), (8, 21), (9, 22)]


@pytest.mark.parametrize("loses_row", [True, False])
def test_a_new_start_sends_everything_again(loses_row: bool) -> None:
    """After a preemption, and when the workers are told afresh."""
    push = started()
    ordered(push, 14)
    report(push)
    if loses_row:
        push.lose_row()
    push.start(row_of([1, 2, 3, 4]))
    assert ordered(push, 5) == [(1, 20)]
    ended(push, [1, 2, 3, 4])
    assert push.num_vouched() == 0
    report(push, num_blocks=1)
    assert push.num_vouched() == 1


def test_a_block_whose_place_is_unknown_is_not_sent() -> None:
    """A table with a hole sends up to the hole."""
    assert ordered(started(block_ids=[7, 8]), 14) == [(7, 20), (8, 21)]


def test_only_what_every_rank_sent_is_vouched_for() -> None:
    """The rank that sent least decides; one of another attempt spoils it all."""
    push = started()
    ended(push)
    assert push.num_vouched() == 0
    report(push)
    report(push, rank=1, num_blocks=3)
    assert push.num_vouched() == 3
    report(push, rank=1, attempt=push.attempt - 1)
    assert push.num_vouched() == 0


def test_only_blocks_that_are_handed_over_are_vouched_for() -> None:
    """A block that is not the one at its place in the ticket ends what counts."""
    push = started()
    ended(push, [7, 8, 99, 10])
    report(push)
    assert push.num_vouched() == 2


def test_without_a_ticket_nothing_is_vouched_for() -> None:
    """An abort, for instance."""
    push = started()
    report(push)
    assert push.num_vouched() == 0
