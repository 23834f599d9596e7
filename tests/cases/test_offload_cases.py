"""Faults that engines had in the field when they kept KV beyond the pool."""

from __future__ import annotations

from typing import Any

import pytest
from harness import Engine, some_tokens

from offload_simulation import TappedOffload, make_config
from pdcore.connector.offload import OffloadConnector
from pdcore.messages import SchedulerOutput
from pdcore.scheduler import Priority

BLOCK_SIZE = 16


def make_engine(*, num_host_blocks: int = 64, **options: Any) -> Engine:
    config = make_config(BLOCK_SIZE, num_host_blocks=num_host_blocks, background=False)
    connector = TappedOffload(OffloadConnector(config))
    engine = Engine(block_size=BLOCK_SIZE, connector=connector, **options)
    connector.scheduler.start(clock=engine.clock, notify=lambda: None)
    connector.meet()
    return engine


def saved_blocks(output: Any) -> list[int]:
    meta = output.connector_meta
    return [] if meta is None else sorted(order.block_id for order in meta.saves)


def test_c17_blocks_that_a_save_reads_may_be_given_away_at_once() -> None:
    """C17: the step that gives A's blocks to B carries their save, which comes before B writes;
    A's prompt then comes back from host memory with A's KV."""
    engine = make_engine(num_usable_blocks=4)
    prompt = some_tokens(3 * BLOCK_SIZE + 1, seed=1)
    engine.add("a", prompt, max_tokens=1)
    engine.step()
    (owned,) = engine.ends["a"]
    assert owned.num_output_tokens == 1
    engine.add("b", 4 * BLOCK_SIZE - 2, max_tokens=2)
    output = engine.schedule()
    saved = saved_blocks(output)
    assert len(saved) == 3
    assert set(saved) <= set(output.scheduled_new_reqs[0].block_ids.tolist())
    engine.execute(output)
    engine.run()
    engine.add("again", prompt, max_tokens=3)
    engine.run()
    assert engine.end("again").num_external_tokens == 3 * BLOCK_SIZE
    engine.assert_as_if_alone()
    engine.assert_idle()


@pytest.mark.parametrize("num_in_flight", [1, 2, 3])
def test_c17_a_preempted_request_resumes_from_what_was_saved(num_in_flight: int) -> None:
    """C17: A gives way to B while steps of A are in flight, and is loaded into other blocks."""
    engine = make_engine(
        num_usable_blocks=8, policy=Priority(displace=True), max_num_seqs=1, max_model_len=200
    )
    prompt = some_tokens(5 * BLOCK_SIZE + 3, seed=1)
    engine.add("a", prompt, max_tokens=40, priority=1)
    for _ in range(4):
        engine.step()
    for place in range(2):
        engine.add(f"b{place}", 6 * BLOCK_SIZE, max_tokens=8)
    engine.run(num_in_flight=num_in_flight)
    assert engine.end("a").num_preemptions >= 1
    assert engine.end("a").num_external_tokens >= 3 * BLOCK_SIZE
    engine.assert_as_if_alone()
    engine.assert_idle()


def test_c29_nothing_is_saved_before_the_step_that_wrote_it_has_ended() -> None:
    """C29: with two steps in flight, a plan saves no more than results cover."""
    engine = make_engine(max_num_seqs=4, max_num_batched_tokens=2 * BLOCK_SIZE)
    engine.add("a", 4 * BLOCK_SIZE, max_tokens=2 * BLOCK_SIZE)
    in_flight: list[SchedulerOutput] = []
    num_processed = num_saved = 0
    while engine.scheduler.has_requests():
        output = engine.schedule()
        num_saved += len(saved_blocks(output))
        assert num_saved <= num_processed // BLOCK_SIZE
        engine.execute(output)
        in_flight.append(output)
        while in_flight and len(in_flight) >= (2 if output.rows.size else 1):
            landed = in_flight.pop(0)
            engine.land()
            num_processed += landed.total_num_scheduled_tokens
    assert num_saved == 5
    engine.assert_as_if_alone()


def test_c29_what_a_failed_step_was_to_write_is_not_saved() -> None:
    """C29: a plan that was taken back leaves nothing to save."""
    engine = make_engine()
    engine.add("a", 3 * BLOCK_SIZE, max_tokens=2)
    output = engine.schedule()
    engine.scheduler.abandon(output, dispatched=True)
    assert saved_blocks(engine.schedule()) == []
    engine.scheduler.abandon(engine.scheduler.in_flight[-1])
    engine.run()
    engine.assert_as_if_alone()


def test_a_save_that_never_reached_a_worker_goes_with_the_next_plan() -> None:
    """An order is not lost with the plan that carried it."""
    engine = make_engine(num_usable_blocks=4)
    prompt = some_tokens(3 * BLOCK_SIZE + 1, seed=1)
    engine.add("a", prompt, max_tokens=1)
    engine.step()
    lost = engine.schedule()
    engine.scheduler.abandon(lost)
    assert saved_blocks(lost)
    engine.add("b", 4 * BLOCK_SIZE - 2, max_tokens=1)
    output = engine.schedule()
    assert saved_blocks(output) == saved_blocks(lost)
    engine.execute(output)
    engine.run()
    engine.add("again", prompt, max_tokens=1)
    engine.run()
    assert engine.end("again").num_external_tokens == 3 * BLOCK_SIZE
    engine.assert_as_if_alone()


def test_old_kv_is_not_found_after_the_cache_was_reset() -> None:
    """New weights make saved blocks as void as those of the pool, whatever their keys."""
    engine = make_engine(num_usable_blocks=4)
    prompt = some_tokens(3 * BLOCK_SIZE + 1, seed=1)
    engine.add("a", prompt, max_tokens=1)
    engine.run()
    assert engine.scheduler.stats().connector.offload.num_in_host == 3
    assert engine.scheduler.reset_prefix_cache()
    engine.add("again", prompt, max_tokens=1)
    engine.run()
    assert engine.end("again").num_external_tokens == 0
    assert engine.end("again").num_cached_tokens == 0
    assert engine.scheduler.stats().num_failed_loads == 0
    assert engine.scheduler.stats().connector.offload.num_in_host == 3


def test_blocks_whose_save_went_down_with_its_step_are_saved_anew() -> None:
    """Their loss is found out by the load that wants them, once."""
    engine = make_engine(num_usable_blocks=4)
    prompt = some_tokens(3 * BLOCK_SIZE + 1, seed=1)
    engine.add("a", prompt, max_tokens=1)
    engine.step()
    engine.scheduler.abandon(engine.schedule(), dispatched=True)
    for turn, num_external in enumerate((0, 3 * BLOCK_SIZE)):
        engine.add(f"b{turn}", 4 * BLOCK_SIZE - 2, max_tokens=1)
        engine.run()
        engine.add(f"again{turn}", prompt, max_tokens=1)
        engine.run()
        assert engine.end(f"again{turn}").num_external_tokens == num_external
    assert engine.scheduler.stats().connector.offload.num_lost == 3
    engine.assert_as_if_alone()
    engine.assert_idle()
