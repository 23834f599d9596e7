"""What engines compare before one reads the KV of another."""

from __future__ import annotations

from pdcore.connector.layout import KVLayout
from pdcore.kvcache.spec import DTYPE_BYTES, KVCacheSpec
from pdcore.runner.models.llama import LlamaModel
from pdcore.runner.models.rope import ROTARY_LAYOUT

__all__ = ["kv_fingerprint", "kv_layout"]


def kv_fingerprint(model: LlamaModel, spec: KVCacheSpec) -> str:
    """Describes the KV in a line: model, weights, element type and layout."""
    return (
        f"{_name(model)}/{spec.dtype}/"
        f"layers{spec.num_layers}-heads{spec.num_kv_heads}x{spec.head_dim}-block{spec.block_size}-"
        f"{ROTARY_LAYOUT}"
    )


def kv_layout(model: LlamaModel, spec: KVCacheSpec) -> KVLayout:
    """The same by its parts, of which some may differ between engines."""
    return KVLayout(
        model=f"{_name(model)}/{ROTARY_LAYOUT}",
        dtype=spec.dtype,
        element_size=DTYPE_BYTES[spec.dtype],
        num_layers=spec.num_layers,
        block_size=spec.block_size,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
    )


def _name(model: LlamaModel) -> str:
    return f"{model.config.model_type}-{model.fingerprint}"
