"""Plans and masks that cannot be, and calls out of order: what is said, and who goes on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from runner_driver import RunnerDriver
from runner_pair import make_runner
from tiny_models import save_tiny_model

from pdcore import KVCacheManager, Limits, LRUBlockPool, Request, SamplingParams, UnifiedScheduler
from pdcore.errors import ConfigError, ExecutorError, PdcoreError
from pdcore.kvcache.spec import KVCacheConfig
from pdcore.loop import step
from pdcore.messages import GrammarBitmask
from pdcore.runner.executor import InProcessExecutor

PROMPTS = [list(range(3, 12)), list(range(40, 46))]


@pytest.fixture
def driver(tiny_llama: Path) -> Iterator[RunnerDriver]:
    runner = make_runner(tiny_llama)
    yield RunnerDriver(runner, num_blocks=64)
    runner.close()


def _start(driver: RunnerDriver) -> None:
    for row, prompt in enumerate(PROMPTS):
        driver.start(row, prompt)
        driver.prefill(row)


def _int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    ("block_ids", "cause"),
    [
        ([1000000, 2, 3], "block ids span 2..1000000, but .* has the blocks 1..63"),
        ([1, -3, 2], "block ids span -3..2"),
        ([1, 0, 2], "block 0, the null block, was given for position 1"),
        ([], "tokens up to 9 were scheduled, but the row has blocks for 0"),
        ([1, 2], "tokens up to 9 were scheduled, but the row has blocks for 8"),
    ],
)
@pytest.mark.parametrize("num_computed", [0, 8])
def test_a_row_that_starts_with_bad_blocks_fails_alone(
    driver: RunnerDriver, block_ids: list[int], cause: str, num_computed: int
) -> None:
    """As a chunk and as a decode; the other row of the plan draws."""
    driver.start(0, PROMPTS[0], num_computed=num_computed)
    driver.start(1, PROMPTS[1])
    plan = driver.plan({0: 9 - num_computed, 1: 6})
    bad, good = plan.scheduled_new_reqs
    bad = attrs.evolve(bad, block_ids=_int32(*block_ids))
    driver.runner.execute_model(attrs.evolve(plan, scheduled_new_reqs=(bad, good)))
    assert {1} == set(driver.take(driver.runner.sample_tokens(None)))
    assert driver.errors.keys() == {0}
    assert re.search(cause, driver.errors[0])


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ([(0, 3, 64)], "block ids span 64..64, but"),
        ([(0, 3, -1)], "block ids span -1..-1, but"),
        ([(0, 3, 0)], "block ids span 0..0, but"),
        ([(0, 1, 0)], "block ids span 0..0, but"),
        ([(0, 3, 9), (0, 5, 10)], "blocks up to position 5 were given, but not all before it"),
        ([], "tokens up to 13 were scheduled, but the row has blocks for 12"),
        ([(0, 3, 9)], None),
        ([(0, 4, 8), (0, 3, 9)], None),
    ],
)
def test_a_row_that_is_told_a_bad_block_fails_alone(
    driver: RunnerDriver, changes: list[tuple[int, int, int]], cause: str | None
) -> None:
    """Its neighbour decodes, and the row can be used again."""
    _start(driver)
    driver.decode(3)
    plan = driver.plan({0: 1, 1: 1})
    rows, positions, ids = np.array(changes, np.int32).reshape(-1, 3).T.copy()
    plan = attrs.evolve(plan, block_rows=rows, block_positions=positions, block_ids=ids)
    driver.runner.execute_model(plan)
    assert ({0, 1} if cause is None else {1}) == set(driver.take(driver.runner.sample_tokens(None)))
    assert driver.errors.keys() == (set() if cause is None else {0})
    assert cause is None or driver.errors[0].startswith(cause)
    driver.finish(0)
    driver.start(0, PROMPTS[0])
    assert {0, 1} == set(driver.step({0: 9, 1: 1}))


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"num_scheduled_tokens": _int32(0, 1)}, "0 tokens from position 9 were scheduled"),
        ({"num_scheduled_tokens": _int32(-2, 1)}, "-2 tokens from position 9 were scheduled"),
        ({"num_computed_tokens": _int32(-1, 6)}, "1 tokens from position -1 were scheduled"),
        ({"num_scheduled_tokens": _int32(2**31 - 1, 1)}, "tokens from position 9 were scheduled"),
    ],
)
def test_counts_that_cannot_be_fail_their_row_alone(
    driver: RunnerDriver, changes: dict[str, Any], cause: str
) -> None:
    """A row computes at least one token, from position 0 on."""
    _start(driver)
    driver.runner.execute_model(attrs.evolve(driver.plan({0: 1, 1: 1}), **changes))
    assert {1} == set(driver.take(driver.runner.sample_tokens(None)))
    assert cause in driver.errors[0]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"rows": _int32(0, 8)}, ConfigError, "row 8, but this worker has max_num_seqs=8"),
        ({"rows": _int32(0, -1)}, ConfigError, "names row -1"),
        ({"finished_rows": _int32(99)}, ConfigError, "names row 99"),
        ({"epochs": _int32(1)}, ExecutorError, r"epochs int32\(1,\)"),
        ({"samples": np.ones(1, np.bool_)}, ExecutorError, r"samples bool\(1,\)"),
        ({"rows": np.arange(2, dtype=np.int64)}, ExecutorError, r"rows int64\(2,\)"),
        ({"rows": [0, 1]}, ExecutorError, "rows list"),
        ({"block_rows": _int32(0)}, ExecutorError, r"block_rows int32\(1,\)"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(
    driver: RunnerDriver, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Before anything of it is taken in: the plan that was meant runs after it."""
    _start(driver)
    plan = driver.plan({0: 1, 1: 1})
    with pytest.raises(error, match=message):
        driver.runner.execute_model(attrs.evolve(plan, **changes))
    driver.runner.execute_model(plan)
    assert {0, 1} == set(driver.take(driver.runner.sample_tokens(None)))


@pytest.mark.parametrize(("row", "position"), [(77, 0), (-1, 0), (0, 12), (0, -1)])
def test_a_change_of_no_place_is_refused(driver: RunnerDriver, row: int, position: int) -> None:
    """A table has rows and positions by the worker's limits."""
    _start(driver)
    plan = attrs.evolve(
        driver.plan({0: 1, 1: 1}),
        block_rows=_int32(row),
        block_positions=_int32(position),
        block_ids=_int32(9),
    )
    with pytest.raises(ConfigError, match="give scheduler and runner the same limits"):
        driver.runner.execute_model(plan)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": _int32(9)}, "mask names row 9"),
        ({"rows": _int32(-4)}, "mask names row -4"),
        ({"rows": _int32(0, 1)}, r"rows int32\(2,\), epochs int32\(1,\)"),
        ({"bits": np.full(4, -1, np.int32)}, r"bits int32\(4,\)"),
        ({"bits": np.full((1, 4), 1, np.uint32)}, r"bits uint32\(1, 4\)"),
        ({"bits": np.full((2, 4), 1, np.int32)}, r"bits int32\(2, 4\)"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(
    driver: RunnerDriver, changes: dict[str, Any], message: str
) -> None:
    """And the draws that it was for do not count: the same plan may come again."""
    _start(driver)
    mask = GrammarBitmask(rows=_int32(0), epochs=_int32(1), bits=np.full((1, 4), -1, np.int32))
    plan = driver.plan({0: 1, 1: 1})
    driver.runner.execute_model(plan)
    with pytest.raises(PdcoreError, match=message):
        driver.runner.sample_tokens(attrs.evolve(mask, **changes))
    driver.runner.execute_model(plan)
    assert {0, 1} == set(driver.take(driver.runner.sample_tokens(mask)))


def test_a_draw_that_was_not_made_is_missed(driver: RunnerDriver) -> None:
    """A plan that counts on it fails its rows, instead of reading what was drawn before."""
    _start(driver)
    driver.runner.execute_model(driver.plan({0: 1, 1: 1}))
    assert driver.step({0: 1, 1: 1}) == {}
    assert "tokens 10..10 were scheduled, but the worker knows 9" in driver.errors[0]


def test_a_plan_that_fails_leaves_nothing_to_sample(driver: RunnerDriver) -> None:
    """Not even the one before it."""
    _start(driver)
    plan = driver.plan({0: 1, 1: 1})
    driver.runner.execute_model(plan)
    with pytest.raises(ConfigError):
        driver.runner.execute_model(None)
    with pytest.raises(ExecutorError, match="without an execute_model"):
        driver.runner.sample_tokens(None)


@pytest.mark.parametrize("num_blocks", [0, 1, 2.5, "8"])
def test_a_cache_of_no_size_is_refused(tiny_llama: Path, num_blocks: Any) -> None:
    """A cache has the null block and one more."""
    runner = make_runner(tiny_llama)
    config = KVCacheConfig(spec=runner.get_kv_cache_spec(), num_blocks=num_blocks)
    with pytest.raises(ConfigError, match=f"num_blocks={num_blocks!r}: must be an integer"):
        runner.initialize_from_config(config)
    with pytest.raises(ConfigError, match="config=None: pass an instance of KVCacheConfig"):
        runner.initialize_from_config(None)


def test_a_cache_is_made_once(driver: RunnerDriver) -> None:
    """Another one would take away what rows refer to."""
    config = KVCacheConfig(spec=driver.runner.get_kv_cache_spec(), num_blocks=8)
    with pytest.raises(ExecutorError, match="a cache is made once"):
        driver.runner.initialize_from_config(config)


def test_a_closed_runner_says_so(driver: RunnerDriver) -> None:
    """Whatever it is asked for, but for what it has kept."""
    _start(driver)
    runner, plan = driver.runner, driver.plan({0: 1})
    runner.execute_model(plan)
    runner.close()
    config = KVCacheConfig(spec=runner.get_kv_cache_spec(), num_blocks=8)
    for call in (
        lambda: runner.sample_tokens(None),
        lambda: runner.execute_model(plan),
        lambda: runner.initialize_from_config(config),
        runner.determine_available_memory,
        lambda: runner.fingerprint,
        lambda: runner.num_weight_bytes,
    ):
        with pytest.raises(ExecutorError, match=r"after close\(\): build a new runner"):
            call()
    assert runner.vocab_size == 128


def test_a_row_behind_its_window_may_lose_blocks(tmp_path: Path) -> None:
    """Under a sliding window an engine gives blocks back, before a row starts and while it runs."""
    runner = make_runner(save_tiny_model("mistral, window", tmp_path))
    limits = Limits(max_num_seqs=2, max_num_batched_tokens=12, max_model_len=48)
    executor = InProcessExecutor(lambda: runner, num_blocks=64)
    executor.start()
    manager = KVCacheManager(LRUBlockPool(64, 4), groups=(runner.get_kv_cache_spec(),))
    scheduler = UnifiedScheduler(manager, limits=limits)
    sampling = SamplingParams(max_tokens=12, temperature=0)
    ends = []
    for name in ("first", "again"):
        scheduler.add_request(Request(name, list(range(30)), sampling=sampling))
        while scheduler.has_requests():
            ends += [end for end in step(scheduler, executor).outputs if end.finish_reason]
    executor.close()
    assert [(end.cause, end.num_cached_tokens) for end in ends] == [(None, 0), (None, 28)]
