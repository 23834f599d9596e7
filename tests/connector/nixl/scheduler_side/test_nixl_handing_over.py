"""A prefill engine's scheduler half: which ends leave a ticket, and how long it lasts."""

from __future__ import annotations

import pytest
from nixl_engines import until
from nixl_halves import PROMPT, Half, decode_request, half, sent_by

from pdcore.clock import VirtualClock
from pdcore.errors import ConfigError
from pdcore.request import FinishReason, Request, SamplingParams


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_stop_and_length_hand_over(prefill: Half, reason: FinishReason) -> None:
    """A prompt whose one token ended it either way leaves a ticket for all its tokens."""
    hand_over = prefill.hand_over(reason=reason)
    assert hand_over is not None
    assert hand_over.kv_transfer_params is not None
    assert hand_over.kv_transfer_params["num_tokens"] == len(PROMPT)
    assert hand_over.kv_transfer_params["block_ids"] == [10, 11, 12, 13]
    assert hand_over.kv_transfer_params["transfer_id"] == hand_over.transfer_id
    assert prefill.connector.has_pending()


@pytest.mark.parametrize(
    "reason",
    [FinishReason.ABORT, FinishReason.ERROR, FinishReason.TIMEOUT, FinishReason.CAPACITY],
)
def test_other_ends_hand_nothing_over(prefill: Half, reason: FinishReason) -> None:
    """A prompt that failed leaves no ticket."""
    assert prefill.hand_over(reason=reason) is None
    assert not prefill.connector.has_pending()


def test_nothing_computed_hands_nothing_over(prefill: Half) -> None:
    """A prompt without computed tokens leaves no ticket rather than an empty one."""
    assert prefill.hand_over(num_tokens=0) is None


def test_a_partly_computed_prompt_hands_over_its_part(prefill: Half) -> None:
    """A ticket covers the tokens whose KV exists, and names only their blocks."""
    hand_over = prefill.hand_over(num_tokens=5)
    assert hand_over is not None
    assert hand_over.kv_transfer_params is not None
    assert hand_over.kv_transfer_params["num_tokens"] == 5
    assert hand_over.kv_transfer_params["block_ids"] == [10, 11]


def test_a_request_without_the_wish_hands_nothing_over(prefill: Half) -> None:
    """An ordinary request leaves nothing behind."""
    request = Request("r", PROMPT, sampling=SamplingParams(max_tokens=1))
    prefill.end(request, prefill.add(request), FinishReason.LENGTH)
    assert not prefill.connector.has_pending()


def test_a_lapsed_lease_frees_the_blocks_on_time() -> None:
    """The connector says when the lease ends, and lets the blocks go then."""
    clock = VirtualClock()
    with half(clock=clock, lease_s=30) as prefill:
        ticket = prefill.ticket()
        assert prefill.connector.next_wakeup() == 30
        clock.advance(29)
        assert sent_by(prefill) == []
        clock.advance(1)
        assert sent_by(prefill) == [ticket["transfer_id"]]
        assert prefill.connector.next_wakeup() is None
        assert not prefill.connector.has_pending()


def test_a_lease_whose_end_a_reader_finds_out_frees_the_blocks_at_once() -> None:
    """A late renewal ends the ticket before the loop looked: the next step is due all the same."""
    clock = VirtualClock()
    with half(clock=clock, lease_s=30) as prefill, half() as decode:
        ticket = prefill.ticket()
        clock.advance(31)
        decode.add(decode_request(ticket))
        until(lambda: prefill.connector.stats().tickets.num_late > 0)
        assert prefill.connector.next_wakeup() == 31
        assert sent_by(prefill) == [ticket["transfer_id"]]
        assert prefill.connector.next_wakeup() is None


def test_a_wrong_block_size_is_noticed() -> None:
    """A block size that is not the pool's is an error that names the setting."""
    with half(block_size=2) as prefill, pytest.raises(ConfigError, match=r"NixlConfig\.block_size"):
        prefill.hand_over()
