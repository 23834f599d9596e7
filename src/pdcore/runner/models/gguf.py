"""GGUF files: their metadata as a `ModelConfig`, their tensors under Hugging Face names."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGUFReader, GGUFValueType
from gguf.quants import dequantize
from torch import Tensor

from pdcore.errors import MissingWeights, UnsupportedModel
from pdcore.runner.models.config import MAX_NUM_LAYERS, ModelConfig, RopeConfig
from pdcore.runner.models.settings import Settings
from pdcore.runner.models.weights import WeightSource

__all__ = ["GGUFSource"]

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Values of ``general.architecture``. Mistral models are stored as ``llama``."""

_HARMLESS = (
    "vocab_size",
    "tensor_data_layout",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
)
"""Metadata of an architecture that is not read because it does not change the computation."""

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


class _Bytes:
    """A file's bytes; unlike those of an array, its slices never end short.

    They are taken from a plain array: slicing a `numpy.memmap` costs more than parsing.
    """

    def __init__(self, mapped: npt.NDArray[np.uint8]) -> None:
        self._plain = np.asarray(mapped)

    def __getitem__(self, span: slice) -> npt.NDArray[np.uint8]:
        if span.stop > len(self._plain):
            raise ValueError(f"it has {len(self._plain)} bytes and calls for {span.stop}")
        return self._plain[span]


class _BoundedReader(GGUFReader):  # type: ignore[misc]  # the library has no types
    """Never reads past the end of the file, and knows that every tensor has its place."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        # As llama.cpp asks: each tensor starts where the one before it ends.
        expected = self.data_offset
        for tensor in self.tensors:
            if tensor.data_offset != expected:
                raise ValueError(
                    f"{tensor.name} starts at byte {tensor.data_offset} and not {expected}"
                )
            expected += -(-tensor.n_bytes // int(self.alignment)) * int(self.alignment)

    @property
    def data(self) -> _Bytes:
        return self._bytes

    @data.setter
    def data(self, mapped: npt.NDArray[np.uint8]) -> None:
        self._bytes = _Bytes(mapped)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, Any, Any, Any]:
        # The library makes objects for every element, so a wrong length may cost all memory.
        if raw_type == GGUFValueType.ARRAY:
            kind, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
            dtype = self.gguf_scalar_to_np.get(kind[0])
            if dtype is not None:
                values = self._get(orig_offs + 12, dtype, count[0])
                return (
                    12 + values.nbytes,
                    [kind, count, values],
                    [2],
                    [GGUFValueType.ARRAY, GGUFValueType(kind[0])],
                )
        parts: tuple[int, Any, Any, Any] = super()._get_field_parts(orig_offs, raw_type)
        return parts


class GGUFSource(WeightSource):
    """One GGUF file, parsed and unpacked by the ``gguf`` library.

    Raises:
        MissingWeights: the file is truncated or damaged.
        UnsupportedModel: its architecture, or metadata that changes the computation, is not known
            here.
        ConfigError: its metadata lacks a key, or has one of the wrong kind or out of its range.
    """

    # llama.cpp rotates neighbouring pairs, so its converter reorders these rows of Llama models.
    _PERMUTED: ClassVar = (".attn_q.weight", ".attn_k.weight", ".attn_q.bias", ".attn_k.bias")

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            reader = _BoundedReader(path)
            self._tensors = {tensor.name: tensor for tensor in reader.tensors}
            fields = {
                name: field.contents()
                for name, field in reader.fields.items()
                if not name.startswith("tokenizer.")
            }
        except Exception as error:  # the library raises whatever numpy does on a short file
            raise MissingWeights(
                f"{path} is not a GGUF file, or is truncated or damaged ({error}); "
                "download it again"
            ) from error
        self._read: set[str] = set()
        self.config = self._read_config(fields)

    def __contains__(self, name: str) -> bool:
        return _gguf_name(name) in self._tensors

    def read(self, name: str) -> Tensor:
        stored_name = _gguf_name(name)
        stored = self._tensors.get(stored_name)
        if stored is None:
            raise MissingWeights(f"{self.path} has no tensor {stored_name!r} (for {name!r})")
        self._read.add(stored_name)
        try:
            values = dequantize(stored.data, stored.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise UnsupportedModel(
                f"{self.path}: tensor {stored_name!r} of type {stored.tensor_type.name} cannot be "
                f"unpacked ({error})"
            ) from error
        # A copy, because the file is mapped read-only and unquantized tensors are views of it.
        tensor = torch.tensor(values)
        if stored_name.endswith(self._PERMUTED) and self.config.model_type == "llama":
            is_query = ".attn_q." in stored_name
            tensor = _unpermute(
                tensor, self.config.num_heads if is_query else self.config.num_kv_heads
            )
        return tensor

    def unread(self) -> list[str]:
        # What a GGUF file computes is said by the tensors that it has.
        return [name for name in self._tensors if name not in self._read]

    def close(self) -> None:
        self._tensors.clear()

    def _read_config(self, fields: Mapping[str, Any]) -> ModelConfig:
        architecture = fields.get("general.architecture")
        if architecture not in _ARCHITECTURES:
            raise UnsupportedModel(
                f"{self.path} has architecture {architecture!r}, which is not supported; "
                f"known are {', '.join(_ARCHITECTURES)}"
            )
        prefix = f"{architecture}."
        own = {
            name.removeprefix(prefix): value
            for name, value in fields.items()
            if name.startswith(prefix)
        }
        settings = Settings(f"{self.path} ({architecture})", own)
        config = self._config_from(architecture, settings)
        for key, value in settings.unread().items():
            # 0 and false switch a feature off.
            if key not in _HARMLESS and value:
                raise UnsupportedModel(
                    f"{self.path} has {prefix}{key}={reprlib.repr(value)}, which would not be "
                    "computed: it is a variant of the architecture that is not supported"
                )
        return config

    def _config_from(self, architecture: str, settings: Settings) -> ModelConfig:
        num_heads = settings.integer("attention.head_count")
        num_layers = settings.integer("block_count", at_most=MAX_NUM_LAYERS)
        hidden_size = settings.integer("embedding_length")
        head_dim = settings.integer("attention.key_length", default=hidden_size // num_heads)
        for key in ("rope.dimension_count", "attention.value_length"):
            if settings.integer(key, default=head_dim) != head_dim:
                raise UnsupportedModel(
                    f"{self.path} has heads of {head_dim} and {architecture}.{key}="
                    f"{settings.get(key)}: other sizes are not supported"
                )
        if not settings.boolean("attention.causal", default=True):
            raise UnsupportedModel(f"{self.path}: attention that is not causal is not supported")
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None:
            raise MissingWeights(f"{self.path} has no tensor 'token_embd.weight'")
        window = settings.integer("attention.sliding_window", default=0, at_least=0)
        return ModelConfig(
            model_type=architecture,
            vocab_size=int(embedding.shape[1]),
            hidden_size=hidden_size,
            intermediate_size=settings.integer("feed_forward_length"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=settings.integer("attention.head_count_kv", default=num_heads),
            head_dim=head_dim,
            max_position_embeddings=settings.integer("context_length"),
            rms_norm_eps=settings.number("attention.layer_norm_rms_epsilon"),
            rope=self._rope(settings),
            tie_word_embeddings="output.weight" not in self._tensors,
            qkv_bias="blk.0.attn_q.bias" in self._tensors,
            output_bias="blk.0.attn_output.bias" in self._tensors,
            qk_norm="blk.0.attn_q_norm.weight" in self._tensors,
            windows=(window or None,) * num_layers,
        )

    def _rope(self, settings: Settings) -> RopeConfig:
        # As in llama.cpp: scaling is linear unless a type is named, and had another key once.
        kind = settings.get("rope.scaling.type", "linear")
        if kind not in ("none", "linear"):
            raise UnsupportedModel(
                f"{self.path}: rope scaling type {kind!r} is not supported; known are none, linear"
            )
        old_factor = settings.number("rope.scale_linear", default=1.0)
        factor = settings.number("rope.scaling.factor", default=old_factor)
        return RopeConfig(
            theta=settings.number("rope.freq_base", default=RopeConfig().theta),
            linear_factor=factor if kind == "linear" else 1.0,
            frequency_factors=self._frequency_factors(),
        )

    def _frequency_factors(self) -> tuple[float, ...] | None:
        name = "rope_freqs.weight"
        if name not in self:
            return None
        factors = self.read(name)
        if factors.dim() != 1:
            raise UnsupportedModel(
                f"{self.path}: tensor {name!r} has shape {tuple(factors.shape)}, but a list of "
                "factors is called for"
            )
        return tuple(factors.tolist())


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
