"""Where a model runs, and in which numbers."""

from __future__ import annotations

import torch

from pdcore.errors import ConfigError

__all__ = ["DTYPES", "choose_device", "choose_dtype"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""The element types of weights and KV, by the names that settings give them."""


def choose_device(device: str | None) -> torch.device:
    """The device of that name; None takes CUDA when there is one, and the CPU otherwise.

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
    return chosen


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
