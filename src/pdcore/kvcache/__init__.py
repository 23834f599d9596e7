"""The KV block manager: blocks and their owners, prefixes and their names."""

from pdcore.kvcache.base import BlockCounts, BlockPool
from pdcore.kvcache.events import BlockRemoved, BlockStored, CacheCleared, KVEvent
from pdcore.kvcache.eviction import EvictionOrder, LRUOrder
from pdcore.kvcache.holds import Hold, HoldReason
from pdcore.kvcache.manager import KVCacheManager, PrefixHit
from pdcore.kvcache.pool import LRUBlockPool
from pdcore.kvcache.prefix import PrefixHasher
from pdcore.kvcache.sequence import TokenSequence
from pdcore.kvcache.spec import KVCacheConfig, KVCacheSpec
from pdcore.kvcache.tables import BlockTableDelta, BlockTables

__all__ = [
    "BlockCounts",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "BlockTableDelta",
    "BlockTables",
    "CacheCleared",
    "EvictionOrder",
    "Hold",
    "HoldReason",
    "KVCacheConfig",
    "KVCacheManager",
    "KVCacheSpec",
    "KVEvent",
    "LRUBlockPool",
    "LRUOrder",
    "PrefixHasher",
    "PrefixHit",
    "TokenSequence",
]
