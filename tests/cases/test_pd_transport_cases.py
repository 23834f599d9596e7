"""Faults of transports that raise."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal

import pytest
from harness import Engine
from pd_pair import BLOCK_SIZE, Pair, prompt_of
from synchronous_loads import Synchronous, run_through_failures

from pdcore.connector.base import (
    KVConnector,
    SchedulerConnector,
    WorkerConnector,
)
from pdcore.connector.loopback import LoopbackConnector, LoopbackFaults
from pdcore.request import FinishReason, Request

# C28


class Troubled(KVConnector):
    """A connector one of whose methods raises, on some of its calls.

    Args:
        inner: does the work.
        method: of either half.
        when: which calls raise, by their number; calls about local requests do not count.
    """

    def __init__(self, inner: KVConnector, method: str, when: Callable[[int], bool]) -> None:
        self.num_raised = 0
        self._inner = inner
        self._method = method
        self._when = when
        self._num_calls = 0

    def scheduler_side(self) -> SchedulerConnector:
        return self._with_trouble(self._inner.scheduler_side())

    def worker_side(self, rank: int = 0) -> WorkerConnector:
        return self._with_trouble(self._inner.worker_side(rank))

    def _concerns(self, args: tuple[Any, ...]) -> bool:
        request = args[0] if args else None
        return not isinstance(request, Request) or request.kv_transfer_params is not None

    def _with_trouble(self, half: Any) -> Any:
        original = getattr(half, self._method, None)
        if original is None:
            return half

        def troubled(*args: Any, **kwargs: Any) -> Any:
            if not self._concerns(args):
                return original(*args, **kwargs)
            self._num_calls += 1
            if self._when(self._num_calls - 1):
                self.num_raised += 1
                raise OSError("the transport is gone")
            return original(*args, **kwargs)

        setattr(half, self._method, troubled)
        return half


@pytest.fixture
def quiet_log() -> Any:
    """What is logged once a step need not be printed."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


WORKER_METHODS = ["get_finished", "start_load_kv"]
SCHEDULER_METHODS = [
    "take_events",
    "build_connector_meta",
    "update_connector_output",
    "update_state_after_alloc",
    "get_num_new_matched_tokens",
    "request_finished",
    "next_wakeup",
    "has_pending",
    "cancel",
]


@pytest.mark.usefixtures("quiet_log")
@pytest.mark.parametrize("calls", ["first", "second", "every third"])
@pytest.mark.parametrize("method", WORKER_METHODS + SCHEDULER_METHODS)
def test_c28_a_transport_that_raises_costs_its_own_requests_alone(method: str, calls: str) -> None:
    """Whichever call raises, local requests end as ever, loaded ones with a cause or as ever."""
    when: dict[str, Callable[[int], bool]] = {
        "first": lambda n: n == 0,
        "second": lambda n: n == 1,
        "every third": lambda n: n % 3 == 2,
    }
    pair = Pair(faults=LoopbackFaults(delay_polls=2))
    loopback = LoopbackConnector(pair.fabric, engine_id="d", block_size=BLOCK_SIZE)
    connector = Troubled(loopback, method, when[calls])
    engine = Engine(
        connector=connector,
        clock=pair.clock,
        block_size=BLOCK_SIZE,
        load_timeout_s=20.0,
        quarantine_timeout_s=10.0,
    )
    for index in range(3):
        prompt = prompt_of(2, more=index, seed=index)
        params = pair.hand_over(f"r{index}", prompt)
        engine.add(f"r{index}", prompt, kv_transfer_params=params)
        engine.add(f"local{index}", 20, max_tokens=6)
    engine.add("gone", prompt_of(2), kv_transfer_params=pair.hand_over("gone", prompt_of(2)))
    num_steps = 0
    while not all(engine.ends.values()) and num_steps < 400:
        engine.scheduler.has_requests()
        engine.scheduler.has_work()
        output = engine.schedule()
        if num_steps == 0:
            engine.abort("gone")
        num_steps += 1
        try:
            engine.execute(output)
        except OSError:
            engine.scheduler.abandon(output, dispatched=True)
        else:
            engine.land()
        if not output.rows.size:
            engine.clock.advance(1.0)
    for _ in range(40):
        engine.scheduler.has_requests()
        engine.step()
    assert connector.num_raised or (calls != "first" and method == "cancel")
    engine.assert_as_if_alone(*(f"local{index}" for index in range(3)))
    for index in range(3):
        end = engine.end(f"r{index}")
        if end.finish_reason is FinishReason.LENGTH:
            engine.assert_as_if_alone(f"r{index}")
        else:
            assert "transport is gone" in str(end.cause)
    engine.scheduler.check()


@pytest.mark.usefixtures("quiet_log")
@pytest.mark.parametrize("on_load_failure", ["recompute", "fail"])
@pytest.mark.parametrize("num_raised", [1, 2, 1000])
def test_c28_no_step_relies_on_a_load_that_nobody_was_told_of(
    num_raised: int, on_load_failure: Literal["recompute", "fail"]
) -> None:
    """Without orders for a load that its step needs, it is planned anew, at last without it."""
    pair = Pair()
    loopback = LoopbackConnector(pair.fabric, engine_id="sync", block_size=BLOCK_SIZE)
    connector = Troubled(Synchronous(loopback), "build_connector_meta", lambda n: n < num_raised)
    engine = Engine(
        connector=connector,
        clock=pair.clock,
        block_size=BLOCK_SIZE,
        on_load_failure=on_load_failure,
    )
    for index in range(3):
        prompt = prompt_of(2, more=index, seed=index)
        params = pair.hand_over(f"r{index}", prompt)
        engine.add(f"r{index}", prompt, max_tokens=5, kv_transfer_params=params)
        engine.add(f"local{index}", 20, max_tokens=5)
    engine.run()
    engine.assert_as_if_alone(*(f"local{index}" for index in range(3)))
    are_lost = num_raised > 1
    for index in range(3):
        end = engine.end(f"r{index}")
        if are_lost and on_load_failure == "fail":
            assert end.finish_reason is FinishReason.ERROR
            assert "2 steps that were to begin it failed" in str(end.cause)
        else:
            engine.assert_as_if_alone(f"r{index}")
            assert bool(end.num_external_tokens) is not are_lost
    assert engine.scheduler.stats().num_failed_loads == (3 if are_lost else 0)
    engine.assert_idle()


class BreaksOnOrders(Troubled):
    """Its worker raises whenever it is to begin a load."""

    def __init__(self, inner: KVConnector) -> None:
        super().__init__(inner, "start_load_kv", lambda n: True)

    def _concerns(self, args: tuple[Any, ...]) -> bool:
        return bool(args[0].loads)


@pytest.mark.parametrize("on_load_failure", ["recompute", "fail"])
def test_c28_a_load_that_breaks_each_step_that_begins_it_costs_two_steps(
    on_load_failure: str,
) -> None:
    """A step may fail by chance; a load that takes down a second one is given up."""
    pair = Pair()
    loopback = LoopbackConnector(pair.fabric, engine_id="d", block_size=BLOCK_SIZE)
    engine = Engine(
        connector=BreaksOnOrders(loopback), clock=pair.clock, on_load_failure=on_load_failure
    )
    engine.add("local", 20, max_tokens=9)
    engine.step()
    params = pair.hand_over("a", prompt_of(3))
    engine.add("a", prompt_of(3), kv_transfer_params=params)
    assert run_through_failures(engine) == 2
    assert engine.scheduler.stats().num_failed_loads == 1
    engine.assert_as_if_alone("local")
    if on_load_failure == "recompute":
        engine.assert_as_if_alone("a")
    else:
        assert "2 steps that were to begin it failed" in str(engine.end("a").cause)
    engine.assert_idle()
    pair.run()
    pair.assert_idle()


@pytest.mark.usefixtures("quiet_log")
def test_c28_a_worker_that_never_reports_again_fails_its_loads_by_their_deadline() -> None:
    """With the poll broken for good the loaded requests are computed, and the rest runs on."""
    pair = Pair()
    loopback = LoopbackConnector(pair.fabric, engine_id="d", block_size=BLOCK_SIZE)
    connector = Troubled(loopback, "get_finished", lambda n: True)
    engine = Engine(connector=connector, clock=pair.clock, load_timeout_s=20.0)
    params = pair.hand_over("a", prompt_of(3))
    began = pair.clock.now()
    engine.add("a", prompt_of(3), kv_transfer_params=params)
    engine.add("local", 20, max_tokens=60)
    while not all(engine.ends.values()):
        engine.step()
    engine.assert_as_if_alone()
    assert engine.scheduler.stats().num_failed_loads == 1
    assert pair.clock.now() - began >= 20.0
    # Nobody said that nothing writes to its blocks, so they stay where they are.
    assert engine.scheduler.stats().num_quarantined_blocks == 3
