"""Push between whole engines: what was sent ahead is used only if it is what the ticket says.

The runner checks every slot that it reads, so wrong KV is an error, and tokens must be those of a
solo run.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from nixl_engines import Engine, until
from nixl_pushes import (
    PROMPT,
    WHOLE_ENGINES,
    SlowWire,
    begin,
    decode_engine,
    decodes,
    expect,
    finish,
    landings,
    num_read,
    prefill_engine,
    pushes,
    run_idle,
    slots_of,
)
from nixl_whole_engine import NUM_BLOCKS, WholeEngine, run_until

from pdcore.connector.nixl.push.landing_area import LandingArea
from pdcore.errors import ConfigError, ExecutorError
from pdcore.request import FinishReason, Request

pytestmark = WHOLE_ENGINES


def first_chunk(engine: WholeEngine, wire: SlowWire) -> None:
    """Compute one chunk, and see its write held up on the wire."""
    engine.step()
    until(lambda: wire.num_posted == 1)


def is_quiet(engine: WholeEngine) -> bool:
    """Whether a prefill engine's worker is writing nothing, and knows it."""
    writers = engine.worker._pushes
    assert writers is not None
    return all(push.flying is None for push in writers._pushes.values())


@pytest.mark.parametrize("transport", ["tcp", None])
def test_a_prompt_is_sent_while_it_is_computed(
    transport: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first chunk is there before the last is computed; nothing is left to read at the end."""
    if transport:
        monkeypatch.setenv("UCX_TLS", transport)
    with closing(prefill_engine()) as prefill, closing(decode_engine()) as decode:
        begin(prefill, "a", PROMPT, expect(decode, PROMPT))
        prefill.step()
        until(lambda: slots_of(decode)[:2].all())
        assert not slots_of(decode)[2:].any()
        assert "a" not in prefill.ends
        decodes(decode, "a", PROMPT, finish(prefill, "a", decode), prefill)
        assert (landings(decode).num_used, num_read(decode)) == (1, 0)
        assert pushes(prefill).num_blocks == -(-(len(PROMPT) - 1) // 4)
        run_idle(prefill, decode)


def test_cached_blocks_are_sent_as_well(prefill: WholeEngine, decode: WholeEngine) -> None:
    """What the prefill engine need not compute goes out with the first chunk."""
    prefill.add("before", PROMPT, max_tokens=1)
    run_until(lambda: "before" in prefill.ends, prefill)
    begin(prefill, "a", PROMPT, expect(decode, PROMPT))
    params = finish(prefill, "a", decode)
    assert prefill.ends["a"].num_cached_tokens >= 40
    decodes(decode, "a", PROMPT, params, prefill)
    assert num_read(decode) == 0
    run_idle(prefill, decode)


def test_what_does_not_fit_is_read(prefill: WholeEngine) -> None:
    """With five slots, five blocks are sent ahead and the others read; then there is no room."""
    with closing(decode_engine(num_slots=5)) as decode:
        begin(prefill, "a", PROMPT, expect(decode, PROMPT))
        assert decode.connector.expect_push(Request("b", PROMPT)) is None
        decodes(decode, "a", PROMPT, finish(prefill, "a", decode), prefill)
        assert num_read(decode) == -(-(len(PROMPT) - 1) // 4) - 5
        assert landings(decode).num_declined == 1
        run_idle(prefill, decode)


def test_an_engine_without_staging_memory_expects_nothing(prefill: WholeEngine) -> None:
    """Asking it says what to set."""
    with pytest.raises(ConfigError, match="push_staging_bytes"):
        prefill.connector.expect_push(Request("a", PROMPT))


@pytest.mark.parametrize("breaks_at", [0, 2])
def test_a_late_write_of_a_preempted_request(
    prefill: WholeEngine, decode: WholeEngine, wire: SlowWire, breaks_at: int
) -> None:
    """A request that lost its blocks while they were sent sends them again; what was sent before
    counts for nothing, also when that fails."""
    wire.breaks_at = breaks_at
    begin(prefill, "a", PROMPT, expect(decode, PROMPT))
    first_chunk(prefill, wire)
    prefill.scheduler.reset_prefix_cache(preempt_running=True)
    prefill.scheduler.pause()
    prefill.step()
    # Somebody else computes in the blocks that are still being sent.
    prefill.runner.kv_caches.buffer[:] = 12345
    wire.clear()
    until(lambda: (slots_of(decode)[0] == 12345).all())
    until(lambda: is_quiet(prefill))
    prefill.scheduler.resume()
    params = finish(prefill, "a", decode)
    assert prefill.ends["a"].num_preemptions == 1
    decodes(decode, "a", PROMPT, params, prefill)
    num_missing = -(-(len(PROMPT) - 1) // 4) if breaks_at else 0
    assert (num_read(decode), pushes(prefill).num_restarts) == (num_missing, 1)
    run_idle(prefill, decode)


def test_a_write_that_fails(prefill: WholeEngine, decode: WholeEngine, wire: SlowWire) -> None:
    """What arrived before a write failed is used, the rest is read; nothing more is sent."""
    wire.breaks_at = 3
    wire.clear()
    begin(prefill, "a", PROMPT, expect(decode, PROMPT))
    for num_posted in (1, 2):
        prefill.step()
        until(lambda num_posted=num_posted: wire.num_posted == num_posted)
    decodes(decode, "a", PROMPT, finish(prefill, "a", decode), prefill)
    assert num_read(decode) == -(-(len(PROMPT) - 1) // 4) - 4
    assert (pushes(prefill).num_blocks, wire.num_posted) == (4, 3)
    run_idle(prefill, decode)


def test_a_plan_that_is_taken_back(prefill: WholeEngine, decode: WholeEngine) -> None:
    """What it was to send goes out with the next plan, and nothing has to be read."""
    begin(prefill, "a", PROMPT, expect(decode, PROMPT))
    prefill.step()
    output = prefill.scheduler.schedule()
    assert output.connector_meta.pushes
    prefill.scheduler.abandon(output)
    decodes(decode, "a", PROMPT, finish(prefill, "a", decode), prefill)
    assert (landings(decode).num_used, num_read(decode), pushes(prefill).num_restarts) == (1, 0, 0)
    run_idle(prefill, decode)


@pytest.mark.parametrize("is_aborted", [True, False])
def test_a_step_that_fails(prefill: WholeEngine, decode: WholeEngine, is_aborted: bool) -> None:
    """Orders that got lost with their step are given anew; if nobody wants them, nobody waits."""
    begin(prefill, "a", PROMPT, expect(decode, PROMPT))
    prefill.runner._step_fault = lambda _: RuntimeError("a cosmic ray")
    with pytest.raises(ExecutorError, match="a cosmic ray"):
        prefill.step()
    prefill.runner._step_fault = None
    if is_aborted:
        prefill.scheduler.abort_requests(["a"])
    else:
        decodes(decode, "a", PROMPT, finish(prefill, "a", decode), prefill)
        assert (landings(decode).num_used, num_read(decode)) == (1, 0)
    run_idle(prefill, decode)


def test_an_abort_there_keeps_the_blocks_until_they_are_sent(
    prefill: WholeEngine, decode: WholeEngine, wire: SlowWire
) -> None:
    """Blocks of an aborted prefill are not reused while a write reads them; then all is free."""
    begin(prefill, "a", PROMPT, expect(decode, PROMPT))
    first_chunk(prefill, wire)
    prefill.scheduler.abort_requests(["a"])
    for _ in range(3):
        prefill.step()
    assert prefill.ends["a"].finish_reason is FinishReason.ABORT
    assert prefill.num_free == NUM_BLOCKS - 3
    assert landings(decode).num_free_slots < landings(decode).num_slots
    wire.clear()
    run_idle(prefill, decode)
    assert landings(decode).num_lost == 1


def test_a_ticket_that_goes_back_keeps_the_blocks_until_they_are_sent(
    prefill: WholeEngine, decode: WholeEngine, wire: SlowWire
) -> None:
    """A ticket's end does not free blocks that a write still reads."""
    begin(prefill, "a", PROMPT, expect(decode, PROMPT))
    params = finish(prefill, "a", decode)
    decode.add("a", PROMPT, max_tokens=2, params=params)
    decode.scheduler.abort_requests(["a"])
    tickets = prefill.connector._parts.hand_overs.registry
    run_until(lambda: not tickets.num_open, decode, prefill)
    for _ in range(3):
        prefill.step()
    assert prefill.num_free == NUM_BLOCKS - 1 - -(-len(PROMPT) // 4)
    wire.clear()
    run_idle(prefill, decode)


def test_a_push_that_is_called_off(
    prefill: WholeEngine, decode: WholeEngine, wire: SlowWire
) -> None:
    """Its slots are nobody's until the writer says that it stopped; others use the rest."""
    push_to = expect(decode, PROMPT)
    begin(prefill, "a", PROMPT, push_to)
    first_chunk(prefill, wire)
    decode.connector.call_off_push(push_to)
    assert landings(decode).num_quarantined_slots == len(push_to["slots"])
    other = expect(decode, PROMPT)
    assert not set(other["slots"]) & set(push_to["slots"])
    decode.connector.call_off_push(other)
    wire.clear()
    until(lambda: slots_of(decode)[push_to["slots"][0]].all())
    # The writer hears of it, or ends by itself, and says that it stopped.
    decodes(decode, "a", PROMPT, finish(prefill, "a", decode), prefill)
    assert landings(decode).num_used == 0
    run_idle(prefill, decode)


def test_a_load_waits_for_the_last_write(
    prefill: WholeEngine, decode: WholeEngine, wire: SlowWire
) -> None:
    """A ticket that comes before its data is not read in vain: the load waits, and says why."""
    # The two have shaken hands before.
    decodes(decode, "warm", PROMPT[:9], prefill.prefill("warm", PROMPT[:9]), prefill)
    num_before = num_read(decode)
    begin(prefill, "a", PROMPT, expect(decode, PROMPT))
    params = finish(prefill, "a", decode)
    decode.add("a", PROMPT, max_tokens=2, params=params)
    run_until(lambda: "still pushes" in (decode.scheduler.explain("a").waits_on or ""), decode)
    wire.clear()
    run_until(lambda: "a" in decode.ends, decode, prefill)
    assert (landings(decode).num_used, num_read(decode) - num_before) == (1, 0)
    run_idle(prefill, decode)


@pytest.mark.parametrize("rule", ["recompute", "fail"])
def test_a_load_does_not_wait_for_ever(prefill: WholeEngine, wire: SlowWire, rule: str) -> None:
    """Data that does not come in time costs a recompute or the request, as was chosen."""
    limits = {"load_timeout_s": 0.5, "on_load_failure": rule}
    with closing(decode_engine(limits=limits, lease_s=1.5)) as decode:
        begin(prefill, "a", PROMPT, expect(decode, PROMPT))
        params = finish(prefill, "a", decode)
        request = decode.add("a", PROMPT, max_tokens=2, params=params)
        run_until(lambda: "a" in decode.ends, decode, prefill, limit_s=5)
        if rule == "recompute":
            assert decode.tokens["a"] == decode.runner.solo_tokens(request)
        else:
            assert "no completion within 0.5 s" in (decode.ends["a"].cause or "")
        assert landings(decode).num_quarantined_slots > 0
        wire.clear()
        run_idle(prefill, decode)
        assert landings(decode).num_used == 0


def test_a_decode_engine_that_goes_away(prefill: WholeEngine, wire: SlowWire) -> None:
    """A write into a dead engine's memory fails; the prefill engine goes on, and is idle again."""
    with closing(decode_engine()) as decode:
        begin(prefill, "a", PROMPT, expect(decode, PROMPT))
        first_chunk(prefill, wire)
    wire.clear()
    params = finish(prefill, "a")
    with closing(decode_engine()) as successor:
        decodes(successor, "a", PROMPT, params, prefill)
    run_until(lambda: not prefill.scheduler.has_requests(), prefill)
    assert prefill.num_free == NUM_BLOCKS - 1


def test_staging_addresses_are_never_used_again() -> None:
    """What a peer on this host still writes after the end hits memory that is nobody's."""
    with closing(Engine(push_staging_bytes=64 << 12)) as engine:
        metadata = engine.worker.get_handshake_metadata()
        assert metadata is not None
        assert metadata.landing is not None
        region = metadata.landing.region
    del engine
    gc.collect()
    maps = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    assert any(
        int(start, 16) <= region.address and region.address + region.num_bytes <= int(end, 16)
        for start, end in maps
    )


def test_nobody_comes_for_what_was_sent(prefill: WholeEngine, decode: WholeEngine) -> None:
    """Data whose request never comes makes room after a lease."""
    begin(prefill, "a", PROMPT, expect(decode, PROMPT))
    finish(prefill, "a", decode)
    run_until(lambda: landings(decode).num_landed == 1, prefill, decode)
    assert landings(decode).num_free_slots < landings(decode).num_slots
    run_idle(prefill, decode)
    assert landings(decode).num_used == 0


def test_another_request_with_the_ticket_does_not_free_what_one_reads(
    prefill: WholeEngine, decode: WholeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slots stay the reader's until it has read them, whoever else has its ticket and goes."""
    orders: list[Callable[[], None]] = []
    submit = LandingArea.submit
    monkeypatch.setattr(
        LandingArea, "submit", lambda area, *order: orders.append(partial(submit, area, *order))
    )
    begin(prefill, "a", PROMPT, expect(decode, PROMPT))
    params = finish(prefill, "a", decode)
    decode.add("a", PROMPT, max_tokens=9, params=params)
    run_until(lambda: bool(orders), decode, prefill)
    before = landings(decode).num_free_slots
    decode.add("b", PROMPT, max_tokens=9, params=params)
    decode.scheduler.abort_requests(["b"])
    assert landings(decode).num_free_slots == before < landings(decode).num_slots
    orders.pop()()
    run_until(lambda: "a" in decode.ends, decode, prefill)
    run_idle(prefill, decode)


def test_a_push_that_is_called_off_while_it_is_read(
    prefill: WholeEngine, decode: WholeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slots go to nobody else before the reader has done."""
    orders: list[Callable[[], None]] = []
    submit = LandingArea.submit
    monkeypatch.setattr(
        LandingArea, "submit", lambda area, *order: orders.append(partial(submit, area, *order))
    )
    push_to = expect(decode, PROMPT)
    begin(prefill, "a", PROMPT, push_to)
    params = finish(prefill, "a", decode)
    request = decode.add("a", PROMPT, max_tokens=9, params=params)
    run_until(lambda: bool(orders), decode, prefill)
    decode.connector.call_off_push(push_to)
    assert not set(expect(decode, PROMPT)["slots"]) & set(push_to["slots"])
    orders.pop()()
    run_until(lambda: "a" in decode.ends, decode, prefill)
    assert decode.tokens["a"] == decode.runner.solo_tokens(request)
    assert landings(decode).num_used == 1
    run_idle(prefill, decode)
