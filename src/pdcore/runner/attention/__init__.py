"""Paged attention: the interface, and the backends by name."""

from __future__ import annotations

from pdcore.runner.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionShape,
    AttentionSupport,
)
from pdcore.runner.attention.registry import ENTRY_POINT_GROUP, resolve_attention_backend

__all__ = [
    "ENTRY_POINT_GROUP",
    "AttentionBackend",
    "AttentionBatch",
    "AttentionShape",
    "AttentionSupport",
    "resolve_attention_backend",
]
