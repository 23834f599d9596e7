"""One decoder for every Llama-shaped model: Llama, Mistral, Qwen2, Qwen3.

The query, key and value projections are one product, and so are the two input projections of the
feed-forward layer. How attention reads and writes the KV cache is the caller's business.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from pdcore.runner.models.config import ModelConfig
from pdcore.runner.models.linear import Linear, activation_dtype
from pdcore.runner.models.norm import RMSNorm, rms_norm
from pdcore.runner.models.rope import RotaryTable, apply_rotary

__all__ = ["Attend", "DecoderLayer", "LlamaModel"]

Attend = Callable[[int, Tensor, Tensor], Tensor]
"""``attend(layer, query, key_value)``: store the keys and values of the step and return what each
query sees. Shapes: query and result ``(num_tokens, num_heads, head_dim)``, key_value
``(num_tokens, 2, num_kv_heads, head_dim)``."""


@attrs.define(kw_only=True, eq=False)
class DecoderLayer:
    """The weights of one layer.

    Args:
        attention_norm, feed_forward_norm: over hidden_size.
        qkv: to (num_heads + 2 * num_kv_heads) * head_dim, queries first, then keys; the elements of
            a query or key head are in rotary pairs.
        qk_norm: (num_heads + num_kv_heads, head_dim), in rotary pairs too, or None.
        output: from num_heads * head_dim.
        gate_up: to 2 * intermediate_size, gate first.
        down: from intermediate_size.
    """

    attention_norm: RMSNorm
    qkv: Linear
    qk_norm: Tensor | None
    output: Linear
    feed_forward_norm: RMSNorm
    gate_up: Linear
    down: Linear

    @property
    def num_bytes(self) -> int:
        """The bytes of all weights."""
        norms = (self.attention_norm, self.feed_forward_norm)
        products = (self.qkv, self.output, self.gate_up, self.down)
        head_norm = 0 if self.qk_norm is None else self.qk_norm.nbytes
        return head_norm + sum(part.num_bytes for part in (*norms, *products))


@attrs.define(kw_only=True, eq=False)
class LlamaModel:
    """A decoder-only transformer whose attention is passed in.

    Args:
        config: its shape.
        embed_tokens: (vocab_size, hidden_size), in the model's dtype.
        layers: one for each layer.
        final_norm: over hidden_size.
        lm_head: to vocab_size. Tied to the embedding table, it is the same memory, unless it had to
            be packed.
        fingerprint: tells models apart whose KV cannot be exchanged.
    """

    config: ModelConfig
    embed_tokens: Tensor
    layers: tuple[DecoderLayer, ...]
    final_norm: RMSNorm
    lm_head: Linear
    fingerprint: str

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.dtype

    @property
    def activation_dtype(self) -> torch.dtype:
        """The dtype of hidden states, queries, keys and values."""
        return activation_dtype(self.dtype, self.device)

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.device

    @property
    def num_weight_bytes(self) -> int:
        """What a step reads of the model at least: every weight once, tied tables counted once."""
        layers = sum(layer.num_bytes for layer in self.layers)
        return layers + self.final_norm.num_bytes + self.lm_head.num_bytes

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        *,
        rotary: RotaryTable,
        attend: Attend,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Run all layers over a flat batch of tokens.

        Args:
            token_ids, positions: integers (num_tokens,).
            rotary: rotations that cover every position.
            attend: called once for each layer, in order.
            wanted: integers, the places of the tokens whose hidden states are asked for; None asks
                for all. Of the others the last layer makes no more than keys and values.

        Returns:
            Hidden states before the final norm, one for each wanted token, by hidden_size.
        """
        rotations = rotary.lookup(positions)
        hidden = F.embedding(token_ids, self.embed_tokens).to(self.activation_dtype)
        for index, layer in enumerate(self.layers):
            query, key_value = self._project(layer, hidden, rotations)
            seen = attend(index, query, key_value).flatten(1)
            if wanted is not None and index == len(self.layers) - 1:
                hidden, seen = hidden.index_select(0, wanted), seen.index_select(0, wanted)
            hidden.add_(layer.output(seen))
            hidden.add_(self._feed_forward(layer, hidden))
        return hidden

    def compute_logits(self, hidden: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Final norm and output projection: (n, hidden_size) to fp32 (n, vocab_size).

        ``out`` takes the result, if given.
        """
        logits = self.lm_head(self.final_norm(hidden))
        return logits.float() if out is None else out.copy_(logits)

    def _project(
        self, layer: DecoderLayer, hidden: Tensor, rotations: Tensor
    ) -> tuple[Tensor, Tensor]:
        config = self.config
        projected = layer.qkv(layer.attention_norm(hidden))
        heads = projected.view(hidden.shape[0], -1, config.head_dim)
        rotated = heads[:, : config.num_heads + config.num_kv_heads]
        if layer.qk_norm is not None:
            rotated.copy_(rms_norm(rotated, layer.qk_norm, config.rms_norm_eps))
        apply_rotary(rotated, rotations)
        query, key_value = heads.tensor_split((config.num_heads,), dim=1)
        return query, key_value.view(hidden.shape[0], 2, config.num_kv_heads, config.head_dim)

    def _feed_forward(self, layer: DecoderLayer, hidden: Tensor) -> Tensor:
        gate, up = layer.gate_up(layer.feed_forward_norm(hidden)).chunk(2, dim=-1)
        return layer.down(F.silu(gate).mul_(up))
