"""The check that the ``testing`` extra is there."""

from __future__ import annotations

import importlib.util

from pdcore.errors import MissingExtra

__all__ = ["require_hypothesis"]


def require_hypothesis(part: str) -> None:
    """Raise `MissingExtra` for a part of pdcore.testing when hypothesis is not installed."""
    if importlib.util.find_spec("hypothesis") is None:
        raise MissingExtra(part, "testing", "hypothesis")
