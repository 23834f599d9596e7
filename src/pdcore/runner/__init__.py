"""Model runners and executors: what runs a plan.

`GPUModelRunner` needs the extra ``torch`` and is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdcore.errors import MissingExtra
from pdcore.runner.base import ModelRunner, poll_connector

if TYPE_CHECKING:
    from pdcore.runner.gpu import GPUModelRunner

__all__ = ["GPUModelRunner", "ModelRunner", "poll_connector"]


def __getattr__(name: str) -> Any:
    if name != "GPUModelRunner":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from pdcore.runner.gpu import GPUModelRunner
    except ModuleNotFoundError as error:
        raise MissingExtra(f"{__name__}.{name}", "torch", error.name or "torch") from error
    return GPUModelRunner
