"""Where a model runs, and in which numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

from pdcore.errors import ConfigError

__all__ = ["DTYPES", "HasDevice", "choose_device", "choose_dtype", "on_device", "on_own_device"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""The element types of weights and KV, by the names that settings give them."""

_P = ParamSpec("_P")
_ResultT = TypeVar("_ResultT")


class HasDevice(Protocol):
    """Whoever works on one device."""

    @property
    def device(self) -> torch.device: ...


_OwnerT = TypeVar("_OwnerT", bound=HasDevice)


def choose_device(device: str | None) -> torch.device:
    """The device of that name; None takes CUDA when there is one, and the CPU otherwise.

    A CUDA device has a number in the end: "cuda" is the calling thread's current one, and stays it
    in threads for which another one is current.

    Raises:
        ConfigError: the name is unknown, or there is no such device here.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device={device!r} is unknown: use 'cuda' or 'cpu'") from error
    if chosen.type not in ("cuda", "cpu"):
        raise ConfigError(f"device={device!r} is not supported: use 'cuda' or 'cpu'")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device={device!r} was asked for, but this torch sees no CUDA device: use 'cpu', or "
            "install a CUDA build of torch"
        )
    return _numbered(chosen) if chosen.type == "cuda" else chosen


def choose_dtype(dtype: str | None, device: torch.device) -> str:
    """The name of an element type; None takes bfloat16 on CUDA and float32 on a CPU.

    Raises:
        ConfigError: the name is unknown.
    """
    if dtype is None:
        return "bfloat16" if device.type == "cuda" else "float32"
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r} is unknown: use one of {', '.join(DTYPES)}")
    return dtype


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a device the calling thread's current one for the length of a block.

    Torch's own operators go where their tensors are. Triton's kernels, CUDA graphs, streams and
    pinned memory go by the current device, whose number is 0 in every new thread. On a CPU there is
    nothing to do.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def on_own_device(
    method: Callable[Concatenate[_OwnerT, _P], _ResultT],
) -> Callable[Concatenate[_OwnerT, _P], _ResultT]:
    """Run a method `on_device` of its object, whichever thread calls it."""

    @functools.wraps(method)
    def run(self: _OwnerT, /, *args: _P.args, **kwargs: _P.kwargs) -> _ResultT:
        with on_device(self.device):
            return method(self, *args, **kwargs)

    return run


def _numbered(device: torch.device) -> torch.device:
    if device == torch.device("cuda"):  # which has no number
        return torch.device("cuda", torch.cuda.current_device())
    num_devices = torch.cuda.device_count()
    if device.index >= num_devices:
        raise ConfigError(
            f"device='{device}' was asked for, but this torch sees {num_devices} CUDA device(s), "
            f"the last of which is 'cuda:{num_devices - 1}'"
        )
    return device
