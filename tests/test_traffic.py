"""Real traffic: the traces that the benchmark replays, where they are at hand."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bench_traffic import POOL_TOKENS, manager_hit_rate, replay
from traces import BLOCK_SIZE, TraceRequest, exact_lru_hit_rate, load_mooncake

TRACES = Path(__file__).parents[2] / "shared" / "traces"

needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="the traces are not at hand")


def conversations(num_requests: int) -> list[TraceRequest]:
    """Requests that go on from one another, as turns of a few conversations do."""
    draw = random.Random(0)
    turns: list[tuple[int, ...]] = [()]
    requests = []
    for index in range(num_requests):
        begun = draw.choice(turns[-8:])[: draw.randint(0, 12)]
        blocks = begun + tuple(range(100 * index, 100 * index + draw.randint(1, 6)))
        turns.append(blocks)
        requests.append(
            TraceRequest(arrival_time=float(index), block_ids=blocks, num_output_tokens=1)
        )
    return requests


@pytest.mark.parametrize(("num_blocks", "tolerance"), [(40, 0.02), (10_000, 1e-9)])
def test_made_up_traffic_finds_what_an_exact_lru_finds(num_blocks: int, tolerance: float) -> None:
    """The replay itself, where no traces are at hand; with and without evictions."""
    requests = conversations(300)
    exact = exact_lru_hit_rate(requests, num_blocks)
    assert exact > 0.3
    assert abs(manager_hit_rate(requests, num_blocks) - exact) < tolerance


def test_made_up_traffic_runs_through_the_scheduler() -> None:
    """Every KV slot is checked; all requests end."""
    figures = replay(conversations(60), check=True)
    assert figures["num_requests"] == 60
    assert figures["hit_rate"] > 0


@needs_traces
@pytest.mark.parametrize(
    ("name", "percent", "percent_unbounded"),
    [("conversation", 13.6, 36.6), ("synthetic", 30.9, 64.0)],
)
def test_as_many_blocks_are_found_again_as_by_an_exact_lru(
    name: str, percent: float, percent_unbounded: float
) -> None:
    """One request at a time, with a pool of 3M tokens and with one that never evicts."""
    requests = load_mooncake(TRACES / f"{name}_trace.jsonl")
    unbounded = len({key for request in requests for key in request.block_ids}) + 1000
    for num_blocks, expected in (
        (POOL_TOKENS // BLOCK_SIZE, percent),
        (unbounded, percent_unbounded),
    ):
        exact = 100 * exact_lru_hit_rate(requests, num_blocks)
        assert abs(exact - expected) < 0.1
        assert abs(100 * manager_hit_rate(requests, num_blocks) - exact) < 0.3


@needs_traces
def test_traffic_through_scheduler_and_pool_reads_no_stale_kv() -> None:
    """The first requests of an hour, at their arrival times, every KV slot checked."""
    requests = load_mooncake(TRACES / "conversation_trace.jsonl")[:40]
    figures = replay(requests, check=True)
    assert figures["num_requests"] == 40
    assert figures["most_running"] > 8
    assert figures["hit_rate"] > 0
