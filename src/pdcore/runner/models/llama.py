"""One decoder for every Llama-shaped model: Llama, Mistral, Qwen2, Qwen3.

Weights are plain tensors; the query, key and value projections are one product, and so are the two
input projections of the feed-forward layer. How attention reads and writes the KV cache is the
caller's business.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from pdcore.runner.models.config import ModelConfig
from pdcore.runner.models.rope import RotaryTable, apply_rotary

__all__ = ["Attend", "DecoderLayer", "LlamaModel", "rms_norm"]

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``attend(layer, query, key, value)``: store the keys and values of the step and return what each
query sees. Shapes: query and result ``(num_tokens, num_heads, head_dim)``, key and value
``(num_tokens, num_kv_heads, head_dim)``."""


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis (Zhang & Sennrich, 2019), computed in fp32."""
    if hidden.dtype == torch.float32:
        return F.rms_norm(hidden, weight.shape[-1:], eps=eps).mul_(weight)
    normed = F.rms_norm(hidden.float(), weight.shape[-1:], eps=eps)
    return normed.to(hidden.dtype).mul_(weight)


@attrs.define(kw_only=True, eq=False)
class DecoderLayer:
    """The weights of one layer, all in the model's dtype and on its device.

    Args:
        attention_norm, feed_forward_norm: (hidden_size,).
        qkv: ((num_heads + 2 * num_kv_heads) * head_dim, hidden_size), queries first; qkv_bias.
        qk_norm: (num_heads + num_kv_heads, head_dim), or None.
        output: (hidden_size, num_heads * head_dim); output_bias.
        gate_up: (2 * intermediate_size, hidden_size), gate first.
        down: (hidden_size, intermediate_size).
    """

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    feed_forward_norm: Tensor
    gate_up: Tensor
    down: Tensor


@attrs.define(kw_only=True, eq=False)
class LlamaModel:
    """A decoder-only transformer whose attention is passed in.

    Args:
        config: its shape.
        embed_tokens: (vocab_size, hidden_size).
        layers: one for each layer.
        final_norm: (hidden_size,).
        lm_head: (vocab_size, hidden_size); the embedding table itself when they are tied.
        fingerprint: tells models apart whose KV cannot be exchanged.
    """

    config: ModelConfig
    embed_tokens: Tensor
    layers: tuple[DecoderLayer, ...]
    final_norm: Tensor
    lm_head: Tensor
    fingerprint: str

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.dtype

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.device

    @property
    def num_weight_bytes(self) -> int:
        """What a step reads of the model at least: every weight once, tied tables counted once."""
        tensors = [self.final_norm, self.lm_head]
        for layer in self.layers:
            tensors += [value for value in attrs.astuple(layer, recurse=False) if value is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def forward(
        self, token_ids: Tensor, positions: Tensor, *, rotary: RotaryTable, attend: Attend
    ) -> Tensor:
        """Run all layers over a flat batch of tokens.

        Args:
            token_ids, positions: integers (num_tokens,).
            rotary: cosines and sines that cover every position.
            attend: called once for each layer, in order.

        Returns:
            Hidden states before the final norm, (num_tokens, hidden_size).
        """
        cosines, sines = rotary.lookup(positions)
        hidden = F.embedding(token_ids, self.embed_tokens)
        for index, layer in enumerate(self.layers):
            query, key, value = self._project(layer, hidden, cosines, sines)
            seen = attend(index, query, key, value).flatten(1)
            hidden = hidden + F.linear(seen, layer.output, layer.output_bias)
            hidden = hidden + self._feed_forward(layer, hidden)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Final norm and output projection: (n, hidden_size) to fp32 (n, vocab_size)."""
        normed = rms_norm(hidden, self.final_norm, self.config.rms_norm_eps)
        return F.linear(normed, self.lm_head).float()

    def _project(
        self, layer: DecoderLayer, hidden: Tensor, cosines: Tensor, sines: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        normed = rms_norm(hidden, layer.attention_norm, config.rms_norm_eps)
        projected = F.linear(normed, layer.qkv, layer.qkv_bias)
        heads = projected.view(hidden.shape[0], -1, config.head_dim)
        num_rotated = config.num_heads + config.num_kv_heads
        query_key, value = heads[:, :num_rotated], heads[:, num_rotated:]
        if layer.qk_norm is not None:
            query_key = _head_norm(query_key, layer.qk_norm, config.rms_norm_eps)
        query_key = apply_rotary(query_key, cosines, sines)
        return query_key[:, : config.num_heads], query_key[:, config.num_heads :], value

    def _feed_forward(self, layer: DecoderLayer, hidden: Tensor) -> Tensor:
        normed = rms_norm(hidden, layer.feed_forward_norm, self.config.rms_norm_eps)
        gate, up = F.linear(normed, layer.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate).mul_(up), layer.down)


def _head_norm(heads: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm each head by itself; ``weight`` has a row for each head."""
    normed = F.rms_norm(heads.float(), weight.shape[-1:], eps=eps)
    return normed.to(heads.dtype).mul_(weight)
