"""KV of a small model, laid out for any rank and block size."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pdcore.connector.layout import KVLayout

NUM_LAYERS, NUM_HEADS, HEAD_DIM = 2, 4, 3


def a_layout(block_size: int, tp_rank: int, tp_size: int, **changes: Any) -> KVLayout:
    """The model's KV on one rank."""
    fields: dict[str, Any] = {
        "model": "m",
        "dtype": "float32",
        "element_size": 4,
        "num_layers": NUM_LAYERS,
        "block_size": block_size,
        "num_kv_heads": NUM_HEADS // tp_size,
        "head_dim": HEAD_DIM,
        "tp_rank": tp_rank,
        "tp_size": tp_size,
    }
    return KVLayout(**fields | changes)


def a_prompt(num_tokens: int) -> npt.NDArray[np.float32]:
    """KV of a prompt, (tokens, layers, 2, heads, head_dim); no two elements are equal or zero."""
    shape = (num_tokens, NUM_LAYERS, 2, NUM_HEADS, HEAD_DIM)
    return np.arange(1, np.prod(shape) + 1, dtype=np.float32).reshape(shape)


def laid_out(
    prompt: npt.NDArray[Any],
    layout: KVLayout,
    block_ids: npt.NDArray[np.int32],
    *,
    num_blocks: int = 64,
) -> npt.NDArray[np.float32]:
    """A rank's KV memory with the prompt in its blocks, token by token; the rest is zero."""
    shape = (num_blocks, NUM_LAYERS, 2, layout.block_size, layout.num_kv_heads, HEAD_DIM)
    memory = np.zeros(shape, dtype=np.float32)
    first = layout.tp_rank * layout.num_kv_heads
    for position, token in enumerate(prompt):
        block, offset = divmod(position, layout.block_size)
        memory[block_ids[block], :, :, offset] = token[:, :, first : first + layout.num_kv_heads]
    return memory
