"""How a rank's KV memory is laid out, so that engines of other shapes can read it."""

from __future__ import annotations

import attrs

from pdcore.checks import check_count, check_line
from pdcore.errors import ConfigError

__all__ = ["KVLayout"]


@attrs.frozen(kw_only=True)
class KVLayout:
    """What a byte of a rank's KV memory means.

    A block is one contiguous array ``(num_layers, num_components, block_size, num_kv_heads,
    head_dim)``. Rank ``r`` of ``tp_size`` holds the heads from ``r * num_kv_heads`` on.

    Args:
        model: names the model, its weights, and whatever else of the KV cannot be converted; KV is
            exchanged between equal names only.
        dtype: element type, by name.
        element_size: bytes in one element.
        num_layers: layers in a block.
        num_components: 2 where keys and values are kept apart, 1 where a token has one entry.
        block_size: tokens in a block.
        num_kv_heads: heads of this rank.
        head_dim: elements in a head.
        tp_rank, tp_size: which of how many tensor parallel ranks this is.

    Raises:
        ConfigError: a name is no line, a count is below 1, or the rank is not one of ``tp_size``.
    """

    model: str
    dtype: str
    element_size: int
    num_layers: int
    num_components: int = 2
    block_size: int
    num_kv_heads: int
    head_dim: int
    tp_rank: int = 0
    tp_size: int = 1

    def __attrs_post_init__(self) -> None:
        check_line("model", self.model)
        check_line("dtype", self.dtype)
        counts = (
            "element_size",
            "num_layers",
            "num_components",
            "block_size",
            "num_kv_heads",
            "head_dim",
            "tp_size",
        )
        for name in counts:
            check_count(name, getattr(self, name))
        check_count("tp_rank", self.tp_rank, at_least=0)
        if not self.tp_rank < self.tp_size:
            raise ConfigError(f"tp_rank={self.tp_rank}: must be one of {self.tp_size} ranks")

    @property
    def bytes_per_head(self) -> int:
        """Bytes of one head of one token in one layer, in one component."""
        return self.head_dim * self.element_size

    @property
    def bytes_per_block(self) -> int:
        entries = self.num_layers * self.num_components * self.block_size * self.num_kv_heads
        return entries * self.bytes_per_head

    @property
    def total_num_kv_heads(self) -> int:
        """Heads of all ranks together."""
        return self.num_kv_heads * self.tp_size
