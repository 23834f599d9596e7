"""What becomes of a push when the engine that sends it dies or hangs, on real processes."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from nixl_engines import until
from nixl_pushes import (
    CHUNK,
    PROMPT,
    WHOLE_ENGINES,
    decode_engine,
    decodes,
    expect,
    landings,
    run_idle,
    slots_of,
)
from nixl_whole_engine import WholeEngine, run_until
from nixl_whole_process import WholeProcess, whole_process

from pdcore.request import Request

pytestmark = WHOLE_ENGINES

LIMITS = {"max_num_batched_tokens": CHUNK, "max_num_seqs": CHUNK}
LEASE = {"lease_s": 1.0, "request_timeout_s": 0.5}


def begin(peer: WholeProcess, decode: WholeEngine) -> dict[str, Any]:
    """Let a peer send the first chunk of a prompt; return the leave that it has."""
    push_to = expect(decode, PROMPT)
    slots = slots_of(decode)
    slots[:] = 0
    peer.ask("pause")
    peer.ask("add", "a", PROMPT, 1, {"do_remote_decode": True, "push_to": push_to})
    until(lambda: peer.ask("num_pushes"))
    peer.ask("step")
    until(lambda: slots[push_to["slots"][0]].all())
    assert peer.ask("end", "a") is None
    return push_to


def test_a_writer_that_is_killed() -> None:
    """Its slots are free once its death is proven, and its successor's pushes are good."""
    with closing(decode_engine(num_slots=12, **LEASE)) as decode:
        with whole_process(limits=LIMITS, engine_id="p", **LEASE) as doomed:
            push_to = begin(doomed, decode)
            assert landings(decode).num_free_slots == 0
            doomed.kill()
            run_until(lambda: landings(decode).num_free_slots == 12, decode, limit_s=5)
            assert landings(decode).num_lost == 1
        with whole_process(limits=LIMITS, engine_id="p", port=0, **LEASE) as successor:
            again = begin(successor, decode)
            assert set(again["slots"]) == set(push_to["slots"])
            successor.ask("resume")
            until(lambda: successor.ask("end", "a"))
            params = successor.ask("end", "a")[1].kv_transfer_params
            decodes(decode, "a", PROMPT, params)
            assert landings(decode).num_used == 1
            run_idle(decode)


def test_a_writer_that_hangs() -> None:
    """Nobody gets the slots of a stopped writer; it frees them when it goes on and is told."""
    with (
        closing(decode_engine(num_slots=12, **LEASE)) as decode,
        whole_process(limits=LIMITS, **LEASE) as peer,
    ):
        push_to = begin(peer, decode)
        peer.stop()
        num_slots = len(push_to["slots"])
        run_until(lambda: landings(decode).num_quarantined_slots == num_slots, decode, limit_s=5)
        # Twice the lease and the time for data to arrive, and half a dozen looks at it.
        until_later(decode, seconds=3.0)
        assert landings(decode).num_quarantined_slots == num_slots
        assert decode.connector.expect_push(Request("b", PROMPT)) is None
        peer.go_on()
        run_until(lambda: landings(decode).num_free_slots == 12, decode, limit_s=10)
        peer.ask("resume")
        until(lambda: peer.ask("end", "a"))
        decodes(decode, "a", PROMPT, peer.ask("end", "a")[1].kv_transfer_params)
        assert landings(decode).num_used == 0


def until_later(engine: WholeEngine, *, seconds: float) -> None:
    """Let an engine run for some time."""
    end = engine.clock.now() + seconds
    run_until(lambda: engine.clock.now() > end, engine)
