"""Rotations of neighbouring pairs against those of half-split heads, as checkpoints have them."""

from __future__ import annotations

import pytest
import torch

from pdcore.errors import ConfigError
from pdcore.runner.models.config import RopeConfig
from pdcore.runner.models.rope import (
    RotaryTable,
    apply_rotary,
    interleave_halves,
    inverse_frequencies,
)

ROPE = RopeConfig(theta=10_000.0)


def _rotate_halves(heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    angles = torch.outer(positions.double(), inverse_frequencies(ROPE, heads.shape[-1]).double())
    first, second = heads.double().chunk(2, dim=-1)
    cosines, sines = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotated_pairs_are_rotated_halves_in_another_order(dtype: torch.dtype) -> None:
    """Reordering, then rotating pairs, is rotating halves, then reordering."""
    heads = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    positions = torch.tensor([0, 7, 90])
    expected = _rotate_halves(heads, positions)
    pairs = torch.stack([interleave_halves(row.flatten(), 4).view(4, 16) for row in heads])
    table = RotaryTable(ROPE, 16, num_positions=128, device=torch.device("cpu"))
    apply_rotary(pairs, table.lookup(positions))
    reordered = torch.stack([interleave_halves(row.flatten(), 4).view(4, 16) for row in expected])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(pairs.double(), reordered, rtol=0, atol=tolerance)


def test_rotation_is_in_place_and_leaves_other_heads_alone() -> None:
    """A slice of the projected heads can be rotated where it lies."""
    heads = torch.randn(2, 5, 8)
    before = heads.clone()
    table = RotaryTable(ROPE, 8, num_positions=4, device=torch.device("cpu"))
    apply_rotary(heads[:, :3], table.lookup(torch.tensor([1, 3])))
    assert torch.equal(before[:, 3:], heads[:, 3:])
    assert not torch.allclose(before[:, :3], heads[:, :3])


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(theta=0.0),
        RopeConfig(theta=-1.0),
        RopeConfig(linear_factor=0.0),
        RopeConfig(frequency_factors=(1.0, 0.0)),
        RopeConfig(frequency_factors=(1.0, torch.nan)),
    ],
)
def test_frequencies_that_are_not_finite_are_refused(rope: RopeConfig) -> None:
    """They would make every logit NaN."""
    with pytest.raises(ConfigError, match="are not finite"):
        inverse_frequencies(rope, 4)
