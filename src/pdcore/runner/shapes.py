"""What of a model's shape the KV cache and the attention backend are made by."""

from __future__ import annotations

import torch

from pdcore.kvcache.spec import KVCacheSpec
from pdcore.runner.attention.base import AttentionShape
from pdcore.runner.models.config import ModelConfig

__all__ = ["attention_shape", "kv_cache_spec"]


def kv_cache_spec(config: ModelConfig, *, block_size: int, dtype: str) -> KVCacheSpec:
    """What the model keeps for each token."""
    return KVCacheSpec(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        dtype=dtype,
        sliding_window=config.sliding_window,
    )


def attention_shape(config: ModelConfig, spec: KVCacheSpec, device: torch.device) -> AttentionShape:
    """What an attention backend has to run over a cache of that spec."""
    return AttentionShape(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=spec.block_size,
        dtype=spec.dtype,
        device=device.type,
        windows=config.windows,
    )
