"""GGUF files: their metadata as a `ModelConfig`, their tensors under Hugging Face names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from torch import Tensor

from pdcore.errors import ConfigError, MissingWeights, UnsupportedModel
from pdcore.runner.models.config import ModelConfig, RopeConfig
from pdcore.runner.models.weights import WeightSource

__all__ = ["GGUFSource"]

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Values of ``general.architecture``. Mistral models are stored as ``llama``."""

_LAYER_NAMES: Mapping[str, str] = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OUTER_NAMES: Mapping[str, str] = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_PATTERN = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


class _PlainReader(GGUFReader):  # type: ignore[misc]  # the library has no types
    """Reads through a plain array: slicing a `numpy.memmap` costs more than parsing."""

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        return self._plain

    @data.setter
    def data(self, mapped: npt.NDArray[np.uint8]) -> None:
        self._plain = np.asarray(mapped)


class GGUFSource(WeightSource):
    """One GGUF file, parsed and unpacked by the ``gguf`` library.

    Raises:
        MissingWeights: the file is truncated or damaged.
        UnsupportedModel: its architecture is not known here.
    """

    # llama.cpp rotates neighbouring pairs, so its converter reorders these rows of Llama models.
    _PERMUTED: ClassVar = (".attn_q.weight", ".attn_k.weight", ".attn_q.bias", ".attn_k.bias")

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            reader = _PlainReader(path)
            self._tensors = {tensor.name: tensor for tensor in reader.tensors}
            self._fields = {
                name: field.contents()
                for name, field in reader.fields.items()
                if not name.startswith("tokenizer.")
            }
        except Exception as error:  # the library raises whatever numpy does on a short file
            raise MissingWeights(
                f"{path} is not a GGUF file, or is truncated or damaged ({error}); "
                "download it again"
            ) from error
        self.config = self._read_config()

    def __contains__(self, name: str) -> bool:
        return _gguf_name(name) in self._tensors

    def read(self, name: str) -> Tensor:
        stored_name = _gguf_name(name)
        stored = self._tensors.get(stored_name)
        if stored is None:
            raise MissingWeights(f"{self.path} has no tensor {stored_name!r} (for {name!r})")
        try:
            values = dequantize(stored.data, stored.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise UnsupportedModel(
                f"{self.path}: tensor {stored_name!r} of type {stored.tensor_type.name} cannot be "
                f"unpacked ({error})"
            ) from error
        # A copy, because the file is mapped read-only and unquantized tensors are views of it.
        tensor = torch.tensor(values)
        if self.config.model_type == "llama" and stored_name.endswith(self._PERMUTED):
            is_query = ".attn_q." in stored_name
            tensor = _unpermute(
                tensor, self.config.num_heads if is_query else self.config.num_kv_heads
            )
        return tensor

    def close(self) -> None:
        self._tensors.clear()

    def _read_config(self) -> ModelConfig:
        architecture = self._fields.get("general.architecture")
        if architecture not in _ARCHITECTURES:
            raise UnsupportedModel(
                f"{self.path} has architecture {architecture!r}, which is not supported; "
                f"known are {', '.join(_ARCHITECTURES)}"
            )
        prefix = f"{architecture}."
        fields = {
            name.removeprefix(prefix): value
            for name, value in self._fields.items()
            if name.startswith(prefix)
        }
        try:
            return self._config_from(architecture, fields)
        except KeyError as error:
            raise ConfigError(f"{self.path} lacks the metadata {prefix}{error.args[0]}") from None

    def _config_from(self, architecture: str, fields: Mapping[str, Any]) -> ModelConfig:
        num_heads = fields["attention.head_count"]
        num_layers = fields["block_count"]
        hidden_size = fields["embedding_length"]
        head_dim = fields.get("attention.key_length", hidden_size // num_heads)
        if fields.get("rope.dimension_count", head_dim) != head_dim:
            raise UnsupportedModel(f"{self.path}: rotary embedding of a part of a head")
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None:
            raise MissingWeights(f"{self.path} has no tensor 'token_embd.weight'")
        return ModelConfig(
            model_type=architecture,
            vocab_size=int(embedding.shape[1]),
            hidden_size=hidden_size,
            intermediate_size=fields["feed_forward_length"],
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=fields.get("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            max_position_embeddings=fields["context_length"],
            rms_norm_eps=float(fields["attention.layer_norm_rms_epsilon"]),
            rope=self._rope(fields),
            tie_word_embeddings="output.weight" not in self._tensors,
            qkv_bias="blk.0.attn_q.bias" in self._tensors,
            output_bias="blk.0.attn_output.bias" in self._tensors,
            qk_norm="blk.0.attn_q_norm.weight" in self._tensors,
            windows=(fields.get("attention.sliding_window") or None,) * num_layers,
        )

    def _rope(self, fields: Mapping[str, Any]) -> RopeConfig:
        kind = fields.get("rope.scaling.type", "none")
        if kind not in ("none", "linear"):
            raise UnsupportedModel(
                f"{self.path}: rope scaling type {kind!r} is not supported; known are none, linear"
            )
        factors = self._tensors.get("rope_freqs.weight")
        return RopeConfig(
            theta=float(fields.get("rope.freq_base", 10_000.0)),
            linear_factor=float(fields.get("rope.scaling.factor", 1.0))
            if kind == "linear"
            else 1.0,
            frequency_factors=None if factors is None else tuple(factors.data.tolist()),
        )


def _gguf_name(name: str) -> str:
    match = _LAYER_PATTERN.fullmatch(name)
    if match is None:
        return _OUTER_NAMES.get(name, name)
    layer, part, suffix = match.groups()
    return f"blk.{layer}.{_LAYER_NAMES[part]}.{suffix}"


def _unpermute(tensor: Tensor, num_heads: int) -> Tensor:
    """Bring rotary pairs from neighbours back to the two halves of each head."""
    pairs = tensor.view(num_heads, -1, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
