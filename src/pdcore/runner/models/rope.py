"""Rotary position embedding (Su et al., 2021, "RoFormer").

Checkpoints keep the two numbers of a pair half a head apart. Here they are neighbours, so that a
rotation is one product of complex numbers: the loader reorders the projections once.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pdcore.errors import ConfigError
from pdcore.runner.models.config import Llama3Scaling, RopeConfig

__all__ = [
    "ROTARY_LAYOUT",
    "RotaryTable",
    "apply_rotary",
    "interleave_halves",
    "inverse_frequencies",
]

ROTARY_LAYOUT = "rotary-pairs"
"""How the elements of a cached key are ordered: a part of the fingerprint that engines compare."""


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return the rotation speeds in radians per position, fp32 ``(head_dim // 2,)``.

    Raises:
        ConfigError: they are not finite, or there is not one factor for each.
    """
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
    frequencies = frequencies / rope.linear_factor
    if not frequencies.isfinite().all():
        raise ConfigError(
            f"the rotary frequencies of {rope} are not finite: its base and factors must be "
            "finite numbers above 0"
        )
    return frequencies


def _stretch(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, blend those between."""
    context = scaling.original_max_position_embeddings
    turns = context * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept_share = ((turns - low) / (high - low)).clamp(0, 1)
    return kept_share * frequencies + (1 - kept_share) * frequencies / scaling.factor


class RotaryTable:
    """The rotations of every position as complex numbers of length 1, computed once.

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
        self._table = torch.complex(angles.cos(), angles.sin())[:, None].to(device)

    def lookup(self, positions: Tensor) -> Tensor:
        """Return the rotations, complex64 ``(num_tokens, 1, head_dim // 2)``."""
        return self._table.index_select(0, positions)


def interleave_halves(weight: Tensor, num_heads: int) -> Tensor:
    """Bring the two halves of each head together in pairs: 0, d/2, 1, d/2 + 1, ...

    Args:
        weight: (num_heads * head_dim, ...), of a query or key projection; scores do not change when
            both are reordered alike.
    """
    halves = weight.view(num_heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def apply_rotary(heads: Tensor, rotations: Tensor) -> None:
    """Rotate the pairs of ``(num_tokens, num_heads, head_dim)`` in place, in float32."""
    pairs = heads.view(*heads.shape[:-1], -1, 2)
    if heads.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(rotations)
    else:
        rotated = torch.view_as_complex(pairs.float()).mul_(rotations)
        pairs.copy_(torch.view_as_real(rotated))
