"""What engines call each other."""

from __future__ import annotations

import attrs

__all__ = ["EngineName"]


@attrs.frozen(kw_only=True)
class EngineName:
    """Which engine, and which life of it."""

    engine_id: str
    epoch: str

    @property
    def peer_id(self) -> str:
        return f"{self.engine_id}:{self.epoch}"
