"""Steps in flight on a real model: the runner feeds its own last tokens, so nothing changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graph_emulation import MaskedBackend, RecordedGraphs

from pdcore import KVCacheManager, Limits, LRUBlockPool, Request, SamplingParams, UnifiedScheduler
from pdcore.loop import BatchQueue
from pdcore.runner.executor import InProcessExecutor
from pdcore.runner.gpu import GPUModelRunner

LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=24, max_model_len=96)
BLOCK_SIZE = 4


def _requests() -> list[Request]:
    """Seven prompts of different lengths, two of which begin alike, greedy and at random."""
    source = np.random.default_rng(11)
    prompts = [source.integers(0, 128, length) for length in (3, 30, 17, 8, 41)]
    prompts += [prompts[1][:20], np.concatenate((prompts[1][:16], prompts[3]))]
    return [
        Request(
            f"request-{index}",
            prompt.tolist(),
            sampling=SamplingParams(
                max_tokens=6 + 5 * index, temperature=0.7 * (index % 2), seed=index, ignore_eos=True
            ),
        )
        for index, prompt in enumerate(prompts)
    ]


def _run(
    model: Path, depth: int, num_blocks: int, **settings: Any
) -> tuple[dict[str, list[int]], int, int]:
    """All tokens by request, how many preemptions, and the most plans that were under way."""
    executor = InProcessExecutor(
        lambda: GPUModelRunner(
            model,
            limits=LIMITS,
            device="cpu",
            block_size=BLOCK_SIZE,
            num_threads=1,
            seed=0,
            **settings,
        ),
        num_blocks=num_blocks,
    )
    executor.start()
    try:
        manager = KVCacheManager(LRUBlockPool(num_blocks, BLOCK_SIZE))
        scheduler = UnifiedScheduler(manager, limits=LIMITS)
        loop = BatchQueue(scheduler, executor, depth=depth)
        tokens: dict[str, list[int]] = {}
        num_preemptions = deepest = 0
        for request in _requests():
            scheduler.add_request(request)
            tokens[request.request_id] = []
        while scheduler.has_requests():
            for output in loop.step().outputs:
                tokens[output.request_id].extend(output.new_token_ids)
                num_preemptions += output.num_preemptions
            deepest = max(deepest, len(loop))
        scheduler.check()
    finally:
        executor.close()
    return tokens, num_preemptions, deepest


@pytest.mark.parametrize("num_blocks", [200, 32])
def test_tokens_do_not_depend_on_the_steps_in_flight(tiny_llama: Path, num_blocks: int) -> None:
    """With two and three steps in flight, preemptions included, tokens are those of one."""
    expected, num_preemptions, _ = _run(tiny_llama, 1, num_blocks)
    assert (num_preemptions > 0) == (num_blocks == 32)
    assert [6 + 5 * index for index in range(7)] == [len(tokens) for tokens in expected.values()]
    for depth in (2, 3):
        tokens, _, deepest = _run(tiny_llama, depth, num_blocks)
        assert deepest == depth - 1  # what is left under way when a step returns
        assert expected == tokens


def test_decode_graphs_change_no_token(tiny_llama: Path) -> None:
    """With steps in flight, preemptions and graphs, tokens are those of one step without."""
    expected, num_preemptions, _ = _run(tiny_llama, 1, 32)
    assert num_preemptions > 0
    for depth in (1, 2):
        graphs = RecordedGraphs()
        settings = {"attention_backend": MaskedBackend, "graph_capture": graphs}
        tokens, _, _ = _run(tiny_llama, depth, 32, **settings)
        assert sum(graphs.num_replays) > 40
        assert expected == tokens
