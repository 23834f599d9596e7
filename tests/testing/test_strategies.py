"""The strategies give legal things, and the ones that matter do come up."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import Phase, find, given, settings

from pdcore.request import Request
from pdcore.scheduler.base import Limits
from pdcore.testing.strategies import Abort, Add, Operation, Step, limits, requests, traces

SEARCH = settings(max_examples=2000, database=None, phases=[Phase.generate])


@given(requests("name", max_prompt_len=10, max_tokens=3, vocab_size=20))
def test_requests_keep_to_their_bounds(request: Request):
    """Lengths and ids are within what was asked for."""
    assert request.request_id == "name"
    assert 1 <= request.num_prompt_tokens <= 10
    assert 0 <= int(request.prompt_token_ids.min()) <= int(request.prompt_token_ids.max()) < 20
    assert request.sampling.max_tokens <= 3


@given(limits(max_num_seqs=3, max_model_len=32))
def test_limits_are_tight(one: Limits):
    """Budgets are near the number of rows, so that they run out."""
    assert one.max_num_seqs <= 3
    assert one.max_num_batched_tokens <= one.max_num_seqs + 24
    assert one.max_model_len == 32


@given(traces(max_num_requests=3))
def test_traces_add_each_request_once(trace: list[Operation]):
    """No id is added twice, and nothing comes before the first request."""
    names = [op.request.request_id for op in trace if isinstance(op, Add)]
    assert len(names) == len(set(names)) <= 3
    assert isinstance(trace[0], Add)


def shares_a_block(trace: list[Operation]) -> bool:
    """Whether two requests of a trace begin with the same block in the same domain."""
    starts = [
        (op.request.cache_salt, op.request.lora, op.request.prompt_token_ids[:4].tolist())
        for op in trace
        if isinstance(op, Add) and op.request.num_prompt_tokens > 4
    ]
    return any(starts.count(start) > 1 for start in starts)


@pytest.mark.parametrize(
    "happens",
    [
        shares_a_block,
        lambda trace: any(isinstance(op, Step) and op.aborts for op in trace),
        lambda trace: any(isinstance(op, Abort) for op in trace),
        lambda trace: any(isinstance(op, Add) and op.request.lora for op in trace),
        lambda trace: any(isinstance(op, Add) and op.request.cache_salt for op in trace),
    ],
    ids=["shared block", "abort in flight", "abort", "adapter", "salt"],
)
def test_what_matters_comes_up(happens: object):
    """Shared prefixes, domains and aborts are all within reach."""
    find(traces(), happens, settings=SEARCH)  # type: ignore[arg-type]


NO_HYPOTHESIS = """
import importlib.util, sys
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: (
    None if name == "hypothesis" else real(name, package)
)
from pdcore.errors import MissingExtra
import pdcore.testing
pdcore.testing.FakeKVRunner, pdcore.testing.LoopbackConnector, pdcore.testing.VirtualClock
for get in (
    lambda: pdcore.testing.block_pool_machine,
    lambda: __import__("pdcore.testing.strategies"),
):
    try:
        get()
    except MissingExtra as error:
        assert "pdcore[testing]" in str(error), error
    else:
        raise SystemExit("no MissingExtra")
assert not {"hypothesis", "torch", "nixl"} & set(sys.modules), sys.modules.keys()
"""


def test_without_hypothesis_the_fakes_work_and_the_rest_names_its_extra():
    """The kit needs numpy and attrs alone until somebody asks for a strategy."""
    result = subprocess.run(
        [sys.executable, "-c", NO_HYPOTHESIS], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
