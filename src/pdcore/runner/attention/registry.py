"""Attention backends by name, imported only when chosen."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from pdcore.errors import ConfigError, MissingExtra
from pdcore.runner.attention.base import AttentionBackend

__all__ = ["ENTRY_POINT_GROUP", "resolve_attention_backend"]

ENTRY_POINT_GROUP = "pdcore.attention_backends"
"""The entry-point group under which other packages offer backends."""

_BUILT_IN = {
    "torch": "pdcore.runner.attention.torch_backend:TorchAttentionBackend",
    "triton": "pdcore.runner.attention.triton_backend:TritonAttentionBackend",
}


def resolve_attention_backend(
    choice: str | type[AttentionBackend] | None, *, device: str
) -> type[AttentionBackend]:
    """Find a backend.

    Args:
        choice: a name, the class itself, or None for the default of the device: "triton" on CUDA,
            "torch" elsewhere.
        device: "cpu" or "cuda".

    Raises:
        ConfigError: the name is unknown, and the message lists the known ones; or a class is no
            backend.
        MissingExtra: the backend needs a package that is not installed.
    """
    if isinstance(choice, type):
        return _check_backend(choice)
    name = choice or ("triton" if device == "cuda" else "torch")
    if name in _BUILT_IN:
        return _load_built_in(name)
    offered = {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in offered:
        known = ", ".join(sorted({*_BUILT_IN, *offered}))
        raise ConfigError(f"attention backend {name!r} is unknown; known are {known}")
    return _check_backend(offered[name].load())


def _check_backend(found: Any) -> type[AttentionBackend]:
    if not (isinstance(found, type) and issubclass(found, AttentionBackend)):
        raise ConfigError(
            f"attention_backend={found!r:.80}: pass a name, or a subclass of AttentionBackend"
        )
    return found


def _load_built_in(name: str) -> type[AttentionBackend]:
    module, _, attribute = _BUILT_IN[name].partition(":")
    try:
        found: type[AttentionBackend] = getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise MissingExtra(f"attention backend {name!r}", "torch", error.name or "?") from error
    return found
