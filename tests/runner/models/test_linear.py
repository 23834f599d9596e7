"""Products with packed weights against products by their definition."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from pdcore.runner.models import linear
from pdcore.runner.models.linear import (
    DenseLinear,
    FBGEMMLinear,
    OneDNNLinear,
    activation_dtype,
    make_linear,
)

CPU = torch.device("cpu")
HAS_FBGEMM = "fbgemm" in torch.backends.quantized.supported_engines
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _problem(dtype: torch.dtype, rows: int, *, bias: bool) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(40, 24, generator=generator).to(dtype)
    offset = torch.randn(40, generator=generator).to(dtype) if bias else None
    hidden = torch.randn(rows, 24, generator=generator)
    return weight, offset, hidden.to(activation_dtype(dtype, CPU))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_packed_weight_multiplies_like_a_plain_one(
    dtype: torch.dtype, rows: int, bias: bool
) -> None:
    """Whatever the packing, the product is that of the weight's own numbers."""
    weight, offset, hidden = _problem(dtype, rows, bias=bias)
    expected = hidden.double() @ weight.double().T + (0 if offset is None else offset.double())
    with torch.inference_mode():
        product = make_linear(weight, offset)(hidden)
    assert product.dtype == hidden.dtype
    tolerance = 1e-5 if hidden.dtype == torch.float32 else 0.1
    torch.testing.assert_close(product.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.skipif(not HAS_FBGEMM, reason="this torch has no FBGEMM")
def test_a_weight_beyond_float16_is_not_squeezed_into_it() -> None:
    """A number that float16 cannot hold makes the weight stay wide."""
    weight, _, hidden = _problem(torch.bfloat16, 3, bias=False)
    weight[2, 5] = 1e9
    expected = hidden.double() @ weight.double().T
    product = make_linear(weight)(hidden).double()
    torch.testing.assert_close(product, expected, rtol=0.02, atol=0.1)


def test_packing_drops_the_plain_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed weight is the only copy."""
    monkeypatch.setattr(linear, "_is_native", lambda dtype: dtype == torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        weight, _, _ = _problem(dtype, 1, bias=False)
        packed, plain = make_linear(weight), weakref.ref(weight)
        assert packed.num_bytes == weight.nbytes
        del weight
        gc.collect()
        assert plain() is None


def test_the_packing_follows_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN where the CPU multiplies the type, FBGEMM's float16 or float32 where it does not."""
    weight = torch.ones(4, 4)
    assert isinstance(make_linear(weight), OneDNNLinear)
    monkeypatch.setattr(linear, "_is_native", lambda dtype: False)
    assert activation_dtype(torch.bfloat16, CPU) == torch.float32
    assert isinstance(make_linear(weight.bfloat16()), FBGEMMLinear if HAS_FBGEMM else DenseLinear)
    monkeypatch.setattr(linear, "_has_fbgemm", lambda: False)
    assert isinstance(make_linear(weight.bfloat16()), DenseLinear)
    monkeypatch.setattr(linear, "_is_native", lambda dtype: True)
    assert activation_dtype(torch.bfloat16, CPU) == torch.bfloat16


def test_off_the_cpu_nothing_is_packed() -> None:
    """On a device weights stay as they are, and activations have the model's dtype."""
    weight = torch.ones(4, 4, dtype=torch.bfloat16, device="meta")
    assert isinstance(make_linear(weight), DenseLinear)
    assert activation_dtype(torch.bfloat16, torch.device("meta")) == torch.bfloat16
