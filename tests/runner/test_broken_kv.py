"""NaN and inf in keys and values: found in the step that wrote them, so nobody shares them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from graph_emulation import MaskedBackend, RecordedGraphs
from runner_driver import RunnerDriver
from runner_pair import make_runner

from pdcore import KVCacheManager, Limits, LRUBlockPool, Request, SamplingParams, UnifiedScheduler
from pdcore.loop import step
from pdcore.runner.drawing import find_broken_kv
from pdcore.runner.executor import InProcessExecutor
from pdcore.runner.gpu import GPUModelRunner

BAD_TOKEN = 100
CAUSE = "the keys or values of its tokens hold NaN or inf"


def _broken_runner(model: Path, value: float, **settings: object) -> GPUModelRunner:
    """A runner whose embedding of one token is broken."""
    runner = make_runner(model, **settings)
    table = runner._model.embed_tokens.clone()
    table[BAD_TOKEN] = value
    runner._model.embed_tokens = table
    return runner


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_chunk_reports_what_it_wrote(tiny_llama: Path, value: float) -> None:
    """Whether it draws or not, in company of chunks and decodes that go on."""
    driver = RunnerDriver(_broken_runner(tiny_llama, value), num_blocks=64)
    driver.start(0, [3, 4, 5])
    driver.prefill(0)
    driver.start(1, [*range(8), BAD_TOKEN, *range(8)])
    driver.start(2, [7, BAD_TOKEN, 8])
    driver.start(3, list(range(12)))
    driver.start(4, list(range(20, 25)))
    assert {0, 4} == set(driver.step({2: 3, 0: 1, 1: 12, 3: 8, 4: 5}))
    assert driver.errors == {1: CAUSE, 2: CAUSE}
    assert driver.runner.logits.shape[0] == 2


@pytest.mark.parametrize("num_tokens", [1, 6])
def test_a_step_that_draws_nothing_reports_it_too(tiny_llama: Path, num_tokens: int) -> None:
    """A chunk of one token is none of the decodes that a graph runs."""
    graphs = RecordedGraphs()
    runner = _broken_runner(
        tiny_llama, torch.nan, attention_backend=MaskedBackend, graph_capture=graphs
    )
    driver = RunnerDriver(runner, num_blocks=64)
    driver.start(0, [BAD_TOKEN, *range(9)])
    driver.start(1, list(range(9)))
    assert driver.step({1: num_tokens, 0: num_tokens}) == {}
    assert driver.errors == {0: CAUSE}
    assert sum(graphs.num_replays) == 0


def test_a_prefix_is_not_poisoned(tiny_llama: Path) -> None:
    """One request's NaN token reaches nobody who shares the blocks before it."""
    limits = Limits(max_num_seqs=2, max_num_batched_tokens=20, max_model_len=48)
    shared = list(range(1, 17))

    def outputs(*prompts: list[int]) -> dict[str, list[int]]:
        executor = InProcessExecutor(
            lambda: _broken_runner(tiny_llama, torch.nan, limits=limits), num_blocks=64
        )
        executor.start()
        try:
            scheduler = UnifiedScheduler(KVCacheManager(LRUBlockPool(64, 4)), limits=limits)
            tokens: dict[str, list[int]] = {str(prompt[-1]): [] for prompt in prompts}
            for prompt in prompts:
                sampling = SamplingParams(max_tokens=3, temperature=0)
                scheduler.add_request(Request(str(prompt[-1]), prompt, sampling=sampling))
                for output in step(scheduler, executor).outputs:
                    tokens[output.request_id] += output.new_token_ids
            while scheduler.has_requests():
                for output in step(scheduler, executor).outputs:
                    tokens[output.request_id] += output.new_token_ids
            scheduler.check()
        finally:
            executor.close()
        return tokens

    bad = [*shared, BAD_TOKEN, *range(30, 50)]
    found = outputs(bad, [*shared, 70], [*shared, 71])
    assert found.pop("49") == []
    assert found == outputs([*shared, 70], [*shared, 71])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_numbers_are_not_broken(dtype: torch.dtype) -> None:
    """The largest finite numbers are good, however many; one NaN or inf is found anywhere."""
    key_value = torch.full((5, 2, 2, 8), torch.finfo(dtype).max, dtype=dtype)
    key_value[1, 0, 1, 3] = torch.nan
    key_value[2, 1, 0, 7] = torch.inf
    key_value[4, 0, 0, 0] = -torch.inf
    assert find_broken_kv(key_value).tolist() == [False, True, True, False, True]
