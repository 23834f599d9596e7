"""The shape of a Llama-family decoder, read from a Hugging Face ``config.json``."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

import attrs

from pdcore.errors import ConfigError, UnsupportedModel
from pdcore.runner.models.settings import Settings

__all__ = [
    "MAX_NUM_LAYERS",
    "MODEL_TYPES",
    "Llama3Scaling",
    "ModelConfig",
    "RopeConfig",
    "config_from_hf",
]

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""The values of ``model_type`` that `config_from_hf` knows."""

MAX_NUM_LAYERS = 10_000
"""Far above any model: a damaged count is refused before anything of its length is made."""


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
        ConfigError: a key is missing, of the wrong kind or out of its range.
    """
    settings = Settings("config.json", raw)
    model_type = settings.get("model_type")
    if model_type not in MODEL_TYPES:
        raise UnsupportedModel(
            f"model_type={model_type!r} is not supported; known are {', '.join(MODEL_TYPES)}"
        )
    _refuse_unknown_features(settings)
    num_layers = settings.integer("num_hidden_layers", at_most=MAX_NUM_LAYERS)
    num_heads = settings.integer("num_attention_heads")
    hidden_size = settings.integer("hidden_size")
    attention_bias = settings.boolean("attention_bias")
    # Unlike most keys, null is an error here, to transformers as well.
    default_eps = None if "rms_norm_eps" in raw else 1e-6
    return ModelConfig(
        model_type=model_type,
        vocab_size=settings.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=settings.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=settings.integer("num_key_value_heads", default=num_heads),
        head_dim=settings.integer(
            "head_dim", default=_head_dim(model_type, hidden_size, num_heads)
        ),
        max_position_embeddings=settings.integer("max_position_embeddings"),
        rms_norm_eps=settings.number("rms_norm_eps", default=default_eps),
        rope=_rope(settings),
        tie_word_embeddings=settings.boolean("tie_word_embeddings"),
        qkv_bias=attention_bias or model_type == "qwen2",
        output_bias=attention_bias and model_type != "qwen2",
        qk_norm=model_type == "qwen3",
        windows=_windows(settings, model_type, num_layers),
    )


def _head_dim(model_type: str, hidden_size: int, num_heads: int) -> int:
    # Qwen3 fixes the head size; the others divide the hidden size.
    return 128 if model_type == "qwen3" else hidden_size // num_heads


def _refuse_unknown_features(settings: Settings) -> None:
    activation = settings.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f"hidden_act={activation!r} is not supported; only 'silu' is")
    if settings.boolean("mlp_bias"):
        raise UnsupportedModel("mlp_bias=true is not supported")
    if settings.get("quantization_config"):
        method = settings.mapping("quantization_config").get("quant_method")
        raise UnsupportedModel(
            f"weights quantized with {method!r} are not supported in safetensors folders; "
            "use the unquantized checkpoint or a GGUF file"
        )


def _rope(settings: Settings) -> RopeConfig:
    # transformers 5 keeps theta and scaling in one mapping, 4 in two keys. When both mappings are
    # there, transformers takes the older one alone.
    has_old = bool(settings.get("rope_scaling"))
    scaling = settings.mapping("rope_scaling" if has_old else "rope_parameters")
    theta = scaling.number(
        "rope_theta", default=settings.number("rope_theta", default=RopeConfig().theta)
    )
    share = settings.number("partial_rotary_factor", default=1.0)
    if scaling.number("partial_rotary_factor", default=share) != 1:
        raise UnsupportedModel("partial_rotary_factor other than 1 is not supported")
    if any(isinstance(value, Mapping) for value in scaling.values.values()):
        raise UnsupportedModel(f"{scaling.where} differs by layer, which is not supported")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, linear_factor=scaling.number("factor"))
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            llama3=Llama3Scaling(
                factor=scaling.number("factor"),
                low_freq_factor=scaling.number("low_freq_factor"),
                high_freq_factor=scaling.number("high_freq_factor"),
                original_max_position_embeddings=scaling.integer(
                    "original_max_position_embeddings"
                ),
            ),
        )
    raise UnsupportedModel(
        f"rope scaling type {kind!r} is not supported; known are default, linear, llama3"
    )


def _windows(settings: Settings, model_type: str, num_layers: int) -> tuple[int | None, ...]:
    window = _window(settings, model_type)
    kinds = settings.get("layer_types")
    if kinds is None:
        is_qwen = model_type.startswith("qwen")
        first = settings.integer("max_window_layers", default=28, at_least=0) if is_qwen else 0
        return tuple(window if layer >= first else None for layer in range(num_layers))
    _check_layer_types(kinds, num_layers)
    if window is None and "sliding_attention" in kinds and model_type != "llama":
        raise ConfigError(
            "config.json has 'sliding_attention' among its layer_types but no window: set "
            "sliding_window (and use_sliding_window for Qwen), or make the layers 'full_attention'"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _window(settings: Settings, model_type: str) -> int | None:
    if model_type == "llama":  # knows no window, whatever its config says
        return None
    if model_type != "mistral" and not settings.boolean("use_sliding_window"):
        return None
    # null switches the window off; without the key transformers has a default.
    if settings.values.get("sliding_window", 4096) is None:
        return None
    return settings.integer("sliding_window", default=4096)


def _check_layer_types(kinds: object, num_layers: int) -> None:
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ConfigError(
            f"config.json has layer_types={reprlib.repr(kinds)}: it must be a list of {num_layers}"
        )
    known = ("full_attention", "sliding_attention")
    unknown = [kind for kind in kinds if kind not in known]
    if unknown:
        raise UnsupportedModel(
            f"layer_types with {unknown[0]!r} are not supported; known are {', '.join(known)}"
        )
