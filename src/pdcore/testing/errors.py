"""What the fakes raise when the parts under test break a rule."""

from __future__ import annotations

from pdcore.errors import PdcoreError

__all__ = ["DriveError", "PlanError", "StaleKV"]


class PlanError(PdcoreError):
    """Raised when a plan contradicts itself, or what the worker knows of its rows."""


class StaleKV(PdcoreError):
    """Raised when a row reads a KV slot that was never written, or that holds a foreign prefix."""


class DriveError(PdcoreError):
    """Raised when a scheduler breaks a promise to its loop: two ends, no end, or no progress."""
