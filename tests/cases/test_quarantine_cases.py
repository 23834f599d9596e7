"""Cancelled loads that keep more of the pool than they may."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pytest
from harness import Engine, some_tokens
from pd_pair import BLOCK_SIZE, Pair, ScriptedConnector

from pdcore.connector.loopback import LoopbackFaults
from pdcore.errors import ConfigError
from pdcore.scheduler import Limits

NEVER = LoopbackFaults(lose=True, late_write=True)
TIMEOUT_S = 60.0


def prompt_of(num_blocks: int, *, seed: int) -> Any:
    return some_tokens(num_blocks * BLOCK_SIZE, seed=seed)


def loading_pair(sizes: Sequence[int], faults: LoopbackFaults, **limits: Any) -> Pair:
    """A pair whose decode engine, of 20 blocks, loads prompts of these sizes as r0, r1, ..."""
    pair = Pair(
        faults=faults,
        decode={"num_usable_blocks": 20, "quarantine_timeout_s": TIMEOUT_S, **limits},
    )
    for index, size in enumerate(sizes):
        pair.send(f"r{index}", prompt_of(size, seed=index))
    pair.turn(pair.decode)
    assert pair.decode.scheduler.stats().num_parked == len(sizes)
    return pair


def run_idle(pair: Pair, *, max_turns: int = 10) -> None:
    """Step the decode engine as long as it has something to do at this very time."""
    for _ in range(max_turns):
        if not pair.decode.scheduler.has_work():
            return
        pair.turn(pair.decode)
    raise AssertionError("the engine never comes to rest")


@pytest.mark.parametrize(
    ("share", "num_left", "num_cut_off"),
    [(1.0, 15, 0), (0.75, 15, 0), (0.74, 11, 1), (0.5, 7, 2), (0.3, 2, 3), (0.05, 0, 4)],
)
def test_the_oldest_are_cut_off_until_the_rest_is_few_enough(
    share: float, num_left: int, num_cut_off: int, caplog: pytest.LogCaptureFixture
) -> None:
    """An idle engine does it at once, counts it and says so; the rest has its full time."""
    pair = loading_pair((4, 4, 5, 2), NEVER, max_quarantined_share=share)
    decode, began = pair.decode, pair.clock.now()
    decode.abort("r0", "r1", "r2", "r3")
    assert decode.scheduler.stats().num_quarantined_blocks == 15
    run_idle(pair)
    stats = decode.scheduler.stats()
    assert stats.num_quarantined_blocks == num_left
    assert stats.max_num_quarantined_blocks == int(20 * share)
    assert stats.num_cut_off_loads == num_cut_off
    lines = [record.message for record in caplog.records if "cutting off" in record.message]
    assert len(lines) == num_cut_off
    assert all(f"in quarantine, where {int(20 * share)} may be" in line for line in lines)
    assert pair.clock.now() == began
    pair.run()
    assert pair.clock.now() == began + (TIMEOUT_S if num_left else 0)
    assert decode.scheduler.stats().num_cut_off_loads == 4
    pair.assert_idle()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_what_the_workers_end_when_they_are_told_is_not_cut_off(depth: int) -> None:
    """However many steps are ahead of that one: its result comes first."""
    pair = loading_pair((5, 5, 5), LoopbackFaults(delay_polls=99), max_quarantined_share=0.1)
    decode = pair.decode
    decode.add("other", 20, max_tokens=12)
    for _ in range(depth - 1):
        decode.dispatch()
    decode.abort("r0", "r1", "r2")
    while decode.scheduler.stats().num_quarantined_blocks:
        decode.dispatch()
        if len(decode.scheduler.in_flight) >= depth:
            decode.land()
    assert decode.scheduler.stats().num_cut_off_loads == 0
    while decode.scheduler.in_flight:
        decode.land()
    pair.run()
    decode.assert_as_if_alone("other")
    pair.assert_idle()


def test_one_that_cannot_be_cut_off_drags_no_other_along() -> None:
    """It is told once, and again after its time; it does not count against the others."""
    connector = ScriptedConnector()
    engine = Engine(
        num_usable_blocks=20,
        connector=connector,
        quarantine_timeout_s=TIMEOUT_S,
        max_quarantined_share=0.5,
    )
    for index in range(3):
        engine.add(f"r{index}", prompt_of(5, seed=index), kv_transfer_params={})
    engine.step()
    first, second, third = (connector.side.loads[f"r{index}"].transfer for index in range(3))
    engine.abort("r1", "r0", "r2")
    for _ in range(10):
        engine.step()
    assert connector.side.cut_off_loads == [second]
    assert engine.scheduler.stats().num_quarantined_blocks == 15
    for _ in range(int(TIMEOUT_S)):
        engine.step()
    assert connector.side.cut_off_loads.count(second) == 2
    assert engine.scheduler.stats().num_cut_off_loads == 3
    connector.side.report(failed=[first, second, third])
    engine.step()
    assert engine.scheduler.stats().num_quarantined_blocks == 0


def test_a_queue_head_has_its_blocks_sooner() -> None:
    """What waits for blocks of a hung load need not wait for the load's time."""
    pair = loading_pair((6, 6, 6), attrs.evolve(NEVER, duplicate=True))
    decode, began = pair.decode, pair.clock.now()
    decode.abort("r0", "r1", "r2")
    decode.add("b", prompt_of(6, seed=9), max_tokens=8)
    while not decode.tokens["b"]:
        pair.turn(decode)
    assert pair.clock.now() == began
    # 18 blocks, of which 10 may stay: two of three loads.
    assert decode.scheduler.stats().num_cut_off_loads == 2
    pair.run()
    decode.assert_as_if_alone("b")
    pair.assert_idle()


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_is_between_none_and_all(share: float) -> None:
    """Anything else is refused with the value."""
    with pytest.raises(ConfigError, match="max_quarantined_share="):
        Limits(max_quarantined_share=share)
