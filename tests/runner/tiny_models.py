"""Random models of every architecture, small enough for a test, saved by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
