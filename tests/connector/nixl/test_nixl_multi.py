"""Whole engines with several connectors at once, of which one or more are NIXL's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest
from nixl_whole_engine import BLOCK_SIZE, NUM_BLOCKS, WholeEngine, prompts, run_until

from pdcore.connector import KVConnector, MultiConnector, NullConnector
from pdcore.connector.loopback import LoopbackConnector, LoopbackFabric, LoopbackFaults
from pdcore.connector.multi.scheduler_side import MultiSchedulerConnector
from pdcore.connector.nixl import NixlConfig, NixlConnector, NixlSchedulerConnector
from pdcore.connector.offload import OffloadConfig, OffloadConnector
from pdcore.errors import InvalidTransferParams
from pdcore.request import Request

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(240)]

WIRES = ["nixl", "other"]


NUM_SLOTS = 32


def nixl() -> NixlConnector:
    slots = {"push_staging_bytes": NUM_SLOTS * 8 * BLOCK_SIZE}
    return NixlConnector(NixlConfig(block_size=BLOCK_SIZE, **slots))


@contextmanager
def joined(
    fabric: LoopbackFabric | None, **limits: Any
) -> Iterator[tuple[WholeEngine, WholeEngine]]:
    """A prefill and a decode engine with two wires between them; they prefer different ones.

    Args:
        fabric: of the other wire; None makes it one of NIXL's as well.
        limits: of both.
    """

    def engine(name: str, order: list[str]) -> WholeEngine:
        loopback = fabric and LoopbackConnector(fabric, engine_id=name, block_size=BLOCK_SIZE)
        wires: dict[str, KVConnector] = {"nixl": nixl(), "other": loopback or nixl()}
        connector = MultiConnector({wire: wires[wire] for wire in order})
        return WholeEngine(connector=connector, limits=limits)

    with ExitStack() as stack:
        prefill = stack.enter_context(closing(engine("p", WIRES)))
        yield prefill, stack.enter_context(closing(engine("d", WIRES[::-1])))


def serve(prefill: WholeEngine, decode: WholeEngine, *, num: int, wires: set[str] | None) -> None:
    """Hand over prompts; their tokens must be exact, and pools as empty as before."""
    requests = []
    for i, prompt in enumerate(prompts(num, seed=6, shared=9)):
        params = json.loads(json.dumps(prefill.prefill(f"a{i}", prompt, decode)))
        assert params.get("connectors", {}).keys() == (wires or set())
        requests.append(decode.add(f"a{i}", prompt, max_tokens=12, params=params))
    run_until(lambda: len(decode.ends) == num, decode, prefill)
    for request in requests:
        assert decode.tokens[request.request_id] == decode.runner.solo_tokens(request)
        assert decode.ends[request.request_id].num_external_tokens > 0
    run_until(lambda: prefill.num_free == decode.num_free == NUM_BLOCKS - 1, prefill, decode)
    assert not decode.scheduler.has_requests()
    assert not prefill.scheduler.has_requests()


def num_finished(decode: WholeEngine) -> dict[str, int]:
    """How many loads each wire brought."""
    stats = decode.connector.stats()
    return {name: each.loads.num_finished for name, each in stats.by_connector.items()}


@pytest.mark.parametrize("is_loopback", [False, True])
def test_a_prompt_comes_over_one_wire_and_both_let_go(is_loopback: bool) -> None:
    """Over the one that the decode engine prefers."""
    with joined(LoopbackFabric() if is_loopback else None) as (prefill, decode):
        serve(prefill, decode, num=4, wires=set(WIRES))
        assert num_finished(decode) == {"nixl": 0, "other": 4}
        assert prefill.connector.stats().tickets.num_accepted == 4
        assert prefill.connector.stats().tickets.num_released == 4


def test_nixl_brings_what_the_other_wire_lost() -> None:
    """A second try goes over the wire that has not failed."""
    broken = LoopbackFabric(faults=LoopbackFaults(fail="the wire broke"))
    with joined(broken, max_load_retries=1) as (prefill, decode):
        serve(prefill, decode, num=2, wires=set(WIRES))
        assert num_finished(decode) == {"nixl": 2, "other": 0}
        assert decode.scheduler.stats().num_failed_loads == 2


@pytest.mark.parametrize("who_has_one", ["prefill", "decode"])
def test_an_engine_with_nixl_alone_works_with_one_that_has_more(who_has_one: str) -> None:
    """What NIXL alone hands over, NIXL alone can read."""
    several = MultiConnector({"none": NullConnector(), "nixl": nixl()})
    prefill_only, decode_only = (
        nixl() if who_has_one == side else several for side in ("prefill", "decode")
    )
    with (
        closing(WholeEngine(connector=prefill_only)) as prefill,
        closing(WholeEngine(connector=decode_only)) as decode,
    ):
        serve(prefill, decode, num=2, wires=None)


@pytest.mark.parametrize("order", [("host", "nixl"), ("nixl", "host")])
def test_what_came_over_the_wire_comes_back_from_host_memory(order: tuple[str, str]) -> None:
    """A prompt is read from the prefill engine once; evicted, it is had from this one's host."""
    host = OffloadConnector(OffloadConfig(host_bytes=1 << 20))
    connectors: dict[str, KVConnector] = {"host": host, "nixl": nixl()}
    connector = MultiConnector({name: connectors[name] for name in order})
    with closing(WholeEngine()) as prefill, closing(WholeEngine(connector=connector)) as decode:
        prompt = prompts(1, seed=7, shared=20)[0]
        decode.add("a", prompt, max_tokens=5, params=prefill.prefill("a", prompt))
        run_until(lambda: "a" in decode.ends, decode, prefill)
        for i, other in enumerate(prompts(6, seed=8, shared=0)):
            decode.add(f"other{i}", other * 3, max_tokens=1)
        run_until(lambda: len(decode.ends) == 7, decode)
        again = decode.add("again", prompt, max_tokens=9)
        run_until(lambda: "again" in decode.ends, decode)
        assert decode.tokens["again"] == decode.runner.solo_tokens(again)
        assert decode.ends["again"].num_external_tokens > 0
        assert num_finished(decode) == {"host": 1, "nixl": 1}
        run_until(lambda: prefill.num_free == decode.num_free == NUM_BLOCKS - 1, prefill, decode)


def with_null() -> KVConnector:
    return MultiConnector({"none": NullConnector(), "nixl": nixl()})


def with_host() -> KVConnector:
    host = OffloadConnector(OffloadConfig(host_bytes=1 << 20))
    return MultiConnector({"nixl": nixl(), "host": host})


def with_another() -> KVConnector:
    return MultiConnector({"nixl": nixl(), "other": nixl()})


def nixl_half(engine: WholeEngine) -> NixlSchedulerConnector:
    half = engine.connector
    half = half.half("nixl") if isinstance(half, MultiSchedulerConnector) else half
    assert isinstance(half, NixlSchedulerConnector)
    return half


@pytest.mark.parametrize("is_called_off", [False, True])
@pytest.mark.parametrize(
    ("for_prefill", "for_decode"),
    [
        (nixl, with_null),
        (with_null, nixl),
        (with_host, with_null),
        (with_null, with_host),
        (with_another, with_another),
    ],
)
def test_a_prompt_is_pushed_by_one_of_several_connectors(
    for_prefill: Callable[[], KVConnector],
    for_decode: Callable[[], KVConnector],
    is_called_off: bool,
) -> None:
    """Leave comes from NIXL's own half; what was sent is used, or not any more; all is idle."""
    limits = {"max_num_batched_tokens": 8, "max_num_seqs": 8}
    with (
        closing(WholeEngine(connector=for_prefill(), limits=limits)) as prefill,
        closing(WholeEngine(connector=for_decode())) as decode,
    ):
        prompt = prompts(1, seed=9, shared=30)[0]
        push_to = nixl_half(decode).expect_push(Request("any", prompt))
        if for_prefill is with_another:
            push_to = {"connectors": {"nixl": push_to}}
        params = {"do_remote_decode": True, "push_to": json.loads(json.dumps(push_to))}
        prefill.scheduler.pause()
        prefill.add("a", prompt, max_tokens=1, params=params)
        run_until(lambda: nixl_half(prefill).stats().pushes.num_started == 1, prefill)
        prefill.scheduler.resume()
        run_until(lambda: "a" in prefill.ends, prefill, decode)
        if is_called_off:
            run_until(lambda: nixl_half(prefill).stats().pushes.num_ended == 1, prefill, decode)
            nixl_half(decode).call_off_push(push_to.get("connectors", {}).get("nixl", push_to))
        ticket = prefill.ends["a"].kv_transfer_params
        request = decode.add("a", prompt, max_tokens=9, params=json.loads(json.dumps(ticket)))
        run_until(lambda: "a" in decode.ends, decode, prefill)
        assert decode.tokens["a"] == decode.runner.solo_tokens(request)
        stats = nixl_half(decode).stats()
        num_read = sum(transfer.num_blocks for transfer in stats.transfers)
        assert (stats.landings.num_used, num_read > 0) == (not is_called_off, is_called_off)
        assert decode.connector.stats().landings.num_used == stats.landings.num_used
        run_until(lambda: prefill.num_free == decode.num_free == NUM_BLOCKS - 1, prefill, decode)
        run_until(
            lambda: nixl_half(decode).stats().landings.num_free_slots == NUM_SLOTS, prefill, decode
        )
        assert not prefill.scheduler.has_requests()


@pytest.mark.parametrize(
    ("push_to", "reason"),
    [
        ({"connectors": {"nixl": {"expects_push": True}}}, "push_to are of version None"),
        ({"connectors": {"neither": {}}}, "push_to are for a connector 'neither'"),
        ({"connectors": []}, "missing or malformed"),
        ({"connectors": {"nixl": 5}}, "expected a mapping"),
    ],
)
def test_leave_for_one_of_several_that_is_none(push_to: Any, reason: str) -> None:
    """The request is refused, and no connector keeps anything of it."""
    with closing(WholeEngine(connector=with_another())) as prefill:
        with pytest.raises(InvalidTransferParams, match=reason):
            prefill.add(
                "a", [1, 2, 3], max_tokens=1, params={"do_remote_decode": True, "push_to": push_to}
            )
        assert not prefill.scheduler.has_requests()
