"""A whole engine on the real model: its greedy tokens are those of transformers' generate()."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from pdcore import (
    KVCacheManager,
    Limits,
    LRUBlockPool,
    MonotonicClock,
    Request,
    RequestOutput,
    SamplingParams,
    UnifiedScheduler,
)
from pdcore.connector.base import SchedulerConnector
from pdcore.connector.nixl import NixlConfig, NixlConnector
from pdcore.loop import Waker, step, wait
from pdcore.runner.executor import InProcessExecutor
from pdcore.runner.gpu import GPUModelRunner

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.model

NUM_PROMPTS, NUM_TOKENS = 20, 64
BLOCK_SIZE, NUM_BLOCKS, TINY_POOL = 16, 512, 100
LIMITS = Limits(max_num_seqs=20, max_num_batched_tokens=512, max_model_len=256)


@attrs.define
class Engine:
    """A scheduler and an executor, and what the requests came to."""

    scheduler: UnifiedScheduler
    executor: InProcessExecutor
    waker: Waker
    tokens: dict[str, list[int]] = attrs.field(factory=dict)
    finished: dict[str, RequestOutput] = attrs.field(factory=dict)

    def add(self, request_id: str, prompt: list[int], *, max_tokens: int, **kwargs: Any) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0)
        request = Request(request_id, prompt, sampling=sampling, **kwargs)
        self.tokens[request_id] = []
        self.scheduler.add_request(request)

    def step(self) -> list[RequestOutput]:
        """Run a step when there is one; return the requests that ended."""
        ended = []
        for output in step(self.scheduler, self.executor).outputs:
            self.tokens[output.request_id].extend(output.new_token_ids)
            if output.finish_reason is not None:
                self.finished[output.request_id] = output
                ended.append(output)
        return ended

    def run(self) -> None:
        while self.scheduler.has_requests():
            wait(self.scheduler, self.waker, clock=self.scheduler.clock)
            self.step()
        self.scheduler.check()


def make_engine(
    executor: InProcessExecutor,
    *,
    limits: Limits = LIMITS,
    num_blocks: int = NUM_BLOCKS,
    connector: Any = None,
    waker: Waker | None = None,
) -> Engine:
    manager = KVCacheManager(LRUBlockPool(num_blocks, BLOCK_SIZE))
    scheduler = UnifiedScheduler(manager, limits=limits, connector=connector)
    return Engine(scheduler=scheduler, executor=executor, waker=waker or Waker())


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Of 3 to 155 tokens; every third begins with the same 70 tokens."""
    rng = np.random.default_rng(7)
    shared = rng.integers(100, 40_000, 70).tolist()
    made = [rng.integers(100, 40_000, 3 + 8 * i).tolist() for i in range(NUM_PROMPTS)]
    return [shared + prompt[:40] if i % 3 == 0 else prompt for i, prompt in enumerate(made)]


@pytest.fixture(scope="module")
def oracle(smollm2_hf: Any, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers generates greedily for each prompt, in float32."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    smollm2_hf.generation_config.eos_token_id = None
    with torch.inference_mode():
        generated = smollm2_hf.generate(
            ids, attention_mask=mask, max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0
        )
    return generated[:, longest:].tolist()


def start_executor(path: Path, *, connector: Any = None) -> InProcessExecutor:
    executor = InProcessExecutor(
        lambda: GPUModelRunner(
            path, limits=LIMITS, device="cpu", block_size=BLOCK_SIZE, connector=connector
        ),
        num_blocks=NUM_BLOCKS,
    )
    executor.start()
    return executor


@pytest.fixture(scope="module")
def executor(smollm2_path: Path) -> Iterator[InProcessExecutor]:
    executor = start_executor(smollm2_path)
    yield executor
    executor.close()


def check(engine: Engine, oracle: list[list[int]]) -> None:
    assert [engine.tokens[f"r{i}"] for i in range(NUM_PROMPTS)] == oracle


@pytest.mark.parametrize(
    ("limits", "num_blocks"),
    [
        pytest.param(LIMITS, NUM_BLOCKS, id="whole prompts"),
        pytest.param(
            attrs.evolve(LIMITS, max_num_batched_tokens=32), NUM_BLOCKS, id="chunks of 32"
        ),
        pytest.param(LIMITS, TINY_POOL, id="a tiny pool"),
    ],
)
def test_greedy_tokens_are_those_of_transformers(
    executor: InProcessExecutor,
    prompts: list[list[int]],
    oracle: list[list[int]],
    limits: Limits,
    num_blocks: int,
) -> None:
    """20 prompts give the same 64 tokens, however they are chunked, shared and preempted."""
    engine = make_engine(executor, limits=limits, num_blocks=num_blocks)
    for index, prompt in enumerate(prompts):
        engine.add(f"r{index}", prompt, max_tokens=NUM_TOKENS)
    engine.run()
    check(engine, oracle)
    stats = engine.scheduler.stats()
    assert (stats.num_preemptions > 0) == (num_blocks == TINY_POOL)
    assert stats.num_prefix_hit_tokens >= 64


def test_a_second_round_from_the_prefix_cache_gives_the_same_tokens(
    executor: InProcessExecutor, prompts: list[list[int]], oracle: list[list[int]]
) -> None:
    """What was computed for one request is right for the next with the same prompt."""
    engine = make_engine(executor)
    for name in ("first", "second"):
        for index, prompt in enumerate(prompts):
            engine.add(f"{name}{index}", prompt, max_tokens=16 if name == "second" else 1)
        engine.run()
    tokens = [engine.tokens[f"second{index}"] for index in range(NUM_PROMPTS)]
    assert tokens == [expected[:16] for expected in oracle]
    for index, prompt in enumerate(prompts):
        cached = engine.finished[f"second{index}"].num_cached_tokens
        assert cached == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE


def start_pd_engine(path: Path, name: str, waker: Waker) -> tuple[Engine, SchedulerConnector]:
    connector = NixlConnector(NixlConfig(block_size=BLOCK_SIZE, engine_id=name))
    worker_side = connector.worker_side()
    executor = start_executor(path, connector=worker_side)
    scheduler_side = connector.scheduler_side()
    scheduler_side.start(clock=MonotonicClock(), notify=waker)
    scheduler_side.set_xfer_handshake_metadata([worker_side.get_handshake_metadata()])
    return make_engine(executor, connector=scheduler_side, waker=waker), scheduler_side


@pytest.mark.nixl
def test_prefill_on_one_engine_and_decode_on_another_gives_the_same_tokens(
    smollm2_path: Path, prompts: list[list[int]], oracle: list[list[int]]
) -> None:
    """KV that was moved between engines is as good as KV that was computed."""
    waker = Waker()
    prefill, prefill_side = start_pd_engine(smollm2_path, "prefill", waker)
    decode, decode_side = start_pd_engine(smollm2_path, "decode", waker)
    try:
        for index, prompt in enumerate(prompts):
            params = {"do_remote_decode": True}
            prefill.add(f"r{index}", prompt, max_tokens=1, kv_transfer_params=params)
        while len(decode.finished) < NUM_PROMPTS:
            for output in prefill.step():
                decode.add(
                    output.request_id,
                    prompts[int(output.request_id[1:])],
                    max_tokens=NUM_TOKENS,
                    kv_transfer_params=output.kv_transfer_params,
                )
            decode.step()
            if not (prefill.scheduler.has_work() or decode.scheduler.has_work()):
                waker.wait(0.01)
        check(decode, oracle)
        stats = decode.scheduler.stats()
        assert stats.num_failed_loads == 0
        num_prompt_tokens = sum(len(prompt) - 1 for prompt in prompts)
        assert stats.num_external_tokens + stats.num_prefix_hit_tokens >= num_prompt_tokens
    finally:
        for side in (decode_side, prefill_side):
            side.close()
        for engine in (decode, prefill):
            engine.executor.close()
