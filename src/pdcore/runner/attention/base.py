"""The attention backend's interface: it writes a step's keys and values and attends over the pages.

The KV cache is one tensor ``(num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim)``.
A step is a flat batch of tokens. Its first ``num_decodes`` sequences have one token each; the
others are chunks of prompts. Everything the host knows about the step arrives as numpy arrays, so
that no backend has to wait for the device to learn a length.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import attrs
import numpy as np
import numpy.typing as npt

from pdcore.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AttentionBackend", "AttentionBatch", "AttentionShape", "AttentionSupport"]


@attrs.frozen(kw_only=True)
class AttentionShape:
    """What a backend is built for.

    Args:
        num_heads, num_kv_heads, head_dim: of the model; query head ``h`` reads KV head
            ``h // (num_heads // num_kv_heads)``.
        block_size: tokens in a block.
        dtype: element type of the cache, by its numpy name.
        device: "cpu" or "cuda".
        windows: one for each layer: how many tokens back a token sees, itself included, or None.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    device: str
    windows: tuple[int | None, ...]

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def scale(self) -> float:
        """What scores are multiplied by before the softmax."""
        return float(self.head_dim**-0.5)


@attrs.frozen(kw_only=True)
class AttentionSupport:
    """What a backend can run. None stands for "any".

    Args:
        devices: device types.
        dtypes: element types, by their numpy names.
        block_sizes: tokens in a block.
        sliding_window: whether layers may have a window.
        contiguous_only: whether the cache must be contiguous, rather than of any strides.
        graph_decodes: whether a step of nothing but decodes may be captured in a CUDA graph, `plan`
            and all of `forward`, and replayed for other sequences. The backend promises that for
            such a step both do no more than enqueue work on the current stream: they neither wait
            for the device nor copy from host memory, and what they enqueue depends on the shapes
            and addresses of the batch's tensors, not on ``seq_lens``, which only bounds the lengths
            that may come. Between a `plan` and the next one they keep what they like; a buffer
            that outlives it must be allocated in `bind`.
    """

    devices: frozenset[str] | None = None
    dtypes: frozenset[str] = frozenset({"float32", "bfloat16", "float16"})
    block_sizes: frozenset[int] | None = None
    sliding_window: bool = True
    contiguous_only: bool = False
    graph_decodes: bool = False

    def check(self, shape: AttentionShape, *, name: str) -> None:
        """Raise `ConfigError`, naming what does not fit."""
        if self.devices is not None and shape.device not in self.devices:
            raise _unsupported(name, "device", shape.device, self.devices)
        if shape.dtype not in self.dtypes:
            raise _unsupported(name, "dtype", shape.dtype, self.dtypes)
        if self.block_sizes is not None and shape.block_size not in self.block_sizes:
            raise _unsupported(name, "block_size", shape.block_size, self.block_sizes)
        if not self.sliding_window and any(shape.windows):
            raise _unsupported(name, "sliding_window", shape.windows, frozenset({None}))


def _unsupported(
    name: str, what: str, value: object, known: frozenset[str] | frozenset[int] | frozenset[None]
) -> ConfigError:
    listed = ", ".join(sorted(map(str, known)))
    return ConfigError(
        f"attention backend {name!r} does not support {what}={value!r}; it supports {listed}. "
        "Choose another backend or another value."
    )


@attrs.define(kw_only=True, eq=False)
class AttentionBatch:
    """One step's sequences: decodes (one token each) first, then chunks.

    Args:
        num_decodes: how many sequences have exactly one token.
        query_lens: int32 (n,) on the host, tokens of each sequence in this step, at least 1.
        seq_lens: int32 (n,) on the host, tokens of each sequence in the cache after this step.
        cu_seqlens: int32 (n + 1,) on the device, where each sequence's tokens start in the batch.
        device_seq_lens: int32 (n,), ``seq_lens`` on the device.
        block_tables: int32 (n, width) on the device; block ids by position. Entries at and after
            ``ceil(seq_len / block_size)`` mean nothing.
        slot_blocks, slot_offsets: int64 (num_tokens,) on the device: the block of each token and
            its place in it.
    """

    num_decodes: int
    query_lens: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    cu_seqlens: Tensor
    device_seq_lens: Tensor
    block_tables: Tensor
    slot_blocks: Tensor
    slot_offsets: Tensor


class AttentionBackend(ABC):
    """Writes keys and values into the cache and attends over it. One thread owns it.

    `bind` once, then for every step `plan` once and `forward` once for each layer.

    Args:
        shape: what it must run.

    Raises:
        ConfigError: ``shape`` is not within `support`.
    """

    name: ClassVar[str]
    support: ClassVar[AttentionSupport]

    def __init__(self, shape: AttentionShape) -> None:
        self.support.check(shape, name=self.name)
        self.shape = shape

    def bind(self, kv_cache: Tensor) -> None:
        """Take the cache ``(num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim)``.

        Raises:
            ConfigError: its shape is another, or its strides are not supported.
        """
        shape = self.shape
        expected = (shape.num_layers, 2, shape.block_size, shape.num_kv_heads, shape.head_dim)
        if tuple(kv_cache.shape[1:]) != expected:
            raise ConfigError(
                f"the KV cache has blocks of shape {tuple(kv_cache.shape[1:])}; "
                f"attention backend {self.name!r} was built for {expected}"
            )
        if self.support.contiguous_only and not kv_cache.is_contiguous():
            raise ConfigError(
                f"attention backend {self.name!r} needs a contiguous KV cache; "
                f"this one has strides {kv_cache.stride()}"
            )
        self._bind(kv_cache)

    @abstractmethod
    def _bind(self, kv_cache: Tensor) -> None:
        """Take the checked cache."""

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> None:
        """Prepare what all layers of a step share."""

    @abstractmethod
    def forward(self, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        """Write the step's keys and values of a layer, then attend.

        A slot that no token of the sequence was written to is never read into a result: it may
        hold anything, NaN included.

        Args:
            layer: which layer.
            query: (num_tokens, num_heads, head_dim), in the cache's dtype or, on a CPU, float32.
            key_value: (num_tokens, 2, num_kv_heads, head_dim), keys first, in the dtype of
                ``query``. Of both, the last axis is contiguous and heads are adjacent.

        Returns:
            (num_tokens, num_heads, head_dim), contiguous, in the dtype of ``query``.
        """
