"""Two whole engines without a model: scheduler, pool, runner and real NIXL between them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing

import pytest
from nixl_whole_engine import NUM_BLOCKS, WholeEngine, prompts, run_until

from pdcore.request import FinishReason

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def prefill() -> Iterator[WholeEngine]:
    """A prefill engine."""
    with closing(WholeEngine(lease_s=5)) as engine:
        yield engine


@pytest.fixture
def decode() -> Iterator[WholeEngine]:
    """A decode engine."""
    with closing(WholeEngine()) as engine:
        yield engine


def test_tokens_are_those_of_a_solo_run(prefill: WholeEngine, decode: WholeEngine) -> None:
    """Prompts computed there and continued here give what one engine gives, and pools drain."""
    requests = []
    for i, prompt in enumerate(prompts(6, seed=1, shared=9)):
        params = prefill.prefill(f"a{i}", prompt, decode)
        requests.append(decode.add(f"a{i}", prompt, max_tokens=12, params=params))
    run_until(lambda: len(decode.ends) == 6, decode, prefill)
    for request in requests:
        assert decode.tokens[request.request_id] == decode.runner.solo_tokens(request)
    run_until(lambda: prefill.num_free == decode.num_free == NUM_BLOCKS - 1, prefill, decode)
    assert sum(end.num_external_tokens for end in decode.ends.values()) > 100
    assert not decode.scheduler.has_requests()
    assert not prefill.scheduler.has_requests()


def test_others_decode_while_one_waits(prefill: WholeEngine, decode: WholeEngine) -> None:
    """A request that waits for remote KV holds nobody up: another decodes ten tokens meanwhile."""
    prompt = prompts(1, seed=2)[0]
    local = decode.add("local", prompts(1, seed=3)[0], max_tokens=60)
    params = prefill.prefill("b", prompt)
    remote = decode.add("remote", prompt, max_tokens=5, params=params)
    run_until(lambda: decode.scheduler.explain("remote").waits_on is not None, decode)
    before = len(decode.tokens["local"])
    while not decode.tokens["remote"]:
        decode.step()
    assert len(decode.tokens["local"]) >= before + 10
    run_until(lambda: len(decode.ends) == 2, decode, prefill)
    for request in (local, remote):
        assert decode.tokens[request.request_id] == decode.runner.solo_tokens(request)


def test_c12_a_prompt_that_is_here_already(prefill: WholeEngine, decode: WholeEngine) -> None:
    """The same prompt again needs no transfer, and the prefill engine is free at once."""
    prompt = list(range(100, 133))
    for name in ("c1", "c2"):
        params = prefill.prefill(name, prompt)
        decode.add(name, prompt, max_tokens=2, params=params)
        run_until(lambda name=name: name in decode.ends, decode, prefill)
    assert decode.ends["c1"].num_external_tokens == 32
    assert decode.ends["c2"].num_external_tokens == 0
    assert decode.ends["c2"].num_cached_tokens == 32
    assert len(decode.scheduler.stats().connector.transfers) == 1
    run_until(lambda: prefill.num_free == NUM_BLOCKS - 1, prefill, limit_s=3)


def test_a_dead_prefill_engine_costs_a_recompute(decode: WholeEngine) -> None:
    """When the prefill engine is gone, the answer is the same, computed here."""
    prompt = prompts(1, seed=4)[0]
    with closing(WholeEngine()) as doomed:
        params = doomed.prefill("d", prompt)
    request = decode.add("d", prompt, max_tokens=6, params=params)
    run_until(lambda: "d" in decode.ends, decode)
    assert decode.tokens["d"] == decode.runner.solo_tokens(request)
    assert decode.scheduler.stats().num_failed_loads == 1


def test_a_dead_prefill_engine_can_end_the_request() -> None:
    """With the policy "fail" the request ends with an error that says why."""
    prompt = prompts(1, seed=5)[0]
    with closing(WholeEngine()) as doomed:
        params = doomed.prefill("e", prompt)
    with closing(WholeEngine(limits={"on_load_failure": "fail"})) as strict:
        strict.add("e", prompt, max_tokens=6, params=params)
        run_until(lambda: "e" in strict.ends, strict)
        assert strict.ends["e"].finish_reason is FinishReason.ERROR
        assert "cannot be reached" in (strict.ends["e"].cause or "")


def test_c33_a_cancel_storm(prefill: WholeEngine, decode: WholeEngine) -> None:
    """Requests aborted at random phases leave both pools as they were, and a probe completes."""
    rng = random.Random(6)
    for i, prompt in enumerate(prompts(24, seed=7, shared=5)):
        params = prefill.prefill(f"f{i}", prompt, decode)
        decode.add(f"f{i}", prompt, max_tokens=8, params=params)
        for _ in range(rng.randrange(4)):
            decode.step()
        if rng.random() < 0.8:
            decode.scheduler.abort_requests([f"f{rng.randrange(i + 1)}"])
    decode.scheduler.abort_requests([f"f{i}" for i in range(24)])
    run_until(lambda: not decode.scheduler.has_requests(), decode, prefill)
    run_until(lambda: not prefill.scheduler.has_requests(), decode, prefill)
    assert decode.num_free == prefill.num_free == NUM_BLOCKS - 1
    assert len(decode.ends) == 24
    prompt = prompts(1, seed=8)[0]
    probe = decode.add("probe", prompt, max_tokens=8, params=prefill.prefill("probe", prompt))
    run_until(lambda: "probe" in decode.ends, decode, prefill)
    assert decode.tokens["probe"] == decode.runner.solo_tokens(probe)
    assert decode.ends["probe"].num_external_tokens == len(prompt) - 1
