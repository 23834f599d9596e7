"""Whole engines of unequal block size, over real NIXL between processes, and their bad days."""

from __future__ import annotations

import time
from contextlib import closing

import pytest
from nixl_whole_engine import WholeEngine, prompts, run_until, until_read
from nixl_whole_process import WholeProcess, whole_process

from pdcore.request import FinishReason, Request, RequestStatus

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(240)]

MAX_TOKENS = 6
SMALL, LARGE = 4, 12
"""Block sizes of which one divides the other, but is no power of two of it."""


def engine(block_size: int, **settings: object) -> WholeEngine:
    """A decode engine with room for 1,200 tokens."""
    num_blocks = 1 + 1200 // block_size
    return WholeEngine(block_size=block_size, num_blocks=num_blocks, **settings)  # type: ignore[arg-type]


def load(decode: WholeEngine, peer: WholeProcess, name: str, prompt: list[int]) -> Request:
    """Have the peer compute a prompt, and give it to the decode engine."""
    params = peer.ask("prefill", name, prompt)
    return decode.add(name, prompt, max_tokens=MAX_TOKENS, params=params)


def assert_idle(decode: WholeEngine) -> None:
    run_until(lambda: not decode.scheduler.has_requests(), decode)
    assert decode.num_free == decode.num_blocks - 1


@pytest.mark.parametrize("max_staging_bytes", [1 << 20, 1])
@pytest.mark.parametrize(("there", "here"), [(SMALL, LARGE), (LARGE, SMALL)])
def test_tokens_are_those_of_a_solo_run(there: int, here: int, max_staging_bytes: int) -> None:
    """Shared prefixes, tails of every length, many at once, also through one staged block."""
    with (
        whole_process(block_size=there, num_blocks=200, lease_s=20) as peer,
        closing(engine(here, max_staging_bytes=max_staging_bytes)) as decode,
    ):
        requests = [
            load(decode, peer, f"r{i}", prompt)
            for i, prompt in enumerate(prompts(14, seed=here, shared=13))
        ]
        run_until(lambda: len(decode.ends) == len(requests), decode)
        for request in requests:
            assert decode.tokens[request.request_id] == decode.runner.solo_tokens(request)
        assert decode.scheduler.stats().num_failed_loads == 0
        assert sum(end.num_external_tokens for end in decode.ends.values()) > 100
        assert_idle(decode)
        run_until(lambda: peer.ask("num_free") == 199, decode)


def test_blocks_that_do_not_fit_are_refused_in_a_sentence_that_reaches_the_request() -> None:
    """Of four and six tokens neither divides the other."""
    prompt = prompts(1, seed=1, shared=30)[0]
    with (
        whole_process(block_size=4) as peer,
        closing(engine(6, limits={"on_load_failure": "fail"})) as decode,
    ):
        load(decode, peer, "a", prompt)
        run_until(lambda: "a" in decode.ends, decode)
        assert decode.ends["a"].finish_reason is FinishReason.ERROR
        assert "neither divides the other: 4 there, 6 here" in str(decode.ends["a"].cause)
        assert_idle(decode)


@pytest.mark.parametrize("abort", [False, True])
def test_a_hung_peer_costs_its_request_a_recompute_and_nobody_else(
    network: dict[str, str], abort: bool
) -> None:
    """Another load goes on; blocks are let go at once, as only staging slots are written to."""
    warm, stuck, other = (prompts(1, seed=seed, shared=300)[0] for seed in (1, 2, 3))
    limits = {"load_timeout_s": 1.5, "quarantine_timeout_s": 1.0}
    with (
        whole_process(network, block_size=LARGE, lease_s=60) as hung,
        whole_process(network, block_size=LARGE, lease_s=60) as healthy,
        closing(engine(SMALL, limits=limits, stall_timeout_s=60)) as decode,
    ):
        load(decode, hung, "warm", warm)
        run_until(lambda: "warm" in decode.ends, decode)
        params = hung.ask("prefill", "stuck", stuck)
        hung.stop()
        request = decode.add("stuck", stuck, max_tokens=MAX_TOKENS, params=params)
        until_read(decode, "stuck")
        if abort:
            decode.scheduler.abort_requests(["stuck"])
        began = time.monotonic()
        second = load(decode, healthy, "other", other)
        run_until(lambda: "other" in decode.ends, decode)
        assert decode.tokens["other"] == decode.runner.solo_tokens(second)
        assert decode.ends["other"].num_external_tokens == len(other) - 1
        run_until(lambda: "stuck" in decode.ends, decode)
        if abort:
            assert decode.ends["stuck"].finish_reason is FinishReason.ABORT
        else:
            assert decode.tokens["stuck"] == decode.runner.solo_tokens(request)
        assert_idle(decode)
        assert time.monotonic() - began < 15
        hung.go_on()
        third = load(decode, hung, "again", prompts(1, seed=4, shared=200)[0])
        run_until(lambda: "again" in decode.ends, decode)
        assert decode.tokens["again"] == decode.runner.solo_tokens(third)


def test_a_peer_killed_while_it_is_read_costs_a_recompute(network: dict[str, str]) -> None:
    """The request is loading when its peer dies."""
    warm, prompt = (prompts(1, seed=seed, shared=300)[0] for seed in (1, 2))
    with (
        whole_process(network, block_size=LARGE, lease_s=60) as peer,
        closing(engine(SMALL)) as decode,
    ):
        load(decode, peer, "warm", warm)
        run_until(lambda: "warm" in decode.ends, decode)
        params = peer.ask("prefill", "a", prompt)
        peer.stop()
        request = decode.add("a", prompt, max_tokens=MAX_TOKENS, params=params)
        until_read(decode, "a")
        peer.kill()
        assert decode.scheduler.status("a") is RequestStatus.WAITING_FOR_REMOTE_KVS
        run_until(lambda: "a" in decode.ends, decode)
        assert decode.tokens["a"] == decode.runner.solo_tokens(request)
        assert decode.scheduler.stats().num_failed_loads == 1
        assert_idle(decode)
