"""The policies that come with the library, as pure choices over columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore import (
    FCFS,
    DeadlineFirst,
    KVCacheManager,
    LRUBlockPool,
    Priority,
    Request,
    SamplingParams,
    SchedulingPolicy,
    ShortestPromptFirst,
    UnifiedScheduler,
)
from pdcore.scheduler import RunningView

requests = st.lists(
    st.builds(
        lambda length, priority, arrival, deadline: Request(
            "r",
            [1] * length,
            sampling=SamplingParams(max_tokens=1),
            priority=priority,
            arrival_time=float(arrival),
            deadline=deadline,
        ),
        st.integers(1, 4),
        st.integers(0, 2),
        st.integers(0, 2),
        st.none() | st.floats(0, 3),
    ),
    min_size=1,
    max_size=6,
)


def view(running: list[Request]) -> RunningView:
    zeros = np.zeros(len(running), np.int32)
    return RunningView(
        requests=tuple(running),
        priority=np.array([request.priority for request in running]),
        arrival_time=np.array([request.arrival_time for request in running], float),
        num_tokens=zeros,
        num_computed_tokens=zeros,
        num_blocks=zeros,
    )


@given(requests)
def test_fcfs_and_shortest_prompt_first_preempt_the_last_to_start(running: list[Request]) -> None:
    """Whatever the requests are like."""
    for policy in (FCFS(), ShortestPromptFirst()):
        assert policy.victim(view(running)) == len(running) - 1


@given(requests)
def test_priority_preempts_the_first_of_the_worst_and_latest(running: list[Request]) -> None:
    """As max() over (priority, arrival time) does."""
    worst = max(running, key=lambda request: (request.priority, request.arrival_time))
    assert running[Priority().victim(view(running))] is worst


@given(requests, st.integers(0, 2))
def test_priority_displaces_only_the_strictly_less_urgent(
    running: list[Request], priority: int
) -> None:
    """Equal priorities never do, and without displace=True nobody does."""
    urgent = Request("urgent", [1], priority=priority)
    assert Priority().displace(urgent, view(running)) is None
    index = Priority(displace=True).displace(urgent, view(running))
    worst = max(request.priority for request in running)
    assert (index is not None) == (worst > priority)
    if index is not None:
        assert running[index].priority == worst


@given(requests)
def test_deadline_first_preempts_the_last_of_the_least_urgent(running: list[Request]) -> None:
    """Those without a deadline are the least urgent of all."""
    policy = DeadlineFirst()
    index = policy.victim(view(running))
    keys = [policy.key(request) for request in running]
    assert keys[index] == max(keys)
    assert max(keys) not in keys[index + 1 :]


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        (FCFS(), ["long urgent", "short", "soon"]),
        (Priority(), ["long urgent", "short", "soon"]),
        (ShortestPromptFirst(), ["soon", "short", "long urgent"]),
        (DeadlineFirst(), ["soon", "short", "long urgent"]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, SchedulingPolicy) else "",
)
def test_keys_sort_requests_as_the_policy_says(policy: SchedulingPolicy, order: list[str]) -> None:
    """Smallest first, equals in order of arrival."""
    made = [
        Request("long urgent", [1] * 9, priority=-1, arrival_time=0.0),
        Request("short", [1] * 2, arrival_time=1.0, deadline=8.0),
        Request("soon", [1], arrival_time=2.0, deadline=4.0),
    ]
    assert [request.request_id for request in sorted(made, key=policy.key)] == order


@pytest.mark.parametrize("answer", [[1.0, 0.0], ["1", "0"], [True, False], [[0, 1]], None, 7])
def test_an_order_that_is_none_costs_a_counter(answer: Any) -> None:
    """Fractions, words, or one number: the step goes by arrival."""

    class Odd(SchedulingPolicy):
        dynamic = True

        def order(self, waiting: Any, now: float) -> Any:
            return answer

    scheduler = UnifiedScheduler(KVCacheManager(LRUBlockPool(9, 4)), policy=Odd())
    for name in ("a", "b"):
        scheduler.add_request(Request(name, [1], sampling=SamplingParams(max_tokens=1)))
    output = scheduler.schedule()
    assert output.rows.size == 2
    is_order = isinstance(answer, list) and answer[0] is True
    assert scheduler.stats().num_policy_errors == (0 if is_order else 1)
