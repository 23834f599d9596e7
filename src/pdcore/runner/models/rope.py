"""Rotary position embedding (Su et al., 2021, "RoFormer"), half-split as in Llama."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pdcore.errors import ConfigError
from pdcore.runner.models.config import Llama3Scaling, RopeConfig

__all__ = ["RotaryTable", "apply_rotary", "inverse_frequencies"]


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return the rotation speeds in radians per position, fp32 ``(head_dim // 2,)``."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.frequency_factors is not None:
        if len(rope.frequency_factors) != head_dim // 2:
            raise ConfigError(
                f"{len(rope.frequency_factors)} rope frequency factors were given for a head of "
                f"{head_dim}; {head_dim // 2} are needed"
            )
        frequencies = frequencies / torch.tensor(rope.frequency_factors, dtype=torch.float32)
    if rope.llama3 is not None:
        frequencies = _stretch(frequencies, rope.llama3)
    return frequencies / rope.linear_factor


def _stretch(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, blend those between."""
    context = scaling.original_max_position_embeddings
    turns = context * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept_share = ((turns - low) / (high - low)).clamp(0, 1)
    return kept_share * frequencies + (1 - kept_share) * frequencies / scaling.factor


class RotaryTable:
    """Cosines and sines for every position, computed once in fp32.

    Args:
        rope: the embedding's parameters.
        head_dim: size of a head.
        num_positions: how many positions to prepare.
        device: where the table lives.
    """

    def __init__(
        self, rope: RopeConfig, head_dim: int, *, num_positions: int, device: torch.device
    ) -> None:
        positions = torch.arange(num_positions, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
        self._table = torch.stack((angles.cos(), angles.sin()), dim=1).to(device)

    def lookup(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, each fp32 ``(num_tokens, 1, head_dim // 2)``."""
        rows = self._table.index_select(0, positions)
        return rows[:, 0:1], rows[:, 1:2]


def apply_rotary(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate ``(num_tokens, num_heads, head_dim)`` in fp32; returns a new tensor of its dtype."""
    first, second = heads.float().chunk(2, dim=-1)
    rotated = torch.empty_like(heads)
    half = first.shape[-1]
    rotated[..., :half] = first * cosines - second * sines
    rotated[..., half:] = second * cosines + first * sines
    return rotated
