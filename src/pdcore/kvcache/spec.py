"""The shape of a KV cache: what one block holds and how many blocks fit."""

from __future__ import annotations

import attrs

from pdcore.checks import check_choice, check_count
from pdcore.errors import ConfigError

__all__ = ["DTYPE_BYTES", "KVCacheConfig", "KVCacheSpec"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint64": 8}


@attrs.frozen(kw_only=True)
class KVCacheSpec:
    """What the attention layers of a model keep for each token.

    The cache is one tensor ``(num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim)``:
    block-major, so that a block is one contiguous piece of memory, keys before values.

    Args:
        num_layers, num_kv_heads, head_dim: the model's shape.
        block_size: tokens in a block.
        dtype: element type by its numpy name: float32, bfloat16, float16 (or uint64 in fakes).
        sliding_window: how many tokens back a token sees, itself included; None means all.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    dtype: str = "float32"
    sliding_window: int | None = None

    def __attrs_post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            check_count(name, getattr(self, name))
        check_choice("dtype", self.dtype, DTYPE_BYTES)
        if self.sliding_window is not None:
            check_count("sliding_window", self.sliding_window)

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of one block: (num_layers, 2, block_size, num_kv_heads, head_dim)."""
        return (self.num_layers, 2, self.block_size, self.num_kv_heads, self.head_dim)

    @property
    def bytes_per_block(self) -> int:
        elements = 1
        for size in self.block_shape:
            elements *= size
        return elements * DTYPE_BYTES[self.dtype]

    def num_blocks_for(self, memory_bytes: int) -> int:
        """How many blocks, the null block included, fit into so much memory.

        Raises:
            ConfigError: not even the null block and one more fit.
        """
        num_blocks = memory_bytes // self.bytes_per_block
        if num_blocks < 2:
            raise ConfigError(
                f"{memory_bytes} bytes hold {num_blocks} blocks of {self.bytes_per_block} bytes; "
                "at least 2 are needed (block 0 is the null block). Give the cache more memory."
            )
        return num_blocks


@attrs.frozen(kw_only=True)
class KVCacheConfig:
    """How large the cache is made.

    Args:
        spec: what one block holds.
        num_blocks: how many blocks there are, the null block included.
    """

    spec: KVCacheSpec
    num_blocks: int

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.spec.bytes_per_block
