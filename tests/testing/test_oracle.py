"""The oracle: what a request must produce alone."""

from __future__ import annotations

import pytest
from hypothesis import given

from pdcore.errors import ConfigError
from pdcore.request import FinishReason, Request, SamplingParams
from pdcore.testing import FakeModel
from pdcore.testing.strategies import requests

EOS = 2


def request(**sampling: object) -> Request:
    """A request of three tokens."""
    return Request("r", [5, 6, 7], sampling=SamplingParams(**sampling), eos_token_id=EOS)


def model_with(tokens: dict[int, int]) -> FakeModel:
    """A model that is forced to draw the given tokens at the given places of the output."""
    return FakeModel(script=lambda _, position: tokens.get(position - 3))


def test_it_ends_at_max_tokens():
    """``max_tokens`` tokens come out, and the reason is the length."""
    tokens, reason = FakeModel().solo_run(request(max_tokens=4))
    assert (len(tokens), reason) == (4, FinishReason.LENGTH)


def test_it_ends_at_the_model_length():
    """Prompt and output together never pass the model length."""
    tokens, reason = FakeModel().solo_run(request(max_tokens=9), max_model_len=5)
    assert (len(tokens), reason) == (2, FinishReason.LENGTH)


def test_the_end_of_sequence_ends_it_and_is_part_of_the_output():
    """The token that ends a request is delivered."""
    tokens, reason = model_with({1: EOS}).solo_run(request(max_tokens=9))
    assert (tokens[1:], reason) == ([EOS], FinishReason.STOP)


def test_a_stop_token_ends_it():
    """Stop tokens end a request even when it ignores the end of sequence."""
    params = request(max_tokens=9, stop_token_ids=[77], ignore_eos=True)
    tokens, reason = model_with({0: EOS, 2: 77}).solo_run(params)
    assert (len(tokens), tokens[2], reason) == (3, 77, FinishReason.STOP)


def test_min_tokens_keeps_it_going():
    """Before ``min_tokens`` nothing but the length ends a request."""
    model = model_with({0: EOS, 1: EOS, 2: EOS})
    assert model.solo_run(request(max_tokens=9, min_tokens=2))[0] == [EOS, EOS]


def test_stop_wins_over_length():
    """An end of sequence at the last allowed token counts as a stop."""
    assert model_with({1: EOS}).solo_run(request(max_tokens=2))[1] is FinishReason.STOP


@given(requests())
def test_it_is_a_function_of_prompt_and_domain(one: Request):
    """The same request gives the same tokens, all of them ordinary ones."""
    model = FakeModel(vocab_size=32, num_special_tokens=3)
    tokens = model.solo_tokens(one)
    assert tokens == model.solo_tokens(one)
    assert all(3 <= token < 32 for token in tokens)


def test_a_vocabulary_without_ordinary_tokens_is_refused():
    """There must be a token left to draw."""
    with pytest.raises(ConfigError, match="num_special_tokens=8"):
        FakeModel(vocab_size=8, num_special_tokens=8)
