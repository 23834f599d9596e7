"""`FakeKVRunner`: right plans give the oracle's tokens, wrong ones give errors."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from fake_plans import PROMPT, int32, make_runner, new, plan, run, token

from pdcore.connector import KVCaches, WorkerConnector
from pdcore.errors import ConfigError, ExecutorError
from pdcore.kvcache.spec import KVCacheConfig
from pdcore.messages import GrammarBitmask, NewRequestData, TransferReport
from pdcore.request import Request, SamplingParams
from pdcore.testing import FakeKVRunner, PlanError, StaleKV
from pdcore.testing.chain import POISON


def solo(runner: FakeKVRunner, n: int) -> list[int]:
    """What a request with the usual prompt draws alone."""
    request = Request("request-1", PROMPT, sampling=SamplingParams(max_tokens=n))
    return runner.solo_tokens(request)


# What right plans give.


def test_chunks_and_decodes_give_the_oracles_tokens():
    """A prompt in two chunks and three decodes draw what the request draws alone."""
    runner = make_runner()
    first = run(runner, plan((0, 0, 6, False), new_reqs=[new(block_ids=[3, 1, 2])]))
    assert first.sampled_token_ids.shape == (0, 1)
    drawn = [token(run(runner, plan((0, 6, 4, True))))]
    drawn.append(token(run(runner, plan((0, 10, 1, True)))))
    drawn.append(token(run(runner, plan((0, 11, 1, True)))))
    drawn.append(token(run(runner, plan((0, 12, 1, True), blocks=[(0, 3, 7)]))))
    assert drawn == solo(runner, 4)


def test_the_result_names_the_rows_that_drew_in_the_plans_order():
    """Rows that only filled their caches are left out."""
    runner = make_runner()
    requests = [
        new(row, block_ids=[1 + 3 * row, 2 + 3 * row, 3 + 3 * row], uid=row) for row in range(3)
    ]
    output = run(
        runner, plan((2, 0, 10, True), (0, 0, 4, False), (1, 0, 10, True), new_reqs=requests)
    )
    assert output.rows.tolist() == [2, 1]
    assert output.epochs.tolist() == [0, 0]
    assert output.sampled_token_ids.dtype == np.int32


def test_rows_of_one_step_share_blocks_that_one_of_them_writes():
    """All rows write before any reads, so a prefix is shared within the step that computes it."""
    runner = make_runner()
    writer = new(0, block_ids=[1, 2, 3], uid=1)
    reader = new(1, block_ids=[1, 2, 4], uid=2, num_computed_tokens=8)
    output = run(runner, plan((1, 8, 2, True), (0, 0, 10, True), new_reqs=[writer, reader]))
    assert output.sampled_token_ids[0] == output.sampled_token_ids[1] == solo(runner, 1)


def test_a_preempted_request_draws_the_same_tokens_again():
    """A request that comes back in other blocks goes on as if nothing had been."""
    runner = make_runner()
    first = token(run(runner, plan((0, 0, 10, True), new_reqs=[new(block_ids=[1, 2, 3])])))
    back = new(2, block_ids=[7, 8, 9], token_ids=[*PROMPT, first])
    assert (
        token(run(runner, plan((2, 0, 11, True), new_reqs=[back], finished=[0])))
        == (solo(runner, 2)[1])
    )


def test_a_row_told_afresh_starts_from_what_it_was_told():
    """After an abandoned step the same tenant may be told in full, epoch unchanged."""
    runner = make_runner()
    run(runner, plan((0, 0, 10, True), new_reqs=[new(block_ids=[1, 2, 3])]))
    again = new(block_ids=[1, 2, 3], num_computed_tokens=4)
    assert token(run(runner, plan((0, 4, 6, True), new_reqs=[again]))) == solo(runner, 1)[0]


def test_a_sliding_window_reads_nothing_behind_it():
    """Blocks behind the window may be gone; the ones in front must be there."""
    runner = make_runner(sliding_window=4)
    run(runner, plan((0, 0, 10, True), new_reqs=[new(block_ids=[1, 2, 3])]))
    run(runner, plan((0, 10, 1, True), blocks=[(0, 0, 0)]))
    assert token(run(runner, plan((0, 11, 1, True), blocks=[(0, 1, 0)]))) == solo(runner, 3)[2]


def test_a_sliding_window_reads_all_that_is_in_it():
    """A block with a visible token must be there."""
    runner = make_runner(sliding_window=4)
    run(runner, plan((0, 0, 10, True), new_reqs=[new(block_ids=[1, 2, 3])]))
    with pytest.raises(PlanError, match="reads the null block at block table position 1"):
        run(runner, plan((0, 10, 1, True), blocks=[(0, 1, 0)]))


def test_the_script_forces_tokens():
    """A scripted token is drawn, and what follows depends on it."""
    runner = make_runner(script=lambda name, at: 2 if (name, at) == ("request-1", 10) else None)
    assert token(run(runner, plan((0, 0, 10, True), new_reqs=[new(block_ids=[1, 2, 3])]))) == 2
    assert token(run(runner, plan((0, 10, 1, True)))) == solo(runner, 2)[1]


def test_a_bitmask_limits_the_draw():
    """A constrained row draws the first allowed token at or after its own, wrapping round."""
    runner = make_runner(vocab_size=40)
    runner.execute_model(plan((0, 0, 10, True), new_reqs=[new(block_ids=[1, 2, 3])]))
    bits = np.zeros((1, 2), dtype=np.int32)
    bits[0, 0] = 1 << 5
    bitmask = GrammarBitmask(rows=int32([0]), epochs=int32([0]), bits=bits)
    assert token(runner.sample_tokens(bitmask)) == 5


def test_a_bitmask_of_another_epoch_constrains_nobody():
    """A bitmask speaks of one tenancy of a row."""
    runner = make_runner()
    runner.execute_model(plan((0, 0, 10, True), new_reqs=[new(block_ids=[1, 2, 3])]))
    bitmask = GrammarBitmask(
        rows=int32([0]), epochs=int32([9]), bits=np.zeros((1, 1000), dtype=np.int32)
    )
    assert token(runner.sample_tokens(bitmask)) == solo(runner, 1)[0]


def test_a_row_fault_harms_its_row_alone():
    """The faulty row is reported and draws nothing; the other draws its token."""
    runner = make_runner(row_fault=lambda name, _: "broken" if name == "request-1" else None)
    requests = [new(0, block_ids=[1, 2, 3], uid=1), new(1, block_ids=[4, 5, 6], uid=2)]
    output = run(runner, plan((0, 0, 10, True), (1, 0, 10, True), new_reqs=requests))
    assert [(e.row, e.cause) for e in output.errors] == [(0, "broken")]
    assert output.rows.tolist() == [1]


def test_who_sees_what_a_failed_row_left_out_fails_with_it():
    """A plan made before that was known may share its blocks: no fault of the plan's."""
    runner = make_runner(row_fault=lambda name, place: "bad luck" if name == "request-1" else None)
    run(runner, plan((0, 0, 10, True), new_reqs=[new(block_ids=[1, 2, 3])]))
    sharer = new(1, block_ids=[1, 2, 4], uid=2, num_computed_tokens=8)
    other = new(2, block_ids=[5, 6, 7], uid=3)
    output = plan((1, 8, 2, True), (2, 0, 10, True), new_reqs=[sharer, other])
    result = run(runner, output)
    assert [(error.row, error.cause) for error in result.errors] == [
        (1, "position 0 of its prefix was left to a row that failed")
    ]
    assert result.rows.tolist() == [2]


def test_a_step_fault_leaves_everything_as_it_was():
    """A step that fails before it starts can be run again."""
    faults = [RuntimeError("out of memory"), None]
    runner = make_runner(step_fault=lambda _: faults.pop(0))
    output = plan((0, 0, 10, True), new_reqs=[new(block_ids=[1, 2, 3])])
    with pytest.raises(RuntimeError, match="out of memory"):
        runner.execute_model(output)
    assert token(run(runner, output)) == solo(runner, 1)[0]


# What stale KV gives.


def test_a_slot_that_was_never_written_is_an_error():
    """Claiming a prefix that nobody computed names the request, the place and the reason."""
    runner = make_runner()
    output = plan((0, 8, 2, True), new_reqs=[new(block_ids=[1, 2, 3], num_computed_tokens=8)])
    with pytest.raises(StaleKV, match=r"'request-1'.* position 0 .* block 1, .*never written"):
        runner.execute_model(output)
    assert (runner.kv_caches.buffer[1] == POISON).all()


@pytest.mark.parametrize(
    "other",
    [
        {"token_ids": (99, *PROMPT[1:])},
        {"cache_salt": "salt"},
        {"lora": "adapter"},
    ],
)
def test_a_foreign_prefix_is_an_error(other: dict[str, object]):
    """Blocks of another prompt, salt or adapter are never read as one's own."""
    runner = make_runner()
    run(runner, plan((0, 0, 10, True), new_reqs=[new(block_ids=[1, 2, 3])], step_id=4))
    reader = new(1, block_ids=[1, 2, 4], uid=2, num_computed_tokens=8, **other)
    with pytest.raises(StaleKV, match=r"position 0 .* foreign chain; .*uid 1 in step 4"):
        runner.execute_model(plan((1, 8, 2, True), new_reqs=[reader]))


def test_a_block_at_another_place_is_an_error():
    """The same tokens at another position are other KV."""
    runner = make_runner()
    run(runner, plan((0, 0, 10, True), new_reqs=[new(block_ids=[1, 2, 3])]))
    swapped = new(1, block_ids=[2, 1, 4], uid=2, num_computed_tokens=8)
    with pytest.raises(StaleKV, match="position 0 "):
        runner.execute_model(plan((1, 8, 2, True), new_reqs=[swapped]))


def test_a_block_that_was_overwritten_is_an_error():
    """A row whose block was given to another request notices at once."""
    runner = make_runner()
    run(runner, plan((0, 0, 10, True), new_reqs=[new(block_ids=[1, 2, 3])]))
    thief = new(1, block_ids=[2, 5, 6], uid=2)
    with pytest.raises(StaleKV, match=r"'request-1'.* position 4 .* block 2"):
        runner.execute_model(plan((0, 10, 1, True), (1, 0, 10, True), new_reqs=[thief]))


# What wrong plans give.

KNOWN = new(block_ids=[1, 2, 3])

WRONG_PLANS = {
    "nobody has": plan((1, 0, 1, False)),
    "means epoch 3": plan((0, 10, 1, True), epochs=[3]),
    "num_computed_tokens=9, the worker computed 10": plan((0, 9, 2, True)),
    "only 11 tokens are known": plan((0, 10, 2, True)),
    "samples=False": plan((0, 10, 1, False)),
    "num_scheduled_tokens=0": plan((0, 10, 0, True)),
    "names a row twice": plan((0, 10, 1, True), (0, 11, 1, True)),
    "writes position 10 to the null block": plan((0, 10, 1, True), blocks=[(0, 2, 0)]),
    r"blocks \[12\] are outside 0..11": plan((0, 10, 1, True), blocks=[(0, 3, 12)]),
    "block table of row 5": plan((0, 10, 1, True), blocks=[(5, 0, 4)]),
    "position -1 is negative": plan((0, 10, 1, True), blocks=[(0, -1, 4)]),
    "still has": plan((0, 10, 1, True), new_reqs=[new(block_ids=[4], uid=2, epoch=1)]),
    "old epoch: expected at least 1": plan(
        (0, 0, 10, True), new_reqs=[new(block_ids=[4, 5, 6], uid=2)], finished=[0]
    ),
    "room for 4 in its blocks": plan(
        (1, 8, 2, True), new_reqs=[new(1, block_ids=[4], uid=2, num_computed_tokens=8)]
    ),
    "both write slot 2 of block 3": plan(
        (0, 10, 1, True),
        (1, 8, 3, True),
        new_reqs=[
            new(1, block_ids=[1, 2, 3], uid=2, num_computed_tokens=8, token_ids=[*PROMPT, 5])
        ],
    ),
}


@pytest.mark.parametrize("message", WRONG_PLANS)
def test_a_plan_that_contradicts_the_worker_is_an_error(message: str):
    """Whatever a plan claims about a row is checked against the worker's own count."""
    runner = make_runner()
    run(runner, plan((0, 0, 10, True), new_reqs=[KNOWN], step_id=0))
    with pytest.raises(PlanError, match=message):
        runner.execute_model(attrs.evolve(WRONG_PLANS[message], step_id=1))


def test_a_plan_runs_once_and_none_after_a_newer_one():
    """A step that is run again, or late, is an error even if it tells all its rows afresh."""
    runner = make_runner()
    older = plan((1, 0, 10, True), new_reqs=[new(1, block_ids=[4, 5, 6], uid=2)])
    output = plan((0, 0, 10, True), new_reqs=[KNOWN])
    run(runner, output)
    for stale in (output, older):
        message = f"step {stale.step_id} comes after step {output.step_id}: each plan runs once"
        with pytest.raises(PlanError, match=message):
            runner.execute_model(stale)


def test_a_plan_past_the_block_table_is_an_error():
    """Every scheduled position needs a block."""
    runner = make_runner()
    with pytest.raises(PlanError, match="ends at position 9 and the blocks have room for 8"):
        runner.execute_model(plan((0, 0, 10, True), new_reqs=[new(block_ids=[1, 2])]))


def test_a_token_that_was_not_drawn_is_not_known():
    """A plan may not count on the token of a step that was never sampled."""
    runner = make_runner()
    runner.execute_model(plan((0, 0, 10, True), new_reqs=[KNOWN]))
    with pytest.raises(PlanError, match="only 10 tokens are known"):
        runner.execute_model(plan((0, 10, 1, True)))


def test_columns_of_different_lengths_are_an_error():
    """Every column of a plan speaks of the same rows."""
    output = plan((0, 0, 10, True), new_reqs=[KNOWN])
    broken = attrs.evolve(output, samples=np.zeros(2, dtype=np.bool_))
    with pytest.raises(PlanError, match="columns"):
        make_runner().execute_model(broken)


# Its life.


def test_it_must_be_initialised_first_and_once():
    """A runner without a cache says what to call; a second cache is refused."""
    runner = FakeKVRunner(block_size=4)
    with pytest.raises(ExecutorError, match="initialize_from_config"):
        runner.execute_model(plan())
    config = KVCacheConfig(spec=runner.get_kv_cache_spec(), num_blocks=4)
    runner.initialize_from_config(config)
    with pytest.raises(ConfigError, match="called before"):
        runner.initialize_from_config(config)


def test_its_cache_has_the_size_of_its_spec():
    """What the spec says a block takes is what the buffer takes."""
    runner = make_runner(num_blocks=12)
    caches = runner.kv_caches
    assert caches.bytes_per_block == runner.get_kv_cache_spec().bytes_per_block
    assert caches.buffer.nbytes == 12 * caches.bytes_per_block
    assert caches.num_blocks == 12


class RecordingConnector(WorkerConnector):
    """Writes down what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def register_kv_caches(self, caches: KVCaches) -> None:
        self.calls.append("register_kv_caches")

    def start_save_kv(self, meta: object) -> None:
        self.calls.append(("start_save_kv", meta))

    def start_load_kv(self, meta: object) -> None:
        self.calls.append(("start_load_kv", meta))

    def wait_for_save(self) -> None:
        self.calls.append("wait_for_save")

    def get_finished(self) -> TransferReport:
        self.calls.append("get_finished")
        return TransferReport(finished_sending=("t",))

    def close(self) -> None:
        self.calls.append("close")


def test_its_connector_is_called_in_the_order_of_a_step():
    """What may be overwritten is saved before loads start, and those before the pass; saves end
    after it, and every step brings a report."""
    connector = RecordingConnector()
    runner = make_runner(connector=connector)
    output = run(runner, plan((0, 0, 10, True), new_reqs=[KNOWN], connector_meta="meta"))
    run(runner, plan())
    runner.close()
    runner.close()
    assert output.transfer_report.finished_sending == ("t",)
    assert connector.calls == [
        "register_kv_caches",
        ("start_save_kv", "meta"),
        ("start_load_kv", "meta"),
        "wait_for_save",
        "get_finished",
        "wait_for_save",
        "get_finished",
        "close",
    ]


def test_a_row_that_nobody_runs_may_still_be_told():
    """A plan may start a row without running it, and give up a row that is unknown."""
    runner = make_runner()
    parked: NewRequestData = new(block_ids=[1, 2, 3])
    run(runner, plan(new_reqs=[parked], finished=[7]))
    assert token(run(runner, plan((0, 0, 10, True)))) == solo(runner, 1)[0]
