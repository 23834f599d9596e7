"""Reading checkpoints: shards, GGUF, and every way in which a checkpoint can be wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tiny_models import SHAPE, VARIANTS, make_tiny_model, save_tiny_model

from pdcore.errors import ConfigError, MissingWeights, UnsupportedModel
from pdcore.runner.models import config_from_hf, load_model
from pdcore.runner.models.llama import LlamaModel

BASE = {**SHAPE, "model_type": "llama"}


@pytest.fixture
def checkpoint(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy of the tiny Llama that a test may damage."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


def _tensors(model: LlamaModel) -> dict[str, torch.Tensor]:
    """All weights, by what they do to an input: packed ones have no elements to look at."""
    config = model.config
    hidden = torch.eye(config.hidden_size)
    inputs = {
        "qkv": hidden,
        "output": torch.eye(config.num_heads * config.head_dim),
        "gate_up": hidden,
        "down": torch.eye(config.intermediate_size),
        "attention_norm": hidden,
        "feed_forward_norm": hidden,
    }
    found = {"embed": model.embed_tokens}
    found |= {"norm": model.final_norm(hidden), "head": model.lm_head(hidden)}
    for index, layer in enumerate(model.layers):
        found |= {f"{index}.{name}": getattr(layer, name)(x) for name, x in inputs.items()}
        if layer.qk_norm is not None:
            found[f"{index}.qk_norm"] = layer.qk_norm
    return found


def _assert_same(expected: LlamaModel, actual: LlamaModel) -> None:
    expected_tensors, tensors = _tensors(expected), _tensors(actual)
    assert expected_tensors.keys() == tensors.keys()
    for name, tensor in expected_tensors.items():
        assert torch.equal(tensor, tensors[name]), name


def _write_gguf(path: Path, variant: str, architecture: str) -> None:
    """Store a tiny model as llama.cpp's converter would, unquantized."""
    model = make_tiny_model(variant)
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers
    )
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        for part, count in heads.items():
            if architecture == "llama" and part in name:
                values = _interleave(values, count)
        writer.add_tensor(
            names.get_name(name, try_suffixes=(".weight", ".bias")), np.ascontiguousarray(values)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleave(values: np.ndarray, num_heads: int) -> np.ndarray:
    halves = values.reshape(num_heads, 2, -1, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


@pytest.mark.parametrize(
    ("variant", "architecture"), [("llama", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")]
)
def test_gguf_and_safetensors_of_one_model_are_equal(
    variant: str, architecture: str, tmp_path: Path
) -> None:
    """Names, reordered rows, biases and head norms of GGUF come out as in the HF folder."""
    folder = load_model(save_tiny_model(variant, tmp_path / "hf"))
    _write_gguf(tmp_path / "model.gguf", variant, architecture)
    file = load_model(tmp_path / "model.gguf")
    _assert_same(folder, file)
    assert folder.config.rope == file.config.rope
    assert folder.config.head_dim == file.config.head_dim


def test_shards_equal_one_file(tmp_path: Path) -> None:
    """A checkpoint split over files that an index names loads as the whole one does."""
    whole = load_model(save_tiny_model("llama", tmp_path / "whole"))
    folder = save_tiny_model("llama", tmp_path / "shards", shard_bytes=40_000)
    assert len(list(folder.glob("*.safetensors"))) > 1
    _assert_same(whole, load_model(folder))


def test_fingerprint_tells_models_and_dtypes_apart(tiny_llama: Path, tmp_path: Path) -> None:
    """Equal for the same weights, different for other weights, shapes, rope or dtype."""
    fingerprint = load_model(tiny_llama).fingerprint
    assert fingerprint == load_model(tiny_llama).fingerprint
    others = {load_model(tiny_llama, dtype=torch.bfloat16).fingerprint}
    make_tiny_model("llama", seed=1).save_pretrained(tmp_path / "weights")
    others.add(load_model(tmp_path / "weights").fingerprint)
    for variant in ("llama, linear rope", "qwen3"):
        others.add(load_model(save_tiny_model(variant, tmp_path / variant)).fingerprint)
    assert len(others) == 4
    assert fingerprint not in others


def test_unknown_model_type_lists_the_known(checkpoint: Path) -> None:
    """An architecture that is not known is refused by name."""
    _edit_config(checkpoint, model_type="mamba")
    with pytest.raises(UnsupportedModel, match="'mamba' is not supported; known are llama, "):
        load_model(checkpoint)


def test_missing_tensor_is_named(checkpoint: Path) -> None:
    """A config that calls for more layers than the file has names the first absent tensor."""
    _edit_config(checkpoint, num_hidden_layers=3)
    with pytest.raises(MissingWeights, match=r"no tensor 'model\.layers\.2\.input_layernorm"):
        load_model(checkpoint)


def test_missing_files_are_named(checkpoint: Path, tmp_path: Path) -> None:
    """An absent checkpoint, config, weight file or shard is named."""
    with pytest.raises(MissingWeights, match="nowhere does not exist"):
        load_model(tmp_path / "nowhere")
    (checkpoint / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}})
    )
    with pytest.raises(MissingWeights, match=r"lacks model-2\.safetensors"):
        load_model(checkpoint)
    (checkpoint / "model.safetensors.index.json").unlink()
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(MissingWeights, match=r"lacks model\.safetensors"):
        load_model(checkpoint)
    (checkpoint / "config.json").unlink()
    with pytest.raises(MissingWeights, match=r"has no config\.json"):
        load_model(checkpoint)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_truncated_safetensors_is_named(checkpoint: Path, share: float) -> None:
    """A file cut anywhere is reported as truncated or damaged."""
    _cut(checkpoint / "model.safetensors", share)
    with pytest.raises(MissingWeights, match="truncated or damaged"):
        load_model(checkpoint)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.999])
def test_truncated_gguf_is_named(tmp_path: Path, share: float) -> None:
    """A GGUF file cut anywhere, in its metadata or its tensors, is reported likewise."""
    path = tmp_path / "model.gguf"
    _write_gguf(path, "llama", "llama")
    _cut(path, share)
    with pytest.raises(MissingWeights, match="truncated or damaged"):
        load_model(path)


def test_tensor_of_another_shape_is_named(checkpoint: Path) -> None:
    """A tensor that the config contradicts is refused with both shapes."""
    _edit_config(checkpoint, intermediate_size=100)
    with pytest.raises(UnsupportedModel, match=r"gate_proj.* has shape \(96, 48\).*\(100, 48\)"):
        load_model(checkpoint)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    """Neither a folder nor a GGUF file."""
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(UnsupportedModel, match=r"neither a folder nor a \.gguf file"):
        load_model(tmp_path / "model.bin")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"rope_scaling": {"rope_type": "yarn"}}, UnsupportedModel, "'yarn' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3"}}, ConfigError, "lacks factor"),
        ({"hidden_act": "gelu"}, UnsupportedModel, "hidden_act='gelu'"),
        ({"mlp_bias": True}, UnsupportedModel, "mlp_bias"),
        ({"partial_rotary_factor": 0.5}, UnsupportedModel, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "fp8"}}, UnsupportedModel, "'fp8'"),
        ({"vocab_size": None}, ConfigError, "vocab_size=None"),
        ({"num_key_value_heads": 4}, ConfigError, "multiple of num_key_value_heads"),
        ({"head_dim": 7}, ConfigError, "head_dim=7"),
    ],
)
def test_unusable_configs_are_refused(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Every feature that is not run, and every number that cannot be, is a named error."""
    with pytest.raises(error, match=message):
        config_from_hf({**BASE, **changes})


def test_rope_is_read_from_old_and_new_configs() -> None:
    """Theta and scaling in two keys (transformers 4) or one mapping (5) mean the same."""
    scaling = VARIANTS["llama, llama3 rope"]["rope_parameters"]
    new = config_from_hf({**BASE, "rope_parameters": scaling})
    old = config_from_hf(
        {
            **BASE,
            "rope_theta": scaling["rope_theta"],
            "rope_scaling": {**scaling, "rope_theta": None},
        }
    )
    assert new == old
    assert new.rope.llama3 is not None


def test_malformed_config_json_is_a_config_error(checkpoint: Path) -> None:
    """Text that is not a JSON object is refused."""
    for text in ("{", "[]"):
        (checkpoint / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=r"config\.json"):
            load_model(checkpoint)


def _edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _cut(path: Path, share: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_type": "linear"}},
        {"rope_parameters": "x"},
        {"rms_norm_eps": None},
        {"num_hidden_layers": 10**30},
        {"num_attention_heads": 0},
    ],
)
def test_a_damaged_config_is_one_named_error(checkpoint: Path, change: dict[str, object]) -> None:
    """Whatever a reader stumbles over, the user sees one line that names the checkpoint."""
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError) as caught:
        load_model(checkpoint)
    assert "\n" not in str(caught.value)
