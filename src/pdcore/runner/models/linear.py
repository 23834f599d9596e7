"""Matrix products with the weights of a layer, stored as the machine multiplies them fastest.

On a CPU a weight is packed once, when it is loaded, and the plain one is dropped: a product then
reads it in the order in which it computes, rather than sorting it out again in every step.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "DenseLinear",
    "FBGEMMLinear",
    "Linear",
    "OneDNNLinear",
    "activation_dtype",
    "make_linear",
]

_LARGEST_FLOAT16 = torch.finfo(torch.float16).max


class Linear(Protocol):
    """A product with one weight: (n, in_features) to (n, out_features), with the bias added.

    Attributes:
        num_bytes: what a product reads: weight and bias.
    """

    @property
    def num_bytes(self) -> int: ...

    def __call__(self, hidden: Tensor) -> Tensor: ...


class DenseLinear:
    """A plain weight (out_features, in_features), on any device."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias
        self.num_bytes = _num_bytes(weight) + _num_bytes(bias)

    def __call__(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self._weight, self._bias)


class OneDNNLinear:
    """A weight in oneDNN's blocked layout; products are in the weight's own dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias = bias
        self._multiply: Any = torch.ops.mkldnn._linear_pointwise.default
        self.num_bytes = _num_bytes(weight) + _num_bytes(bias)

    def __call__(self, hidden: Tensor) -> Tensor:
        product: Tensor = self._multiply(hidden, self._weight, self._bias, "none", [], "")
        return product


class FBGEMMLinear:
    """A 16-bit weight in FBGEMM's layout, as float16; takes, adds up and returns float32.

    For CPUs that cannot multiply 16-bit numbers: a product reads half the bytes of float32, and is
    exact where a bfloat16 weight lies within float16's range of normal numbers.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        wide = None if bias is None else bias.float()
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), wide)
        self._multiply: Any = torch.ops.quantized.linear_dynamic_fp16.default
        self.num_bytes = _num_bytes(weight) + _num_bytes(wide)

    def __call__(self, hidden: Tensor) -> Tensor:
        product: Tensor = self._multiply(hidden, self._packed)
        return product


def activation_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What a model of ``dtype`` computes in between its products.

    That is ``dtype`` where the machine multiplies such numbers, and float32 where it does not.
    """
    return dtype if device.type != "cpu" or _is_native(dtype) else torch.float32


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Store a weight (out_features, in_features) the way its device multiplies it fastest.

    The result takes and returns `activation_dtype`. It shares memory with ``weight`` only where
    nothing can be gained by packing.
    """
    if weight.device.type != "cpu":
        return DenseLinear(weight, bias)
    if _is_native(weight.dtype):
        has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        return OneDNNLinear(weight, bias) if has_onednn else DenseLinear(weight, bias)
    if _has_fbgemm() and bool(weight.abs().max() <= _LARGEST_FLOAT16):
        return FBGEMMLinear(weight, bias)
    return DenseLinear(weight.float(), None if bias is None else bias.float())


def _is_native(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies numbers of a type without widening them one by one."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True


def _has_fbgemm() -> bool:
    return "fbgemm" in torch.backends.quantized.supported_engines


def _num_bytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()
