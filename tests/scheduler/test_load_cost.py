"""Loads that take longer than the computation are declined."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.connector import ExternalMatch
from pdcore.errors import ConfigError
from pdcore.request import Request, SamplingParams
from pdcore.scheduler import FCFS, LoadCost, Priority

REQUEST = Request("r", [1] * 100, sampling=SamplingParams(max_tokens=1))


class _Halving(FCFS):
    """Takes half of whatever is offered."""

    def load(self, request: Request, match: ExternalMatch, num_local_tokens: int) -> int:
        return match.num_tokens // 2


class _Policy(LoadCost, Priority):
    """By priority, and without loads that do not pay."""


class _Stacked(LoadCost, _Halving):
    """Whether, by cost; how much, by halves."""


@given(
    num_tokens=st.integers(1, 100_000),
    load_ms=st.integers(0, 10_000),
    overhead_ms=st.integers(0, 100),
    token_us=st.integers(0, 1000),
)
def test_a_match_is_taken_when_it_pays(
    num_tokens: int, load_ms: int, overhead_ms: int, token_us: int
) -> None:
    """All of it, if transfer and overhead take no longer than so many tokens; else none."""
    policy = LoadCost(prefill_s_per_token=token_us / 1e6, load_overhead_s=overhead_ms / 1e3)
    match = ExternalMatch(num_tokens=num_tokens, is_async=True, load_s=load_ms / 1e3)
    margin = num_tokens * token_us / 1e3 - (load_ms + overhead_ms)
    if abs(margin) > 1e-6:
        assert policy.load(REQUEST, match, 0) == (num_tokens if margin > 0 else 0)


def test_a_match_of_unknown_cost_is_taken() -> None:
    """What cannot be weighed is not declined."""
    policy = LoadCost(prefill_s_per_token=0.0, load_overhead_s=9.0)
    assert policy.load(REQUEST, ExternalMatch(num_tokens=48, is_async=True), 0) == 48


def test_it_goes_before_another_policy() -> None:
    """Every other hook, and how much of a load that pays, is the other's."""
    policy = _Policy(prefill_s_per_token=1.0, displace=True)
    urgent = Request("u", [1], sampling=SamplingParams(max_tokens=1), priority=-5, arrival_time=1.0)
    assert policy.key(urgent)[0] == -5
    stacked = _Stacked(prefill_s_per_token=1.0)
    assert stacked.load(REQUEST, ExternalMatch(num_tokens=48, load_s=1.0), 0) == 24
    assert stacked.load(REQUEST, ExternalMatch(num_tokens=48, load_s=99.0), 0) == 0


@pytest.mark.parametrize("name", ["prefill_s_per_token", "load_overhead_s"])
def test_a_negative_time_is_refused(name: str) -> None:
    """With its name and value."""
    with pytest.raises(ConfigError, match=f"{name}=-1"):
        LoadCost(**{"prefill_s_per_token": 1.0, name: -1.0})
