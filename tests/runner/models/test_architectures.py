"""Every architecture against transformers, on small random weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from runner_driver import RunnerDriver
from tiny_models import VARIANTS, make_tiny_model, save_tiny_model

from pdcore.runner.gpu import GPUModelRunner
from pdcore.runner.models import load_model
from pdcore.runner.models.rope import RotaryTable
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


@pytest.mark.parametrize("places", [[], [4], [5, 0]])
def test_the_last_layer_runs_for_wanted_tokens_alone(places: list[int], tmp_path: Path) -> None:
    """Their hidden states are those of a full run; the last feed-forward sees no other token."""
    model = load_model(save_tiny_model("llama", tmp_path))
    config = model.config
    rotary = RotaryTable(config.rope, config.head_dim, num_positions=8, device=torch.device("cpu"))
    widths = []

    def attend(layer: int, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
        return query * (layer + 1)

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        widths.append(hidden.shape[0])
        return down(hidden)

    down, model.layers[-1].down = model.layers[-1].down, counted
    tokens, positions, wanted = torch.arange(6), torch.arange(6), torch.tensor(places).long()
    with torch.inference_mode():
        whole = model.forward(tokens, positions, rotary=rotary, attend=attend)
        hidden = model.forward(tokens, positions, rotary=rotary, attend=attend, wanted=wanted)
    torch.testing.assert_close(hidden, whole[wanted], rtol=0, atol=1e-5)
    assert widths == [6, len(places)]
