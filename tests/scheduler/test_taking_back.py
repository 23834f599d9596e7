"""Plans that come to nothing: abandoned, interrupted, out of order."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from scheduler_rig import Rig

from pdcore import (
    FinishReason,
    KVCacheManager,
    LRUBlockPool,
    ModelRunnerOutput,
    Priority,
    Request,
    SamplingParams,
    UnifiedScheduler,
)
from pdcore.errors import OutputOrder
from pdcore.kvcache import KVCacheConfig
from pdcore.scheduler import SkipCode, dispatch
from pdcore.testing import Driver, FakeKVRunner


def test_results_come_in_order_and_plans_are_abandoned_newest_first() -> None:
    """Anything else raises, and changes nothing."""
    rig = Rig()
    rig.add("r", max_tokens=9)
    plans = [rig.scheduler.schedule() for _ in range(2)]
    before = rig.scheduler.fingerprint()
    nothing = ModelRunnerOutput(
        rows=plans[1].rows,
        epochs=plans[1].epochs,
        sampled_token_ids=np.ones((plans[1].rows.size, 1), np.int32),
    )
    with pytest.raises(OutputOrder, match=r"step 2 is not the oldest in flight \(1, 2\)"):
        rig.scheduler.update_from_output(plans[1], nothing)
    with pytest.raises(OutputOrder, match=r"step 1 is not the newest in flight \(1, 2\)"):
        rig.scheduler.abandon(plans[0])
    with pytest.raises(OutputOrder, match="got a NoneType: pass what schedule"):
        rig.scheduler.update_from_output(None, nothing)  # type: ignore[arg-type]
    with pytest.raises(OutputOrder, match="step 2 is a copy, or another scheduler's"):
        rig.scheduler.abandon(copy.copy(plans[1]))
    assert rig.scheduler.fingerprint() == before
    for plan in reversed(plans):
        rig.scheduler.abandon(plan)
        rig.scheduler.check()
    with pytest.raises(OutputOrder, match=r"step 1 is not the newest in flight \(none is\)"):
        rig.scheduler.abandon(plans[0])
    assert rig.ends() == {"r": FinishReason.LENGTH}


def test_a_plan_that_was_abandoned_comes_again_the_same() -> None:
    """The same rows, tokens and blocks; only epochs and step ids go on."""
    rig = Rig(num_blocks=9)
    for index in range(4):
        rig.add(f"r{index}", 9 + index, max_tokens=8)
    for _ in range(12):
        first = rig.scheduler.schedule()
        rig.scheduler.abandon(first)
        again = rig.scheduler.schedule()
        for name in ("rows", "num_scheduled_tokens", "num_computed_tokens", "block_ids"):
            assert getattr(first, name).tolist() == getattr(again, name).tolist()
        rig.runner.execute_model(again)
        rig.scheduler.update_from_output(again, rig.runner.sample_tokens(None))
        rig.scheduler.check()


def test_an_admission_that_was_abandoned_is_counted_nowhere() -> None:
    """The statistics are as before, and what the request finds when it is admitted is its own."""
    rig = Rig(policy=Priority())
    rig.add("late", 9, priority=1)
    before = rig.scheduler.stats()
    rig.scheduler.abandon(rig.scheduler.schedule())
    assert rig.scheduler.stats() == before
    rig.add("early", 9)
    rig.scheduler.schedule()
    assert rig.scheduler.explain("late").code is SkipCode.RAN
    rig.scheduler.abandon(rig.scheduler.in_flight[0])
    rig.driver.run()
    ends = [rig.driver.delivered[name].end for name in ("early", "late")]
    assert [end.num_cached_tokens for end in ends if end is not None] == [0, 8]


def test_a_fault_inside_schedule_leaves_the_state_as_it_was() -> None:
    """A part that breaks its promise costs its step, and the next step works."""
    rig = Rig()
    for index in range(3):
        rig.add(f"r{index}")
    before = rig.scheduler.fingerprint()
    publish, rig.pool.publish = rig.pool.publish, None  # type: ignore[assignment]
    with pytest.raises(TypeError):
        rig.scheduler.schedule()
    rig.pool.publish = publish  # type: ignore[method-assign]
    assert rig.scheduler.fingerprint() == before
    rig.scheduler.check()
    assert set(rig.ends().values()) == {FinishReason.LENGTH}


def test_an_interrupt_while_the_plan_is_written_leaves_the_state_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing of a row that runs has advanced when those that start are described."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    rig = Rig()
    rig.add("running")
    rig.driver.step()
    rig.add("starting")
    before = rig.scheduler.fingerprint()
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "_new_request_data", interrupt)
        with pytest.raises(KeyboardInterrupt):
            rig.scheduler.schedule()
    rig.scheduler.check()
    assert rig.scheduler.fingerprint() == before
    assert set(rig.ends().values()) == {FinishReason.LENGTH}


def test_blocks_behind_a_window_need_no_key_after_a_step_that_failed() -> None:
    """What the step was to name is given back before it is planned again."""
    runner = FakeKVRunner(block_size=1, num_blocks=33, sliding_window=1)
    spec = runner.get_kv_cache_spec()
    runner.initialize_from_config(KVCacheConfig(spec=spec, num_blocks=33))
    manager = KVCacheManager(LRUBlockPool(33, 1), groups=(spec,))
    driver = Driver(UnifiedScheduler(manager), runner)
    driver.add(Request("r", [5, 5], sampling=SamplingParams(max_tokens=6)))
    plans = []
    for turn in range(3):
        plans.append(driver.scheduler.schedule())
        driver._in_flight.append((plans[-1], driver._run(plans[-1])))
        if turn:
            driver._take_in_oldest()
    driver._in_flight.pop()
    driver.scheduler.abandon(plans[-1], dispatched=True)
    got = driver.run()["r"]
    assert got.token_ids == runner.solo_tokens(got.request)
