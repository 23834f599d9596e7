"""Two whole engines without a model: scheduler, pool, runner and real NIXL between them.

The runner checks every slot that it reads, so a block of the wrong prompt, position or age is an
error, and tokens must be those of a solo run.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from pdcore.clock import MonotonicClock
from pdcore.connector import KVConnector
from pdcore.connector.nixl import NixlConfig, NixlConnector
from pdcore.kvcache import KVCacheManager, LRUBlockPool
from pdcore.loop import Waker, step, wait
from pdcore.messages import RequestOutput
from pdcore.request import FinishReason, Request, SamplingParams
from pdcore.runner.executor import InProcessExecutor
from pdcore.scheduler import Limits, UnifiedScheduler
from pdcore.testing import FakeKVRunner

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(60)]

BLOCK_SIZE = 4
NUM_BLOCKS = 65


class WholeEngine:
    """Scheduler, pool, runner and connector of one engine, and the loop round them."""

    def __init__(
        self,
        *,
        limits: dict[str, Any] | None = None,
        block_size: int = BLOCK_SIZE,
        num_blocks: int = NUM_BLOCKS,
        connector: KVConnector | None = None,
        **config: Any,
    ) -> None:
        self.block_size, self.num_blocks = block_size, num_blocks
        connector = connector or NixlConnector(NixlConfig(block_size=block_size, **config))
        self.worker = connector.worker_side()
        self.executor = InProcessExecutor(self._make_runner, num_blocks=num_blocks)
        self.executor.start()
        self.connector = connector.scheduler_side()
        self.waker, self.clock = Waker(), MonotonicClock()
        self.connector.start(clock=self.clock, notify=self.waker)
        self.connector.set_xfer_handshake_metadata([self.worker.get_handshake_metadata()])
        self.pool = LRUBlockPool(num_blocks, block_size)
        spec = self.runner.get_kv_cache_spec()
        self.scheduler = UnifiedScheduler(
            KVCacheManager(self.pool, groups=(spec,)),
            limits=Limits(**{"max_num_batched_tokens": 64, "max_num_seqs": 8} | (limits or {})),
            connector=self.connector,
            clock=self.clock,
        )
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, RequestOutput] = {}

    def _make_runner(self) -> FakeKVRunner:
        self.runner = FakeKVRunner(
            block_size=self.block_size, num_blocks=self.num_blocks, connector=self.worker
        )
        return self.runner

    def add(
        self,
        name: str,
        prompt: list[int],
        *,
        max_tokens: int,
        params: dict[str, Any] | None = None,
    ) -> Request:
        request = Request(
            name,
            prompt,
            sampling=SamplingParams(max_tokens=max_tokens),
            kv_transfer_params=params,
        )
        self.scheduler.add_request(request)
        self.tokens[name] = []
        return request

    def step(self) -> None:
        """One turn of the loop, and an audit."""
        result = step(self.scheduler, self.executor)
        self.scheduler.check()
        for output in result.outputs:
            self.tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                assert output.request_id not in self.ends
                self.ends[output.request_id] = output

    def prefill(self, name: str, prompt: list[int], *beside: WholeEngine) -> dict[str, Any]:
        """Compute a prompt and hand it over, while the engines ``beside`` it go on."""
        self.add(name, prompt, max_tokens=1, params={"do_remote_decode": True})
        run_until(lambda: name in self.ends, self, *beside)
        params = self.ends[name].kv_transfer_params
        assert params is not None
        return params

    @property
    def num_free(self) -> int:
        return self.pool.num_free_blocks

    def close(self) -> None:
        self.executor.close()
        self.worker.close()
        self.connector.close()


def run_until(condition: Callable[[], bool], *engines: WholeEngine, limit_s: float = 20.0) -> None:
    """Step engines in turn, asleep when there is nothing to do, until a condition holds."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, [engine.scheduler.stats() for engine in engines]
        for engine in engines:
            wait(engine.scheduler, engine.waker, clock=engine.clock, max_wait_s=0.002)
            engine.step()


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


def prompts(num: int, *, seed: int, shared: int = 0) -> list[list[int]]:
    """Random prompts of 5 to 40 tokens after a shared beginning."""
    rng = random.Random(seed)
    start = [rng.randrange(10, 1000) for _ in range(shared)]
    return [
        start + [rng.randrange(10, 1000) for _ in range(rng.randrange(5, 40))] for _ in range(num)
    ]


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
    assert len(decode.worker.take_transfer_stats()) == 1
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
