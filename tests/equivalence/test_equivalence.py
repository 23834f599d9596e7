"""pdcore decides as vLLM 0.32 does, step by step, on recorded traces; vLLM is not needed here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from fixtures import RECORDED, REGRESSIONS, read
from own_engine import OwnEngine
from profiles import PROFILES, random_trace
from scheduler_traces import Arrival, Settings, Trace
from shrinking import shrink
from stepping import Record, drive, first_difference

from pdcore.errors import InvalidRequest
from pdcore.kvcache import LRUOrder
from pdcore.kvcache.eviction import Blocks, Undo
from pdcore.scheduler import FCFS, Priority, RunningView, SchedulingPolicy

Recorded = list[tuple[Trace, Record]]

_DEVIATIONS = {
    "a": "a request that the pool can never hold",
    "b": "a whole prompt longer than a step",
    "c": "a victim that had filled a block in the same step",
}


@cache
def recorded() -> Recorded:
    return list(read(RECORDED))


def profile_of(trace: Trace) -> str:
    return trace.name.rsplit("-", 1)[0]


def difference(trace: Trace, expected: Record) -> str | None:
    actual = drive(trace, OwnEngine(trace), max_steps=len(expected.steps))
    return first_difference(expected, actual)


@pytest.mark.parametrize("profile", PROFILES)
def test_every_step_is_decided_as_recorded(profile: str) -> None:
    """Tokens, admissions, hits, victims, ends and free blocks are those of vLLM in every step."""
    found = {
        trace.name: difference(trace, expected)
        for trace, expected in recorded()
        if profile_of(trace) == profile
    }
    assert found
    assert {name: what for name, what in found.items() if what is not None} == {}


def test_what_once_differed_is_decided_as_recorded() -> None:
    """The smallest traces of every difference that was ever found stay mended."""
    found = {trace.name: difference(trace, expected) for trace, expected in read(REGRESSIONS)}
    assert found
    assert {name: what for name, what in found.items() if what is not None} == {}


def test_only_the_listed_deviations_cut_a_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    """Few traces reach one of them, and each says which one and after how many steps."""
    cut = Counter(record.deviation for _, record in recorded() if record.deviation)
    steps = Counter[str]()
    for _, record in recorded():
        steps[record.deviation or "whole"] += len(record.steps)
    with capsys.disabled():
        print(f"\n{len(recorded())} traces, {steps.total()} steps compared; whole traces, except")
        for tag, words in _DEVIATIONS.items():
            print(
                f"  ({tag}) {words}: {cut[tag]} traces, compared for {steps[tag]} steps until then"
            )
    assert set(cut) <= set(_DEVIATIONS)
    assert len(recorded()) - cut.total() >= 300


@pytest.mark.parametrize("tag", ["a", "b"])
def test_where_a_comparison_is_cut_pdcore_refuses_or_ends_the_request(tag: str) -> None:
    """What vLLM would wait for, or try again, for ever is refused, or ends with `capacity`."""
    num_refused = num_outgrown = 0
    for trace, expected in recorded():
        if expected.deviation != tag:
            continue
        engine = OwnEngine(trace)
        record = drive(trace, engine)
        assert (record.deviation, record.deviant) == (tag, expected.deviant)
        deviant = record.deviant
        assert deviant is not None
        if trace.arrivals[deviant].step == len(record.steps):
            with pytest.raises(InvalidRequest, match=trace.request_id(deviant)):
                engine.add(deviant)
            num_refused += 1
        else:
            results = [engine.update() for _ in range(engine.num_in_flight)]
            finished = {
                request: reason for result in results for request, reason in result.finished
            }
            assert finished[deviant] in ("capacity", "stop")
            num_outgrown += finished[deviant] == "capacity"
    assert num_refused >= 3
    assert num_outgrown >= (5 if tag == "a" else 0)


def test_the_records_cover_what_they_are_for() -> None:
    """Preemption, hits, ends together, stops, rows used again: all occur, and often."""
    count = Counter[str]()
    for trace, record in recorded():
        kind = "async" if trace.settings.num_in_flight > 1 else "sync"
        count[kind] += 1
        count[trace.settings.policy] += 1
        count["cached" if trace.settings.enable_prefix_caching else "uncached"] += 1
        count["capped chunks"] += trace.settings.long_prefill_token_threshold > 0
        count["whole prompts"] += not trace.settings.enable_chunked_prefill
        count["rows used again"] += len(trace.arrivals) > 2 * trace.settings.max_num_seqs
        count["aborts"] += len(trace.aborts)
        for step in record.steps:
            count[f"{kind} preemptions"] += len(step.preempted)
            count["several gave way"] += len(step.preempted) > 1
            count["resumed with a hit"] += any(hit for _, hit in step.resumed)
            count["new with a hit"] += any(hit for _, hit in step.new)
            count["ended together"] += len(step.finished) > 1
            count["stops"] += sum(reason == "stop" for _, reason in step.finished)
    least = {
        "sync": 150,
        "async": 150,
        "fcfs": 200,
        "priority": 60,
        "cached": 250,
        "uncached": 30,
        "capped chunks": 30,
        "whole prompts": 40,
        "rows used again": 150,
        "aborts": 250,
        "sync preemptions": 300,
        "async preemptions": 300,
        "several gave way": 10,
        "resumed with a hit": 100,
        "new with a hit": 1000,
        "ended together": 200,
        "stops": 500,
    }
    assert {name: count[name] for name, wanted in least.items() if count[name] < wanted} == {}


class FirstGivesWay(FCFS):
    def victim(self, running: RunningView) -> int:
        return 0


class LastOfEqualsGivesWay(Priority):
    def victim(self, running: RunningView) -> int:
        worst = max(zip(running.priority, running.arrival_time, strict=True))
        pairs = list(zip(running.priority, running.arrival_time, strict=True))
        return len(pairs) - 1 - pairs[::-1].index(worst)


class NewestGoesFirst(LRUOrder):
    """Evicts what was released last."""

    def pop(self, n: int) -> tuple[Blocks, Undo]:
        ids = self.ids()[-n:]
        return ids, self.discard(ids)


class HeadGoesFirst(LRUOrder):
    """Keeps the end of a prefix longer than its start."""

    def append(self, ids: Blocks) -> Undo:
        return super().append(np.ascontiguousarray(ids[::-1]))


@pytest.mark.parametrize(
    ("policy", "make_policy", "make_order"),
    [
        ("fcfs", FirstGivesWay, None),
        ("priority", LastOfEqualsGivesWay, None),
        ("fcfs", None, NewestGoesFirst),
        ("fcfs", None, HeadGoesFirst),
    ],
)
def test_another_decision_is_noticed(
    policy: str,
    make_policy: Callable[[], SchedulingPolicy] | None,
    make_order: Callable[[int], LRUOrder] | None,
) -> None:
    """A policy or an order of eviction that decides otherwise differs from some record."""

    def differs(trace: Trace, expected: Record) -> bool:
        engine = OwnEngine(
            trace,
            policy=make_policy and make_policy(),
            eviction=make_order and make_order(trace.settings.num_blocks),
        )
        actual = drive(trace, engine, max_steps=len(expected.steps))
        return first_difference(expected, actual) is not None

    assert any(
        differs(trace, expected)
        for trace, expected in recorded()
        if trace.settings.policy == policy and profile_of(trace) != "plain"
    )


def test_a_record_with_one_number_changed_is_told_apart() -> None:
    """Every field of every step takes part in the comparison."""
    trace, expected = next(
        entry for entry in recorded() if any(step.preempted for step in entry[1].steps)
    )
    assert difference(trace, expected) is None
    for name in vars(expected.steps[0]):
        number = next(n for n, step in enumerate(expected.steps) if getattr(step, name))
        steps = list(expected.steps)
        steps[number] = replace(steps[number], **{name: None})
        found = first_difference(Record(steps), expected)
        assert found is not None
        assert found.startswith(f"step {number}, {name}")


def test_traces_survive_the_way_through_a_file() -> None:
    """Reading what was written gives an equal trace with equal tokens."""
    for profile in PROFILES:
        trace = random_trace(profile, 0)
        again = Trace.from_data(trace.to_data())
        assert again == trace
        assert again.tokens_digest() == trace.tokens_digest()


def test_shrinking_keeps_only_what_fails() -> None:
    """Of many requests, the one with the long output is left, with nothing it does not need."""
    trace = random_trace("mixed", 3)
    long = replace(trace.arrivals[4], max_tokens=40, min_tokens=0)
    trace = replace(trace, arrivals=(*trace.arrivals[:4], long, *trace.arrivals[5:]))

    def has_long_output(candidate: Trace) -> bool:
        return any(arrival.max_tokens >= 33 for arrival in candidate.arrivals)

    smallest = shrink(trace, has_long_output)
    assert len(smallest.arrivals) == 1
    arrival = smallest.arrivals[0]
    assert arrival.num_prompt_tokens == 1
    assert arrival == Arrival(
        0, arrival.prompt, long.stream, 33, ignore_eos=True, arrival_time=long.arrival_time
    )
    assert smallest.aborts == ()
    assert smallest.settings.policy == Settings().policy
