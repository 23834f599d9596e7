"""What the scheduler's half of a combined connector tells the worker's half."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from pdcore.messages import TransferKey

__all__ = ["MultiMeta"]


@attrs.frozen(kw_only=True, eq=False)
class MultiMeta:
    """One step's orders for all connectors.

    Args:
        parts: each connector's own metadata, by name; those that have none are left out.
        loads: who brings the loads that start in this step.
        synchronous: connectors with loads that this step relies on.
        lost: connectors whose part could not be made though this step relies on it, and why.
    """

    parts: Mapping[str, Any]
    loads: Mapping[TransferKey, str]
    synchronous: frozenset[str] = frozenset()
    lost: Mapping[str, str] = attrs.field(factory=dict)
