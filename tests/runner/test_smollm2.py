"""The real model against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from runner_driver import RunnerDriver

from pdcore.runner.gpu import GPUModelRunner

pytestmark = pytest.mark.model

NUM_NEW_TOKENS = 10
TOLERANCE = 1e-3


def _prompt(length: int, *, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 40_000, length).tolist()


PROMPTS = [_prompt(length, seed=length) for length in (1, 16, 33, 70)]


@pytest.fixture
def driver(smollm2_runner: GPUModelRunner) -> Iterator[RunnerDriver]:
    driver = RunnerDriver(smollm2_runner)
    yield driver
    for row in list(driver.rows):
        driver.finish(row)
    driver.step({})


@pytest.fixture(scope="module")
def expected(smollm2_hf: Any) -> list[list[int]]:
    return [_generate(smollm2_hf, prompt) for prompt in PROMPTS]


def _generate(model: Any, prompt: list[int]) -> list[int]:
    with torch.inference_mode():
        ids = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NUM_NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return ids[0, len(prompt) :].tolist()


def _logits(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0]


def test_logits_and_greedy_tokens_are_those_of_transformers(
    driver: RunnerDriver, smollm2_hf: Any, expected: list[list[int]]
) -> None:
    """Whole prompts, then decodes in one batch: logits within 1e-3, tokens equal."""
    for row, prompt in enumerate(PROMPTS):
        driver.start(row, prompt)
    driver.step({row: len(prompt) for row, prompt in enumerate(PROMPTS)})
    for row, prompt in enumerate(PROMPTS):
        difference = driver.runner.logits[row] - _logits(smollm2_hf, prompt)[-1]
        assert difference.abs().max() < TOLERANCE
    driver.decode(NUM_NEW_TOKENS - 1)
    assert expected == [driver.output(row) for row in range(len(PROMPTS))]


def test_decode_logits_are_those_of_transformers(driver: RunnerDriver, smollm2_hf: Any) -> None:
    """The logits of decodes, batched at unequal lengths, stay within 1e-3."""
    for row, prompt in enumerate(PROMPTS[1:]):
        driver.start(row, prompt)
        driver.prefill(row)
    for _ in range(4):
        driver.decode(1)
    for row, prompt in enumerate(PROMPTS[1:]):
        known = prompt + driver.output(row)[:-1]
        difference = driver.runner.logits[row] - _logits(smollm2_hf, known)[-1]
        assert difference.abs().max() < TOLERANCE


def test_chunks_of_32_mixed_with_decodes_change_nothing(
    driver: RunnerDriver, expected: list[list[int]]
) -> None:
    """Prompts split in chunks of 32, joining while others decode, give the same tokens."""
    pending = list(range(len(PROMPTS)))
    while pending or any(len(driver.output(row)) < NUM_NEW_TOKENS for row in driver.rows):
        if pending:
            row = pending.pop()
            driver.start(row, PROMPTS[row])
        driver.step(
            {
                row: min(32, state.num_tokens - state.num_computed)
                for row, state in driver.rows.items()
                if len(state.output) < NUM_NEW_TOKENS
            }
        )
    assert expected == [driver.output(row) for row in range(len(PROMPTS))]


def test_shared_prefix_blocks_change_nothing(
    driver: RunnerDriver, expected: list[list[int]]
) -> None:
    """A prompt that starts from another row's computed blocks gives the same tokens."""
    prompt = PROMPTS[-1]
    driver.start(0, prompt)
    driver.prefill(0)
    num_shared = len(prompt) // driver.block_size
    driver.start(
        1,
        prompt,
        num_computed=num_shared * driver.block_size,
        shared_blocks=driver.rows[0].block_ids[:num_shared],
    )
    driver.prefill(1)
    driver.decode(NUM_NEW_TOKENS - 1)
    shared = driver.rows[1].block_ids[:num_shared]
    assert expected[-1] == driver.output(1)
    assert expected[-1] == driver.output(0)[:NUM_NEW_TOKENS]
    driver.rows[1].block_ids = driver.rows[1].block_ids[len(shared) :]


def test_preempted_row_resumes_with_the_same_tokens(
    driver: RunnerDriver, expected: list[list[int]]
) -> None:
    """A request that lost its row and blocks, and recomputes all its tokens, goes on as before."""
    driver.start(0, PROMPTS[2])
    driver.prefill(0)
    driver.decode(4)
    so_far = driver.output(0)
    driver.finish(0)
    driver.start(5, PROMPTS[2] + so_far)
    driver.prefill(5, chunk=32)
    driver.decode(NUM_NEW_TOKENS - len(so_far) - 1)
    assert expected[2] == so_far + driver.output(5)


def test_unwritten_slots_are_never_read(driver: RunnerDriver, expected: list[list[int]]) -> None:
    """With NaN in every slot of the pool, the null block's included, the tokens are the same."""
    driver.runner._kv_cache.fill_(torch.nan)
    for row, prompt in enumerate(PROMPTS):
        driver.start(row, prompt)
        driver.prefill(row, chunk=32)
    driver.step(dict.fromkeys(range(len(PROMPTS)), 1))
    assert torch.isfinite(driver.runner.logits).all()
    assert not driver.errors
    assert [tokens[:2] for tokens in expected] == [
        driver.output(row)[:2] for row in range(len(PROMPTS))
    ]
