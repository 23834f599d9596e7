"""Requests that share blocks, rows or a moment with one that fails: none is harmed."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest

from grammars import CompilesAtOnce, CompilesLater, text_of
from pdcore import (
    FinishReason,
    KVCacheManager,
    Limits,
    LRUBlockPool,
    ModelRunnerOutput,
    Priority,
    Request,
    RequestStatus,
    SamplingParams,
    SchedulerOutput,
    UnifiedScheduler,
    VirtualClock,
)
from pdcore.connector.loopback import LoopbackConnector, LoopbackFabric, LoopbackFaults
from pdcore.errors import ExecutorError, OutputMismatch
from pdcore.kvcache import KVCacheConfig
from pdcore.loop import step
from pdcore.messages import RowError
from pdcore.runner.executor import InProcessExecutor
from pdcore.testing import Driver, FakeKVRunner

BLOCK_SIZE, NUM_BLOCKS, VOCAB_SIZE = 4, 64, 64
SHARED = list(range(10, 26))
COLUMNS = ("rows", "epochs", "sampled_token_ids")


class Rig:
    """An engine whose rows, steps and loads can be made to fail."""

    def __init__(self, *, connector: Any = None, **kwargs: Any) -> None:
        self.clock = VirtualClock()
        self.bad_rows: dict[str, str] = {}
        self.runner = FakeKVRunner(
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            vocab_size=VOCAB_SIZE,
            row_fault=lambda name, position: self.bad_rows.get(name),
            connector=None if connector is None else connector.worker_side(),
        )
        spec = self.runner.get_kv_cache_spec()
        self.runner.initialize_from_config(KVCacheConfig(spec=spec, num_blocks=NUM_BLOCKS))
        self.pool = LRUBlockPool(NUM_BLOCKS, BLOCK_SIZE)
        limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 100}
        self.scheduler = UnifiedScheduler(
            KVCacheManager(self.pool),
            limits=Limits(**limits | kwargs.pop("limits", {})),
            clock=self.clock,
            connector=None if connector is None else connector.scheduler_side(),
            **kwargs,
        )
        self.driver = Driver(self.scheduler, self.runner, clock=self.clock)

    def add(self, name: str, prompt: list[int], *, max_tokens: int = 4, **kwargs: Any) -> None:
        sampling = SamplingParams(
            max_tokens=max_tokens, structured_output=kwargs.pop("structured_output", None)
        )
        self.driver.add(Request(name, prompt, sampling=sampling, **kwargs))

    def run(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self.runner.execute_model(plan)
        return self.runner.sample_tokens(self.scheduler.get_grammar_bitmask(plan))

    def update(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> None:
        self.driver._collect(self.scheduler.update_from_output(plan, result).outputs)
        self.scheduler.check()

    def check_solo(self, *names: str) -> None:
        for name in names:
            got = self.driver.delivered[name]
            assert got.finish_reason is FinishReason.LENGTH
            assert got.token_ids == self.runner.solo_tokens(got.request)


def test_a_row_that_failed_leaves_nothing_in_the_prefix_cache() -> None:
    """Blocks that it was to write are not found by the next request with the same prefix."""
    rig = Rig()
    rig.bad_rows["bad"] = "an id outside the vocabulary"
    rig.add("bad", [*SHARED, 5])
    rig.driver.step()
    rig.add("good", [*SHARED, 6])
    rig.driver.run()
    rig.check_solo("good")
    assert rig.driver.delivered["bad"].finish_reason is FinishReason.ERROR


def test_who_shares_blocks_of_a_row_that_failed_in_the_same_step_begins_anew() -> None:
    """What it drew from the missing data is dropped, and it gets its solo tokens."""
    rig = Rig()
    rig.add("bad", [*SHARED, 5])
    rig.add("sharer", [*SHARED, 6])
    plan = rig.scheduler.schedule()
    rows = {new.request_id: new for new in plan.scheduled_new_reqs}
    assert rows["sharer"].num_computed_tokens == len(SHARED)
    result = rig.run(plan)
    bad = result.rows == rows["bad"].row
    tokens = result.sampled_token_ids[~bad] + 1  # what a model makes of garbage
    error = RowError(row=rows["bad"].row, epoch=rows["bad"].epoch, cause="NaN")
    rig.update(
        plan,
        attrs.evolve(
            result,
            rows=result.rows[~bad],
            epochs=result.epochs[~bad],
            sampled_token_ids=tokens,
            errors=(error,),
        ),
    )
    assert rig.scheduler.status("sharer") is RequestStatus.PREEMPTED
    rig.driver.run()
    rig.check_solo("sharer")


def test_who_begins_anew_gets_no_token_of_the_steps_that_were_in_flight() -> None:
    """The row is empty by then, and what still comes for it is dropped."""
    rig = Rig()
    rig.add("bad", [*SHARED, 5], max_tokens=1)
    rig.add("sharer", [*SHARED, 6])
    plans, results = [], []
    for _ in range(2):
        plans.append(rig.scheduler.schedule())
        results.append(rig.run(plans[-1]))
    bad = next(new for new in plans[0].scheduled_new_reqs if new.request_id == "bad")
    assert bad.row not in plans[1].rows
    kept = results[0].rows != bad.row
    columns = {name: getattr(results[0], name)[kept] for name in COLUMNS}
    error = RowError(row=bad.row, epoch=bad.epoch, cause="NaN")
    rig.update(plans[0], attrs.evolve(results[0], errors=(error,), **columns))
    rig.update(plans[1], results[1])
    assert rig.driver.delivered["sharer"].token_ids == []
    rig.driver.run()
    rig.check_solo("sharer")


def test_a_row_that_fails_after_it_was_preempted_ends_its_request() -> None:
    """Nobody waits for a token that is not coming."""
    rig = Rig(limits={"max_num_seqs": 1}, policy=Priority(displace=True))
    rig.add("victim", SHARED, priority=5, max_tokens=8)
    plans = [rig.scheduler.schedule()]
    results = [rig.run(plans[0])]
    rig.add("urgent", [7, 8, 9], priority=0)
    plans.append(rig.scheduler.schedule())
    assert rig.scheduler.status("victim") is RequestStatus.PREEMPTED
    results.append(rig.run(plans[1]))
    error = RowError(row=int(plans[0].rows[0]), epoch=int(plans[0].epochs[0]), cause="NaN")
    nothing = np.zeros(0, np.int32)
    failed = ModelRunnerOutput(
        rows=nothing,
        epochs=nothing,
        sampled_token_ids=nothing.reshape(0, 1),
        errors=(error,),
    )
    rig.update(plans[0], failed)
    rig.update(plans[1], results[1])
    rig.driver.run()
    assert rig.driver.delivered["victim"].finish_reason is FinishReason.ERROR
    rig.check_solo("urgent")


@pytest.mark.parametrize("how", ["aborted", "displaced"])
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_row_that_fails_after_it_was_left_leaves_nothing_in_the_prefix_cache(
    how: str, is_shared: bool
) -> None:
    """What it was to write is found by nobody, and who found it already begins anew."""
    rig = Rig(limits={"max_num_seqs": 1}, policy=Priority(displace=True))
    rig.bad_rows["bad"] = "NaN"
    rig.add("bad", [*SHARED, 5], priority=5)
    plans = [rig.scheduler.schedule()]
    results = [rig.run(plans[0])]
    if how == "aborted":
        rig.driver.abort(["bad"])
    if is_shared or how == "displaced":
        rig.add("sharer", [*SHARED, 6] if is_shared else [7, 8, 9])
        plans.append(rig.scheduler.schedule())
        results.append(rig.run(plans[1]))
    for plan, result in zip(plans, results, strict=True):
        rig.update(plan, result)
    rig.add("next", [*SHARED, 7])
    rig.driver.run()
    reason = FinishReason.ABORT if how == "aborted" else FinishReason.ERROR
    assert rig.driver.delivered["bad"].finish_reason is reason
    rig.check_solo(*rig.driver.delivered.keys() - {"bad"})


def test_blocks_that_others_got_meanwhile_keep_their_keys_when_a_left_row_fails() -> None:
    """They are written on behalf of these, and shared as ever."""
    rig = Rig(limits={"max_num_seqs": 1, "max_num_batched_tokens": 24})
    rig.bad_rows["bad"] = "NaN"
    rig.add("bad", [5] * 20)
    plan = rig.scheduler.schedule()
    result = rig.run(plan)
    rig.driver.abort(["bad"])
    # With hardly any other left, the next one gets the blocks of the one that is to fail.
    rig.pool.allocate(NUM_BLOCKS - 1 - 6)
    rig.add("heir", [*SHARED, 6])
    later = rig.scheduler.schedule()
    heirs = later.scheduled_new_reqs[0].block_ids[: len(SHARED) // BLOCK_SIZE]
    assert set(heirs.tolist()) & set(plan.scheduled_new_reqs[0].block_ids.tolist())
    rig.run(later)
    rig.scheduler.update_from_output(plan, result)
    assert None not in rig.pool.keys(heirs)
    assert rig.scheduler.status("heir") is RequestStatus.RUNNING


def test_a_row_whose_blocks_are_shared_in_this_step_is_not_displaced() -> None:
    """The one that shares them would read what nobody writes."""
    rig = Rig(
        limits={"max_num_seqs": 2, "max_num_batched_tokens": 12},
        policy=Priority(displace=True),
    )
    rig.add("writer", [*SHARED, 1, 2], priority=5)
    rig.driver.step()
    rig.add("reader", [*SHARED, 3], priority=0)
    rig.add("urgent", [7, 8, 9], priority=1)
    rig.driver.run()
    rig.check_solo("writer", "reader", "urgent")


def test_a_load_that_began_in_a_failed_step_begins_anew() -> None:
    """Its local prefix may be one that the failed step was to write."""
    fabric = LoopbackFabric(clock=VirtualClock(), faults=LoopbackFaults(delay_polls=2))
    prefill = Rig(connector=LoopbackConnector(fabric, engine_id="p", block_size=BLOCK_SIZE))
    decode = Rig(connector=LoopbackConnector(fabric, engine_id="d", block_size=BLOCK_SIZE))
    prompt = [*SHARED, *range(30, 40)]
    params = {"do_remote_decode": True}
    prefill.add("remote", prompt, max_tokens=1, kv_transfer_params=params)
    while prefill.driver.delivered["remote"].end is None:
        prefill.driver.step()
    end = prefill.driver.delivered["remote"].end
    decode.add("writer", [*SHARED, 5])
    decode.add("remote", prompt, kv_transfer_params=end.kv_transfer_params)
    plan = decode.scheduler.schedule()
    assert decode.scheduler.status("remote") is RequestStatus.WAITING_FOR_REMOTE_KVS
    decode.scheduler.abandon(plan, dispatched=True)
    decode.scheduler.check()
    decode.driver.abort(["writer"])
    decode.driver.run()
    decode.check_solo("remote")
    counts = decode.pool.counts()
    assert counts.free + counts.evictable == NUM_BLOCKS - 1


@pytest.mark.parametrize("num_in_flight", [1, 2, 3])
def test_d12_a_grammar_sees_every_token_before_the_next_is_drawn(num_in_flight: int) -> None:
    """With steps in flight, with preemption and without, the text is the grammar's."""
    rig = Rig(
        grammar=CompilesAtOnce(text_of), limits={"max_num_seqs": 2}, policy=Priority(displace=True)
    )
    rig.driver = Driver(rig.scheduler, rig.runner, clock=rig.clock, num_in_flight=num_in_flight)
    rig.add("strict", SHARED, structured_output=range(8, 17), max_tokens=9, priority=5)
    rig.add("plain", [1, 2, 3], max_tokens=12)
    for _ in range(4):
        rig.driver.step()
    rig.add("urgent", [7, 8, 9], max_tokens=3)
    rig.driver.run()
    assert rig.driver.delivered["strict"].token_ids == list(range(8, 17))
    rig.check_solo("plain", "urgent")


def test_an_abort_before_the_bitmask_costs_no_other_request() -> None:
    """The mask is made for the structured rows that still live."""
    rig = Rig(grammar=CompilesAtOnce(text_of))
    for name in ("gone", "stays"):
        rig.add(name, SHARED, structured_output=[8, 9, 10], max_tokens=3)
    plan = rig.scheduler.schedule()
    rig.driver.abort(["gone"])
    rig.update(plan, rig.run(plan))
    rig.driver.run()
    assert rig.driver.delivered["stays"].token_ids == [8, 9, 10]


def test_alarms_of_one_request_that_ring_together_end_it_once() -> None:
    """Deadline and grammar timeout pass in one jump of the clock."""
    grammars = CompilesLater()
    rig = Rig(grammar=grammars, limits={"grammar_timeout_s": 10.0})
    rig.add("r", SHARED, structured_output="text", deadline=5.0)
    rig.clock.advance(20.0)
    rig.driver.run()
    assert rig.driver.delivered["r"].finish_reason is FinishReason.TIMEOUT


def test_a_cancelled_grammar_ends_its_request() -> None:
    """A cancelled future is a failed one."""
    grammars = CompilesLater()
    rig = Rig(grammar=grammars)
    rig.add("r", SHARED, structured_output="text")
    grammars.futures["r"].cancel()
    rig.driver.run()
    assert rig.driver.delivered["r"].finish_reason is FinishReason.ERROR


def test_aborts_that_cannot_be_had_cost_one_step() -> None:
    """The plan is taken back, and the next step runs it again."""
    rig = Rig()
    executor = InProcessExecutor(lambda: FakeKVRunner(block_size=BLOCK_SIZE), num_blocks=NUM_BLOCKS)
    executor.start()

    def broken() -> list[str]:
        raise OSError("the socket is gone")

    try:
        rig.scheduler.add_request(Request("r", SHARED, sampling=SamplingParams(max_tokens=2)))
        with pytest.raises(OSError, match="socket"):
            step(rig.scheduler, executor, aborts=broken)
        tokens: list[int] = []
        while rig.scheduler.has_requests():
            for output in step(rig.scheduler, executor).outputs:
                tokens.extend(output.new_token_ids)
        assert len(tokens) == 2
    except ExecutorError as error:
        pytest.fail(str(error))
    finally:
        executor.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda r: {"rows": r.rows + 90},
        lambda r: {"epochs": r.epochs + 1},
        lambda r: {"epochs": r.epochs[:1]},
        lambda r: {"sampled_token_ids": r.sampled_token_ids[:, 0]},
        lambda r: {"sampled_token_ids": r.sampled_token_ids - 2**20},
        lambda r: {name: getattr(r, name)[1:] for name in COLUMNS},
        lambda r: {name: np.repeat(getattr(r, name), 2, axis=0) for name in COLUMNS},
        lambda r: {"errors": (RowError(row=99, epoch=0, cause="x"),)},
        lambda r: {"errors": (RowError(row=int(r.rows[0]), epoch=int(r.epochs[0]), cause="x"),)},
    ],
)
def test_a_result_that_does_not_answer_its_plan_is_refused(change: Any) -> None:
    """Nothing has changed then, and the right result may still be given."""
    rig = Rig()
    for name in ("one", "two", "three"):
        rig.add(name, [*SHARED, ord(name[0]) % 50])
    plan = rig.scheduler.schedule()
    result = rig.run(plan)
    before = rig.scheduler.fingerprint()
    with pytest.raises(OutputMismatch):
        rig.scheduler.update_from_output(plan, attrs.evolve(result, **change(result)))
    assert rig.scheduler.fingerprint() == before
    rig.update(plan, result)
    rig.driver.run()
    rig.check_solo("one", "two", "three")


def test_a_row_that_failed_ends_alone_with_later_plans_in_flight() -> None:
    """The plan that was made ahead of its failure runs for the others."""
    rig = Rig()
    rig.driver = Driver(rig.scheduler, rig.runner, clock=rig.clock, num_in_flight=3)
    rig.bad_rows["bad"] = "NaN"
    for name in ("good", "bad"):
        rig.add(name, [*SHARED, ord(name[0]) % 50], max_tokens=9)
    rig.driver.run()
    rig.check_solo("good")
    assert rig.driver.delivered["bad"].finish_reason is FinishReason.ERROR


def test_a_plan_leaves_no_trace_after_requests_went_from_queue_to_queue() -> None:
    """Landed requests that begin anew keep a place that compares with the others'."""
    clock = VirtualClock()
    fabric = LoopbackFabric(clock=clock)
    prefill = Rig(connector=LoopbackConnector(fabric, engine_id="p", block_size=BLOCK_SIZE))
    decode = Rig(connector=LoopbackConnector(fabric, engine_id="d", block_size=BLOCK_SIZE))
    params = {"do_remote_decode": True}
    prefill.add("remote", SHARED, max_tokens=1, kv_transfer_params=params)
    while prefill.driver.delivered["remote"].end is None:
        prefill.driver.step()
    end = prefill.driver.delivered["remote"].end
    decode.add("local", [1, 2, 3], max_tokens=40)
    decode.driver.step()
    decode.add("remote", SHARED, kv_transfer_params=end.kv_transfer_params)
    decode.driver.step()
    decode.scheduler.pause()
    for _ in range(4):
        decode.driver.step()
    assert decode.scheduler.reset_prefix_cache(preempt_running=True)
    decode.scheduler.resume()
    decode.scheduler.abandon(decode.scheduler.schedule())
    before = decode.scheduler.fingerprint()
    for _ in range(3):
        decode.scheduler.abandon(decode.scheduler.schedule())
        assert decode.scheduler.fingerprint() == before
    decode.driver.run()
    decode.check_solo("local", "remote")
