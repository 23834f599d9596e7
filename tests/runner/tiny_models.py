"""Random models of every architecture, small enough for a test, saved by transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama, tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama, llama3 rope": {"model_type": "llama", "rope_parameters": LLAMA3_ROPE},
    "llama, linear rope": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 5e4, "factor": 4.0},
    },
    "llama, biases": {"model_type": "llama", "attention_bias": True},
    "mistral, window": {"model_type": "mistral", "sliding_window": 8, "head_dim": 16},
    "mistral, no window": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2"},
    "qwen2, window on one layer": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
}


def make_tiny_model(variant: str, *, seed: int = 0, **changes: Any) -> Any:
    """Build a random model of a variant; norms and biases are random too."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**{**SHAPE, **VARIANTS[variant], **changes})
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


def save_tiny_model(variant: str, folder: Path, *, shard_bytes: int | None = None) -> Path:
    """Save a random model as a Hugging Face folder, in shards if asked."""
    model = make_tiny_model(variant)
    model.save_pretrained(folder, max_shard_size=shard_bytes or "1GB")
    return folder


def write_gguf(
    path: Path,
    variant: str,
    architecture: str,
    *,
    metadata: Mapping[str, Any] = {},
    tensors: Mapping[str, np.ndarray] = {},
) -> Path:
    """Store a tiny model as llama.cpp's converter would, unquantized.

    Args:
        metadata: values of the architecture to write besides or instead of those of the model.
        tensors: further tensors to write.
    """
    model = make_tiny_model(variant)
    config = model.config
    values: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    }
    if getattr(config, "head_dim", None):
        values["attention.key_length"] = config.head_dim
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (values | dict(metadata)).items():
        writer.add_key_value(f"{architecture}.{key}", value, gguf.GGUFValueType.get_type(value))
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers
    )
    for name, tensor in model.state_dict().items():
        weight = tensor.numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        for part, count in heads.items():
            if architecture == "llama" and part in name:
                weight = _interleave(weight, count)
        writer.add_tensor(
            names.get_name(name, try_suffixes=(".weight", ".bias")), np.ascontiguousarray(weight)
        )
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _interleave(values: np.ndarray, num_heads: int) -> np.ndarray:
    halves = values.reshape(num_heads, 2, -1, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)
