"""Copies between host and device that make neither wait, but for the one that reads a result.

A copy from ordinary host memory may hold the host up until the device has got to it. One from
pinned memory does not; torch keeps pinned memory for reuse, and gives it to nobody before the
copies from it are over.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["copy_into", "read", "send"]


def send(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Bring an array to the device without waiting. On a CPU the tensor is the array's memory."""
    on_host = torch.from_numpy(array)
    if device.type != "cuda":
        return on_host
    if not array.size:  # there is no memory to pin
        return torch.empty(on_host.shape, dtype=on_host.dtype, device=device)
    return on_host.pin_memory().to(device, non_blocking=True)


def copy_into(target: Tensor, array: npt.NDArray[Any]) -> None:
    """Overwrite a contiguous tensor on a device, in stream order, without waiting."""
    on_host = torch.from_numpy(array)
    target.copy_(on_host.pin_memory() if target.is_cuda else on_host, non_blocking=True)


def read(tensor: Tensor) -> npt.NDArray[Any]:
    """Wait for a tensor and return it on the host.

    It waits for an event of its own, right behind the copy: later work is not waited for, and
    torch's check for hidden synchronisation (`torch.cuda.set_sync_debug_mode`) lets this one pass.
    """
    if not tensor.is_cuda:
        return tensor.numpy()
    on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    on_host.copy_(tensor, non_blocking=True)
    copied: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record(torch.cuda.current_stream(tensor.device))
    copied.synchronize()
    # A copy, since whoever keeps the result must not keep a page of pinned memory with it.
    return on_host.numpy().copy()
