"""Every architecture against transformers, on small random weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from runner_driver import RunnerDriver
from tiny_models import VARIANTS, make_tiny_model, save_tiny_model

from pdcore.runner.gpu import GPUModelRunner
from pdcore.scheduler.base import Limits

LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=128, max_model_len=128)


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(variant: str, block_size: int, tmp_path: Path) -> None:
    """Chunked prefill and decodes of two rows over a pool of NaN: logits within 1e-4."""
    runner = GPUModelRunner(
        save_tiny_model(variant, tmp_path),
        limits=LIMITS,
        device="cpu",
        block_size=block_size,
        kv_cache_memory_bytes=1 << 24,
        num_threads=1,
        keep_logits=True,
    )
    reference = make_tiny_model(variant)
    driver = RunnerDriver(runner, num_blocks=64)
    runner._kv_cache.fill_(torch.nan)
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, 128, length).tolist() for length in (37, 9)]
    for row, prompt in enumerate(prompts):
        driver.start(row, prompt)
        driver.prefill(row, chunk=15)
    driver.decode(5)
    for row, prompt in enumerate(prompts):
        known = prompt + driver.output(row)[:-1]
        with torch.inference_mode():
            expected = reference(torch.tensor([known])).logits[0, -1]
        assert (runner.logits[row] - expected).abs().max() < 1e-4
