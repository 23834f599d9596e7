"""What changed in a prefix index, for those who keep a mirror of it (routers, other engines)."""

from __future__ import annotations

import attrs

__all__ = ["BlockRemoved", "BlockStored", "CacheCleared", "KVEvent"]


@attrs.frozen
class BlockStored:
    """A block's data exists and its key leads to it. Sent after the step that wrote it.

    Args:
        key: the block's key.
        parent_key: the key of the block before it, or None at the start of a prompt.
        block_id: which block holds it. One key may be stored in several blocks.
    """

    key: bytes
    parent_key: bytes | None
    block_id: int


@attrs.frozen
class BlockRemoved:
    """A block's data is gone, or about to be overwritten: its key leads to it no more."""

    key: bytes
    block_id: int


@attrs.frozen
class CacheCleared:
    """Every key was dropped at once."""


KVEvent = BlockStored | BlockRemoved | CacheCleared
