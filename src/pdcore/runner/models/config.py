"""The shape of a Llama-family decoder, read from a Hugging Face ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from pdcore.errors import ConfigError, UnsupportedModel

__all__ = ["MODEL_TYPES", "Llama3Scaling", "ModelConfig", "RopeConfig", "config_from_hf"]

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""The values of ``model_type`` that `config_from_hf` knows."""


@attrs.frozen(kw_only=True)
class Llama3Scaling:
    """How Llama 3 stretches its rotary wavelengths to longer contexts.

    Args:
        factor: divisor of the frequencies whose wavelength is long.
        low_freq_factor, high_freq_factor: bounds of the band that is blended, as fractions of the
            original context.
        original_max_position_embeddings: the context that the model was first trained with.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@attrs.frozen(kw_only=True)
class RopeConfig:
    """Rotary position embedding (Su et al., 2021, "RoFormer").

    Args:
        theta: base of the geometric series of wavelengths.
        linear_factor: divisor of every frequency; 1 leaves them alone.
        llama3: Llama 3's scaling, or None.
        frequency_factors: divisors, one for each frequency, as GGUF files carry them; or None.
    """

    theta: float = 10_000.0
    linear_factor: float = 1.0
    llama3: Llama3Scaling | None = None
    frequency_factors: tuple[float, ...] | None = attrs.field(default=None, repr=False)


@attrs.frozen(kw_only=True)
class ModelConfig:
    """What the decoder must know to be built. One class for all of `MODEL_TYPES`.

    Args:
        model_type: one of `MODEL_TYPES`.
        vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim:
            the shape.
        max_position_embeddings: the longest context the model was trained for.
        rms_norm_eps: added to the mean square in every norm.
        rope: the position embedding.
        tie_word_embeddings: whether the output projection is the embedding table.
        qkv_bias, output_bias: whether the attention projections have biases.
        qk_norm: whether queries and keys are normalised per head.
        windows: one for each layer: how many tokens back a token sees, itself included, or None.

    Raises:
        ConfigError: the numbers do not fit together.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]

    def __attrs_post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly: "
                "num_attention_heads must be a multiple of num_key_value_heads"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim}: rotary embedding needs an even number")
        if len(self.windows) != self.num_layers:
            raise ConfigError(
                f"{len(self.windows)} windows were given for {self.num_layers} layers"
            )

    @property
    def sliding_window(self) -> int | None:
        """The window when all layers have the same one; None when any layer sees further."""
        first = self.windows[0]
        return first if all(window == first for window in self.windows) else None


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the contents of a Hugging Face ``config.json``, of transformers 4 or 5.

    Raises:
        UnsupportedModel: the model type, or a feature that it switches on, is not known here.
        ConfigError: a key is missing or out of its range.
    """
    model_type = raw.get("model_type")
    if model_type not in MODEL_TYPES:
        raise UnsupportedModel(
            f"model_type={model_type!r} is not supported; known are {', '.join(MODEL_TYPES)}"
        )
    _refuse_unknown_features(raw)
    num_layers = _positive(raw, "num_hidden_layers")
    num_heads = _positive(raw, "num_attention_heads")
    hidden_size = _positive(raw, "hidden_size")
    attention_bias = bool(raw.get("attention_bias"))
    return ModelConfig(
        model_type=model_type,
        vocab_size=_positive(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_positive(raw, "num_key_value_heads", default=num_heads),
        head_dim=_positive(raw, "head_dim", default=_head_dim(model_type, hidden_size, num_heads)),
        max_position_embeddings=_positive(raw, "max_position_embeddings"),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_rope(raw),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias or model_type == "qwen2",
        output_bias=attention_bias and model_type != "qwen2",
        qk_norm=model_type == "qwen3",
        windows=_windows(raw, model_type, num_layers),
    )


def _positive(raw: Mapping[str, Any], key: str, *, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json has {key}={raw.get(key)!r}: it must be an integer >= 1")
    return value


def _head_dim(model_type: str, hidden_size: int, num_heads: int) -> int:
    # Qwen3 fixes the head size; the others divide the hidden size.
    return 128 if model_type == "qwen3" else hidden_size // num_heads


def _refuse_unknown_features(raw: Mapping[str, Any]) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f"hidden_act={activation!r} is not supported; only 'silu' is")
    if raw.get("mlp_bias"):
        raise UnsupportedModel("mlp_bias=true is not supported")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method")
        raise UnsupportedModel(
            f"weights quantized with {method!r} are not supported in safetensors folders; "
            "use the unquantized checkpoint or a GGUF file"
        )


def _rope(raw: Mapping[str, Any]) -> RopeConfig:
    # transformers 5 keeps theta and scaling in one mapping, 4 in two keys.
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    if float(scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1) != 1:
        raise UnsupportedModel("partial_rotary_factor other than 1 is not supported")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, linear_factor=float(scaling["factor"]))
    if kind == "llama3":
        fields = attrs.fields(Llama3Scaling)
        missing = [field.name for field in fields if field.name not in scaling]
        if missing:
            raise ConfigError(f"the llama3 rope scaling lacks {', '.join(missing)}")
        return RopeConfig(
            theta=theta, llama3=Llama3Scaling(**{f.name: scaling[f.name] for f in fields})
        )
    raise UnsupportedModel(
        f"rope scaling type {kind!r} is not supported; known are default, linear, llama3"
    )


def _windows(raw: Mapping[str, Any], model_type: str, num_layers: int) -> tuple[int | None, ...]:
    if model_type == "mistral":
        return (raw.get("sliding_window", 4096),) * num_layers
    if model_type == "llama" or not raw.get("use_sliding_window"):
        return (None,) * num_layers
    window = raw.get("sliding_window", 4096)
    layer_types = raw.get("layer_types")
    if layer_types is None:
        first = raw.get("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
