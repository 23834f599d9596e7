"""The norm against its definition."""

from __future__ import annotations

import pytest
import torch

from pdcore.runner.models.norm import RMSNorm, rms_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_norm_matches_its_definition(dtype: torch.dtype, scale: float) -> None:
    """``x / sqrt(mean(x^2) + eps) * weight``, also where eps outweighs the input."""
    generator = torch.Generator().manual_seed(3)
    hidden = (torch.randn(5, 48, generator=generator) * scale).to(dtype)
    weight = (torch.rand(48, generator=generator) + 0.5).to(dtype)
    wide = hidden.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    rounding = 1e-6 if dtype == torch.float32 else 2e-2
    for normed in (RMSNorm(weight, 1e-5)(hidden), rms_norm(hidden, weight, 1e-5)):
        assert normed.dtype == dtype
        torch.testing.assert_close(normed.double(), expected, rtol=rounding, atol=1e-6)


def test_norm_does_not_change_its_input() -> None:
    """The residual stream lives on."""
    hidden = torch.randn(2, 8)
    before = hidden.clone()
    RMSNorm(torch.ones(8), 1e-5)(hidden)
    assert torch.equal(before, hidden)
