"""Faults of who goes first, who gives way and who takes a slot."""

from __future__ import annotations

from typing import Any

import pytest
from harness import Engine, some_tokens

from pdcore.clock import VirtualClock
from pdcore.connector.loopback import LoopbackConnector, LoopbackFabric, LoopbackFaults
from pdcore.request import Request, RequestStatus
from pdcore.scheduler import (
    FCFS,
    Admission,
    AdmissionContext,
    Priority,
    SkipCode,
)

PIPELINE_DEPTHS = [1, 2, 3]


# A8


def test_a8_a_victim_that_was_planned_already_leaves_no_trace_in_the_plan() -> None:
    """A request that gives way after it was planned is undone: tokens, block, table change."""
    engine = Engine(num_usable_blocks=5, block_size=4, policy=Priority())
    engine.add("low", 7, max_tokens=6, priority=9)
    engine.step()
    engine.add("high", 8, max_tokens=6, priority=1)
    assert engine.step() == {"low": 1, "high": 8}
    output = engine.schedule()
    assert engine.named(output) == {"high": 1}
    assert engine.scheduler.status("low") is RequestStatus.PREEMPTED
    assert engine.scheduler.explain("low").code is SkipCode.PREEMPTED_THIS_STEP
    assert set(output.block_rows.tolist()) == set(output.rows.tolist())
    assert output.finished_rows.size == 1
    stats = engine.scheduler.stats()
    assert (stats.num_running, stats.num_free_blocks) == (1, 2)
    engine.execute(output)
    engine.land()
    engine.run()
    engine.assert_as_if_alone()
    engine.assert_idle()


def test_a8_the_tokens_of_an_undone_victim_return_to_the_budget() -> None:
    """What a planned victim would have computed is there for those behind it."""
    engine = Engine(
        num_usable_blocks=4,
        block_size=4,
        policy=Priority(),
        max_num_batched_tokens=3,
        max_num_seqs=3,
    )
    engine.add("low", 2, max_tokens=12, priority=9)
    engine.step()
    engine.add("high", 2, max_tokens=12, priority=1)
    engine.step()
    engine.add("third", 8, max_tokens=4, priority=5)
    # Low's token 5 takes the last block; high's token 5, one step later, finds none.
    for _ in range(2):
        assert engine.step() == {"low": 1, "high": 1, "third": 1}
    assert engine.step() == {"high": 1, "third": 2}
    engine.run()
    engine.assert_as_if_alone()
    engine.assert_idle()


# A12


def _two_slots_taken(engine: Engine) -> None:
    engine.add("first", 4, max_tokens=1000, priority=10)
    engine.clock.advance(1.0)
    engine.add("second", 4, max_tokens=1000, priority=10)
    engine.step()


@pytest.mark.parametrize("num_in_flight", [0, 1])
def test_a12_an_urgent_request_displaces_the_worst_one_when_all_slots_are_taken(
    num_in_flight: int,
) -> None:
    """With displacing on it runs in the next step; one victim, worst and latest, goes back."""
    engine = Engine(num_usable_blocks=200, policy=Priority(displace=True), max_num_seqs=2)
    _two_slots_taken(engine)
    for _ in range(num_in_flight):
        engine.dispatch()
    engine.add("urgent", 4, max_tokens=4, priority=0)
    assert engine.dispatch() == {"first": 1, "urgent": 4}
    assert engine.scheduler.status("second") is RequestStatus.PREEMPTED
    assert engine.scheduler.stats().num_preemptions == 1
    for _ in range(num_in_flight + 1):
        engine.land()
    while engine.scheduler.status("urgent") is not None:
        engine.step()
    for _ in range(3):
        engine.step()
    assert engine.scheduler.status("second") is RequestStatus.RUNNING
    assert engine.scheduler.stats().num_preemptions == 1
    engine.assert_as_if_alone("urgent")
    engine.assert_so_far_as_if_alone()


@pytest.mark.parametrize("policy", [FCFS(), Priority()], ids=["fcfs", "priority"])
def test_a12_without_displacing_an_urgent_request_waits_for_a_slot(policy: FCFS) -> None:
    """Nobody loses a slot to a newcomer unless the policy was told to."""
    engine = Engine(num_usable_blocks=200, policy=policy, max_num_seqs=2)
    _two_slots_taken(engine)
    engine.add("urgent", 4, max_tokens=4, priority=0)
    assert engine.step() == {"first": 1, "second": 1}
    assert engine.scheduler.explain("urgent").code is SkipCode.NO_ROW
    assert engine.scheduler.stats().num_preemptions == 0


class Fickle(Priority):
    """Lets the urgent one in when it asks for a row, and not when it has one."""

    num_asked = 0

    def admit(self, request: Request, context: AdmissionContext) -> Admission:
        if request.request_id != "urgent":
            return Admission.ADMIT
        self.num_asked += 1
        return Admission.SKIP if self.num_asked == 2 else Admission.ADMIT


def test_a12_one_that_gave_way_and_starts_again_in_the_same_step_is_taken_back_with_it() -> None:
    """The urgent one is not let in after all, so its victim gets the slot again."""
    engine = Engine(num_usable_blocks=200, policy=Fickle(displace=True), max_num_seqs=2)
    _two_slots_taken(engine)
    engine.add("urgent", 4, priority=0)
    before = engine.scheduler.fingerprint()
    output = engine.schedule()
    assert engine.scheduler.stats().num_preemptions == 1
    assert "second" in engine.named(output)
    engine.scheduler.abandon(output)
    engine.scheduler.check()
    assert engine.scheduler.fingerprint() == before
    engine.run()
    engine.assert_as_if_alone()
    engine.assert_idle()


@pytest.mark.parametrize("others", ["x", None])
def test_a12_who_would_not_be_let_in_displaces_nobody(others: str | None) -> None:
    """With one adapter at a time, only the row of the request that has it helps another one."""
    engine = Engine(
        num_usable_blocks=200, policy=Priority(displace=True), max_num_seqs=2, max_loras=1
    )
    engine.add("first", 4, max_tokens=8, priority=5, lora=others)
    engine.add("second", 4, max_tokens=8, priority=9, lora="x")
    engine.step()
    engine.add("urgent", 4, priority=0, lora="y")
    for _ in range(3):
        engine.step()
    assert engine.scheduler.stats().num_preemptions == (0 if others else 1)
    engine.run()
    engine.assert_as_if_alone()
    engine.assert_idle()


class AtMostOne(Priority):
    """Lets nobody in beside another."""

    def admit(self, request: Request, context: AdmissionContext) -> Admission:
        return Admission.SKIP if context.num_running else Admission.ADMIT


def test_a12_who_gives_way_is_not_counted_against_the_one_it_gives_way_to() -> None:
    """A policy that is asked about a displacement sees those that will be running after it."""
    engine = Engine(num_usable_blocks=200, policy=AtMostOne(displace=True), max_num_seqs=1)
    engine.add("first", 4, max_tokens=8, priority=5)
    engine.step()
    engine.add("urgent", 4, priority=0)
    engine.step()
    assert engine.scheduler.status("first") is RequestStatus.PREEMPTED
    engine.run()
    engine.assert_as_if_alone()
    engine.assert_idle()


def test_a12_equal_priorities_never_displace_each_other() -> None:
    """A newcomer of the same priority waits, or two of them would swap for ever."""
    engine = Engine(num_usable_blocks=200, policy=Priority(displace=True), max_num_seqs=2)
    _two_slots_taken(engine)
    engine.add("equal", 4, max_tokens=4, priority=10)
    assert engine.step() == {"first": 1, "second": 1}
    assert engine.scheduler.stats().num_preemptions == 0


# A14


def test_a14_a_row_stays_taken_until_its_last_token_is_in() -> None:
    """A slot is given out again with the first plan after its tenant's result, not before it."""
    engine = Engine(max_num_seqs=2)
    for index in range(4):
        engine.add(f"r{index}", 8, max_tokens=1)
    assert engine.dispatch() == {"r0": 8, "r1": 8}
    assert engine.dispatch() == {}
    assert engine.scheduler.explain("r0").code is SkipCode.WAITING_FOR_OUTPUT
    assert engine.scheduler.explain("r2").code is SkipCode.NO_ROW
    engine.land()
    assert engine.dispatch() == {"r2": 8, "r3": 8}
    engine.land()
    engine.land()
    engine.assert_as_if_alone()
    engine.assert_idle()


# A15


def _hand_overs(fabric: LoopbackFabric, clock: VirtualClock, prompts: list[Any]) -> list[Any]:
    """Run prompts on a prefill engine; return what each hands to a decode engine."""
    prefill = Engine(
        connector=LoopbackConnector(fabric, engine_id="P", block_size=16, lease_s=1e6), clock=clock
    )
    for index, prompt in enumerate(prompts):
        params = {"do_remote_decode": True}
        prefill.add(f"p{index}", prompt, max_tokens=1, kv_transfer_params=params)
    while not all(prefill.ends.values()):
        prefill.step()
    return [prefill.end(f"p{index}").kv_transfer_params for index in range(len(prompts))]


def test_a15_requests_that_wait_for_remote_kv_take_no_compute_slot() -> None:
    """With as many parked requests as there are slots, a local one runs at once."""
    clock = VirtualClock()
    fabric = LoopbackFabric(clock=clock, faults=LoopbackFaults(lose=True))
    prompts = [some_tokens(33, seed=seed) for seed in range(4)]
    params = _hand_overs(fabric, clock, prompts)
    decode = Engine(
        connector=LoopbackConnector(fabric, engine_id="D", block_size=16),
        clock=clock,
        max_num_seqs=4,
        load_timeout_s=100.0,
    )
    for index, prompt in enumerate(prompts):
        decode.add(f"d{index}", prompt, kv_transfer_params=params[index])
    decode.step()
    assert decode.scheduler.stats().num_parked == 4
    decode.add("local", 8, max_tokens=4)
    for _ in range(4):
        assert "local" in decode.step()
    assert decode.scheduler.stats().num_parked == 4
    decode.assert_as_if_alone("local")
    # Their deadline ends the wait; the application chose to compute them here.
    clock.advance(100.0)
    decode.run()
    assert decode.scheduler.stats().num_failed_loads == 4
    decode.assert_as_if_alone()
    decode.assert_idle()


def test_a15_the_number_of_parked_requests_has_a_bound_of_its_own() -> None:
    """At the bound a request that would park is passed over, and says what it waits for."""
    clock = VirtualClock()
    fabric = LoopbackFabric(clock=clock, faults=LoopbackFaults(delay_s=50.0))
    prompts = [some_tokens(33, seed=seed) for seed in range(3)]
    params = _hand_overs(fabric, clock, prompts)
    decode = Engine(
        connector=LoopbackConnector(fabric, engine_id="D", block_size=16, lease_s=1e6),
        clock=clock,
        max_num_parked=2,
    )
    for index, prompt in enumerate(prompts):
        decode.add(f"d{index}", prompt, kv_transfer_params=params[index])
    decode.add("local", 8, max_tokens=1)
    assert decode.step() == {"local": 8}
    assert decode.scheduler.stats().num_parked == 2
    assert decode.scheduler.explain("d2").code is SkipCode.TOO_MANY_PARKED
    decode.run()
    decode.assert_as_if_alone()
    decode.assert_idle()


# A22


def test_a22_an_adapter_over_the_limit_is_passed_over() -> None:
    """A request whose adapter finds no place waits alone; those behind it run."""
    engine = Engine(max_loras=1)
    for name, lora in (("a1", "a"), ("b", "b"), ("base", None), ("a2", "a")):
        engine.add(name, 8, max_tokens=3, lora=lora)
    assert engine.step() == {"a1": 8, "base": 8, "a2": 8}
    assert engine.scheduler.explain("b").code is SkipCode.TOO_MANY_LORAS
    engine.run()
    engine.assert_as_if_alone()
    assert all(not {"a1", "b"} <= set(plan) for plan in engine.plans)


# A34


@pytest.mark.parametrize("num_in_flight", PIPELINE_DEPTHS)
@pytest.mark.parametrize(
    ("num_prompt_tokens", "num_outputs", "budget"), [(3, 10, 4), (1, 5, 1), (7, 2, 4), (4, 8, 6)]
)
def test_a34_a_resumed_request_recomputes_all_tokens_before_it_draws_another(
    num_prompt_tokens: int, num_outputs: int, budget: int, num_in_flight: int
) -> None:
    """After a preemption its own output is prompt: computed in chunks, drawn from at the end."""
    engine = Engine(max_num_seqs=1, max_num_batched_tokens=budget, block_size=4)
    engine.add("x", num_prompt_tokens, max_tokens=num_outputs + 4)
    while len(engine.tokens["x"]) < num_outputs:
        engine.step()
    assert engine.scheduler.reset_prefix_cache(preempt_running=True)
    assert engine.scheduler.status("x") is RequestStatus.PREEMPTED
    num_known = num_prompt_tokens + num_outputs
    num_plans = -(-num_known // budget)
    before = len(engine.plans)
    for index in range(num_plans):
        assert len(engine.tokens["x"]) == num_outputs
        output = engine.schedule()
        assert output.samples.tolist() == [index == num_plans - 1]
        engine.execute(output)
        engine.land()
    recomputed = [plan["x"] for plan in engine.plans[before:]]
    assert recomputed == [budget] * (num_plans - 1) + [num_known - budget * (num_plans - 1)]
    engine.run(num_in_flight=num_in_flight)
    engine.assert_as_if_alone()
