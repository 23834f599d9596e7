"""Faults that users met with peers that hang, die, restart or come late, on real processes.

The decode engine runs here, over real NIXL; a peer is a process that is stopped and killed. Every
block that is read is checked, and tokens must be those of a solo run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from nixl_whole_engine import BLOCK_SIZE, NUM_BLOCKS, WholeEngine, run_until, until_read
from nixl_whole_process import whole_process

from pdcore.errors import DuplicateRequest, InvalidRequest
from pdcore.request import FinishReason, Request, RequestStatus, SamplingParams
from pdcore.scheduler import SkipCode

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(240)]

LOADING = RequestStatus.WAITING_FOR_REMOTE_KVS
NUM_USABLE_BLOCKS = NUM_BLOCKS - 1


@pytest.fixture
def prefill() -> Iterator[WholeEngine]:
    """A prefill engine in this process, for what needs no process of its own."""
    with closing(WholeEngine(lease_s=60)) as engine:
        yield engine


def prompt_of(num_blocks: int, *, start: int) -> list[int]:
    """A prompt of full blocks, and one token more; prompts with other starts share nothing."""
    return list(range(start, start + num_blocks * BLOCK_SIZE + 1))


def add(engine: WholeEngine, name: str, prompt: list[int], params: object = None) -> None:
    engine.add(name, prompt, max_tokens=6, params=params)  # type: ignore[arg-type]


def assert_as_if_alone(engine: WholeEngine, *names_and_prompts: tuple[str, list[int]]) -> None:
    for name, prompt in names_and_prompts:
        request = Request(name, prompt, sampling=SamplingParams(max_tokens=6))
        assert engine.tokens[name] == engine.runner.solo_tokens(request)
        assert engine.ends[name].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    "limits",
    [
        {"quarantine_timeout_s": 1.5, "max_quarantined_share": 1.0},
        {"quarantine_timeout_s": 60.0, "max_quarantined_share": 0.5},
    ],
    ids=["after its time", "too many blocks"],
)
def test_c2_c3_blocks_of_a_read_from_a_hung_peer_are_given_out_only_after_the_cut(
    network: dict[str, str], limits: dict[str, float]
) -> None:
    """A is aborted while P hangs: B waits for A's blocks until P is cut off, and stays clean."""
    a, b, warm = prompt_of(40, start=1000), prompt_of(30, start=3000), prompt_of(2, start=10)
    with (
        whole_process(network, lease_s=60) as peer,
        closing(WholeEngine(limits=limits, stall_timeout_s=60)) as decode,
    ):
        add(decode, "warm", warm, peer.ask("prefill", "warm", warm))
        run_until(lambda: "warm" in decode.ends, decode)
        params = peer.ask("prefill", "a", a)
        peer.stop()
        add(decode, "a", a, params)
        until_read(decode, "a")
        decode.scheduler.abort_requests(["a"])
        add(decode, "b", b)
        began = time.monotonic()
        while decode.scheduler.stats().num_quarantined_blocks:
            assert decode.scheduler.status("b") is RequestStatus.WAITING
            assert time.monotonic() - began < 15
            decode.step()
            time.sleep(0.01)
        if limits["max_quarantined_share"] == 1.0:
            assert time.monotonic() - began >= 1.5
        assert decode.scheduler.stats().num_cut_off_loads == 1
        # P comes back to life and would finish what it was asked for.
        peer.go_on()
        run_until(lambda: "b" in decode.ends, decode)
        assert decode.ends["a"].finish_reason is FinishReason.ABORT
        assert_as_if_alone(decode, ("warm", warm), ("b", b))
        run_until(lambda: not decode.scheduler.has_requests(), decode)
        assert decode.num_free == NUM_USABLE_BLOCKS
        run_until(lambda: peer.ask("num_free") == NUM_USABLE_BLOCKS, decode)


@pytest.mark.parametrize("on_load_failure", ["recompute", "fail"])
def test_c1_a_hung_peer_costs_the_load_timeout_and_no_more(
    network: dict[str, str], on_load_failure: str
) -> None:
    """P never answers again: the request goes on or fails by its deadline, others run on."""
    a, other = prompt_of(10, start=1000), prompt_of(2, start=3000)
    limits = {
        "load_timeout_s": 3.0,
        "quarantine_timeout_s": 1.0,
        "on_load_failure": on_load_failure,
    }
    with (
        whole_process(network, lease_s=60) as peer,
        closing(WholeEngine(limits=limits, stall_timeout_s=60)) as decode,
    ):
        params = peer.ask("prefill", "a", a)
        add(decode, "first", other, peer.ask("prefill", "first", other))
        run_until(lambda: "first" in decode.ends, decode)
        peer.stop()
        add(decode, "a", a, params)
        add(decode, "other", other)
        began = time.monotonic()
        run_until(lambda: "other" in decode.ends, decode)
        assert decode.scheduler.status("a") is LOADING
        run_until(lambda: "a" in decode.ends, decode)
        assert 2.9 <= time.monotonic() - began < 30.0  # the peer is cut off after 60
        assert_as_if_alone(decode, ("other", other), ("first", other))
        if on_load_failure == "recompute":
            assert_as_if_alone(decode, ("a", a))
        else:
            assert decode.ends["a"].finish_reason is FinishReason.ERROR
            assert "no completion within 3 s" in str(decode.ends["a"].cause)
        run_until(lambda: not decode.scheduler.has_requests(), decode)
        assert decode.num_free == NUM_USABLE_BLOCKS


def test_c9_a_decode_engine_that_hangs_through_its_lease_computes_instead() -> None:
    """Its blocks at P hold another prompt when it wakes; it finds out, and its tokens are right."""
    a, other = prompt_of(30, start=1000), prompt_of(60, start=3000)
    with (
        closing(WholeEngine(lease_s=1.0)) as prefill,
        whole_process() as decode,
    ):
        params = prefill.prefill("a", a)
        # It stays in the queue, so that only its lease is at stake.
        decode.ask("pause")
        decode.ask("add", "a", a, 6, params)
        decode.stop()
        run_until(lambda: not prefill.scheduler.has_requests(), prefill, limit_s=10)
        add(prefill, "other", other)
        run_until(lambda: "other" in prefill.ends, prefill)
        decode.go_on()
        decode.ask("resume")
        run_until(lambda: decode.ask("end", "a") is not None, prefill)
        tokens, end = decode.ask("end", "a")
        request = Request("a", a, sampling=SamplingParams(max_tokens=6))
        assert tokens == prefill.runner.solo_tokens(request)
        assert end.num_external_tokens == 0
        assert prefill.scheduler.stats().connector.tickets.num_expired == 1


@pytest.mark.parametrize("error", [DuplicateRequest, InvalidRequest])
def test_c10_a_refused_request_frees_its_blocks_at_the_peer(
    prefill: WholeEngine, error: type[Exception]
) -> None:
    """D says no when the request is added; P hears of it long before the lease ends."""
    prompt = prompt_of(10, start=1000)
    limits = {"max_model_len": 30} if error is InvalidRequest else {}
    with closing(WholeEngine(limits=limits)) as decode:
        params = prefill.prefill("a", prompt)
        if error is DuplicateRequest:
            add(decode, "a", prompt_of(2, start=10))
        with pytest.raises(error):
            add(decode, "a", prompt, params)
        run_until(lambda: prefill.num_free == NUM_USABLE_BLOCKS, prefill, limit_s=5)


def test_c10_a_second_copy_of_a_request_takes_nothing_from_the_first(
    prefill: WholeEngine,
) -> None:
    """The copy is refused as a duplicate; the first one still loads with the ticket of both."""
    prompt = prompt_of(10, start=1000)
    with closing(WholeEngine()) as decode:
        params = prefill.prefill("a", prompt)
        add(decode, "a", prompt, params)
        with pytest.raises(DuplicateRequest):
            add(decode, "a", prompt, params)
        decode.tokens["a"] = []
        run_until(lambda: "a" in decode.ends, decode, prefill)
        assert decode.ends["a"].num_external_tokens == len(prompt) - 1
        assert_as_if_alone(decode, ("a", prompt))


def test_c20_a_peer_that_hangs_at_the_handshake_locks_nobody_out(prefill: WholeEngine) -> None:
    """Other peers are served at once, its own requests are computed, and later it serves anew."""
    first, silent, good, anew = (prompt_of(8, start=start) for start in (1, 1000, 3000, 5000))
    with (
        whole_process(lease_s=60) as peer,
        closing(WholeEngine(request_timeout_s=4.0)) as decode,
    ):
        # What takes long on a busy machine is to get to know somebody; that is done here.
        add(decode, "first", first, prefill.prefill("first", first, decode))
        run_until(lambda: "first" in decode.ends, decode, prefill)
        params = peer.ask("prefill", "silent", silent)
        peer.stop()
        add(decode, "silent", silent, params)
        decode.step()
        add(decode, "good", good, prefill.prefill("good", good, decode))
        run_until(lambda: "good" in decode.ends, decode, prefill)
        assert decode.ends["good"].num_external_tokens == len(good) - 1
        assert decode.scheduler.status("silent") is LOADING
        run_until(lambda: "silent" in decode.ends, decode, prefill)
        peer.go_on()
        add(decode, "anew", anew, peer.ask("prefill", "anew", anew))
        run_until(lambda: "anew" in decode.ends, decode, prefill)
        assert decode.ends["anew"].num_external_tokens == len(anew) - 1
        assert_as_if_alone(decode, ("silent", silent), ("good", good), ("anew", anew))


def test_c21_a_peer_restarts_at_its_address_with_loads_in_flight_and_queued(
    network: dict[str, str],
) -> None:
    """Both loads of its former life fail, its new life serves, and the decode engine lives on."""
    prompts = {name: prompt_of(8, start=1000 * place) for place, name in enumerate("wfqn", 1)}
    limits = {"max_num_parked": 1}
    with closing(WholeEngine(limits=limits, stall_timeout_s=60, request_timeout_s=2.0)) as decode:
        with whole_process(network, engine_id="p", lease_s=60) as first:
            port = first.address[1]
            tickets = {name: first.ask("prefill", name, prompts[name]) for name in "wfq"}
            add(decode, "w", prompts["w"], tickets["w"])
            run_until(lambda: "w" in decode.ends, decode)
            first.stop()
            for name in "fq":
                add(decode, name, prompts[name], tickets[name])
            until_read(decode, "f")
            assert decode.scheduler.explain("q").code is SkipCode.TOO_MANY_PARKED
            first.kill()
        with whole_process(network, engine_id="p", port=port, lease_s=60) as second:
            run_until(lambda: {"f", "q"} <= decode.ends.keys(), decode)
            add(decode, "n", prompts["n"], second.ask("prefill", "n", prompts["n"]))
            run_until(lambda: "n" in decode.ends, decode)
            run_until(lambda: second.ask("num_free") == NUM_USABLE_BLOCKS, decode)
        assert [decode.ends[name].num_external_tokens for name in "wfqn"] == [32, 0, 0, 32]
        assert_as_if_alone(decode, *prompts.items())
        run_until(lambda: not decode.scheduler.has_requests(), decode)
        assert decode.num_free == NUM_USABLE_BLOCKS
