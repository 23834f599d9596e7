"""Root-mean-square norm (Zhang & Sennrich, 2019), computed in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["RMSNorm", "rms_norm"]


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm over the last axis; ``weight`` may have further axes to its left."""
    normed = F.rms_norm(hidden.float(), weight.shape[-1:], eps=eps)
    return normed.to(hidden.dtype).mul_(weight)


class RMSNorm:
    """A norm over the last axis with a gain for each element.

    On a CPU torch has no single kernel for it and its composite makes many passes, so there it is
    written as ``x / hypot(|x|, sqrt(d * eps)) * (sqrt(d) * gain)``, in three.

    Args:
        weight: (hidden_size,), the gains.
        eps: added to the mean square.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps
        self._is_on_cpu = weight.device.type == "cpu"
        self._gain = weight.float() * weight.numel() ** 0.5
        self._floor = torch.tensor((weight.numel() * eps) ** 0.5, device=weight.device)
        self.num_bytes = weight.numel() * weight.element_size()

    def __call__(self, hidden: Tensor) -> Tensor:
        """Norm (n, hidden_size); returns a new tensor of the same dtype."""
        if not self._is_on_cpu:
            return rms_norm(hidden, self._weight, self._eps)
        length = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True, dtype=torch.float32)
        return torch.div(hidden, length.hypot_(self._floor)).mul_(self._gain).to(hidden.dtype)
