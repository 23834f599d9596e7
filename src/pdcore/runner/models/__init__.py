"""Llama-family models: their configs and weights, and one decoder for all of them.

`load_model` and `LlamaModel` need the extra ``torch`` and are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pdcore.errors import MissingExtra
from pdcore.runner.models.config import (
    MODEL_TYPES,
    Llama3Scaling,
    ModelConfig,
    RopeConfig,
    config_from_hf,
)

if TYPE_CHECKING:
    from pdcore.runner.models.llama import LlamaModel
    from pdcore.runner.models.loader import load_model

__all__ = [
    "MODEL_TYPES",
    "Llama3Scaling",
    "LlamaModel",
    "ModelConfig",
    "RopeConfig",
    "config_from_hf",
    "load_model",
]

_HOMES = {"LlamaModel": "llama", "load_model": "loader"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f"{__name__}.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        raise MissingExtra(f"{__name__}.{name}", "torch", error.name or "torch") from error
    return getattr(module, name)
