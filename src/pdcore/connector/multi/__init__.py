"""A connector that is several at once."""

from __future__ import annotations

from pdcore.connector.multi.connector import MultiConnector
from pdcore.connector.multi.stats import MultiStats

__all__ = ["MultiConnector", "MultiStats"]
