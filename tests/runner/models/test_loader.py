"""Reading checkpoints: shards, GGUF, and every way in which a checkpoint can be wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import SHAPE, VARIANTS, make_tiny_model, save_tiny_model, write_gguf

from pdcore.errors import ConfigError, MissingWeights, UnsupportedModel
from pdcore.runner.models import config_from_hf, load_model
from pdcore.runner.models.llama import LlamaModel

BASE = {**SHAPE, "model_type": "llama"}
SLIDING = {
    "model_type": "qwen2",
    "use_sliding_window": True,
    "sliding_window": 8,
    "max_window_layers": 1,
}


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


@pytest.mark.parametrize(
    ("variant", "architecture"), [("llama", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")]
)
def test_gguf_and_safetensors_of_one_model_are_equal(
    variant: str, architecture: str, tmp_path: Path
) -> None:
    """Names, reordered rows, biases and head norms of GGUF come out as in the HF folder."""
    folder = load_model(save_tiny_model(variant, tmp_path / "hf"))
    write_gguf(tmp_path / "model.gguf", variant, architecture)
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
    (checkpoint / "model.safetensors").rename(checkpoint / "model-1.safetensors")
    _write_index(checkpoint, "model-1.safetensors", "model-2.safetensors")
    with pytest.raises(MissingWeights, match=r"lacks model-2\.safetensors"):
        load_model(checkpoint)
    (checkpoint / "model.safetensors.index.json").unlink()
    with pytest.raises(MissingWeights, match=r"lacks model\.safetensors"):
        load_model(checkpoint)
    (checkpoint / "config.json").unlink()
    with pytest.raises(MissingWeights, match=r"has no config\.json"):
        load_model(checkpoint)


@pytest.mark.parametrize("name", ["../other.safetensors", "/other.safetensors", 5])
def test_an_index_reads_within_its_folder_alone(checkpoint: Path, name: object) -> None:
    """A shard elsewhere is refused, whether or not it is there."""
    (checkpoint / "model.safetensors").rename(checkpoint.parent / "other.safetensors")
    _write_index(checkpoint, name)
    with pytest.raises(MissingWeights, match=r"not in its folder|is damaged"):
        load_model(checkpoint)


def test_a_single_file_goes_before_an_index(checkpoint: Path) -> None:
    """As for transformers: the index of another save is not looked at."""
    expected = load_model(checkpoint)
    _write_index(checkpoint, "gone.safetensors")
    _assert_same(expected, load_model(checkpoint))


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64])
def test_weights_that_are_not_floating_point_are_refused(
    checkpoint: Path, dtype: torch.dtype
) -> None:
    """They are not cast: what their numbers stand for is not known."""
    name = "model.layers.1.mlp.up_proj.weight"
    _edit_weights(checkpoint, name, lambda weight: weight.to(dtype))
    with pytest.raises(UnsupportedModel, match=rf"{name}' is of {dtype}"):
        load_model(checkpoint)


def test_tied_embeddings_with_another_projection_are_refused(tmp_path: Path) -> None:
    """transformers 4 and 5 differ on which tensor is right; the same one twice is no question."""
    folder = save_tiny_model("llama", tmp_path)
    embeddings = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    _edit_config(folder, tie_word_embeddings=True)
    with pytest.raises(UnsupportedModel, match=r"ties its word embeddings but has another"):
        load_model(folder)
    _edit_weights(folder, "lm_head.weight", lambda _: embeddings)
    load_model(folder)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_truncated_safetensors_is_named(checkpoint: Path, share: float) -> None:
    """A file cut anywhere is reported as truncated or damaged."""
    _cut(checkpoint / "model.safetensors", share)
    with pytest.raises(MissingWeights, match="truncated or damaged"):
        load_model(checkpoint)


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
        ({"num_hidden_layers": 10**12}, ConfigError, "num_hidden_layers=1000000000000"),
        ({"tie_word_embeddings": "false"}, ConfigError, "tie_word_embeddings='false'"),
        ({"rms_norm_eps": -1}, ConfigError, "rms_norm_eps=-1"),
        ({"rms_norm_eps": float("nan")}, ConfigError, "rms_norm_eps=nan"),
        ({"rope_theta": -1.0}, ConfigError, "rope_theta=-1.0"),
        ({"rope_scaling": {"rope_theta": float("inf")}}, ConfigError, "rope_theta=inf"),
        ({"rope_scaling": {"type": "linear", "factor": "8"}}, ConfigError, "factor='8'"),
        ({"rope_scaling": "linear"}, ConfigError, "rope_scaling='linear'"),
        ({"rope_parameters": {"full_attention": {}}}, UnsupportedModel, "differs by layer"),
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "dynamic"}},
            UnsupportedModel,
            "'dynamic' is not supported",
        ),
        ({"layer_types": ["chunked_attention"] * 2}, UnsupportedModel, "'chunked_attention'"),
        ({"layer_types": ["full_attention"]}, ConfigError, "must be a list of 2"),
        (
            {**SLIDING, "layer_types": ["sliding_attention"] * 2, "use_sliding_window": False},
            ConfigError,
            "no window",
        ),
        ({**SLIDING, "sliding_window": 0}, ConfigError, "sliding_window=0"),
        ({**SLIDING, "sliding_window": -5}, ConfigError, "sliding_window=-5"),
        ({**SLIDING, "sliding_window": "8"}, ConfigError, "sliding_window='8'"),
        ({**SLIDING, "max_window_layers": "1"}, ConfigError, "max_window_layers='1'"),
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


def test_an_old_mapping_of_rope_goes_before_a_new_one() -> None:
    """As for transformers, when both are there."""
    new, old = {"rope_type": "default"}, {"type": "linear", "factor": 4.0}
    config = config_from_hf({**BASE, "rope_parameters": new, "rope_scaling": old})
    assert config.rope.linear_factor == 4.0


@pytest.mark.parametrize("model_type", ["mistral", "qwen2", "qwen3"])
def test_layer_types_say_where_the_window_is(model_type: str) -> None:
    """Layer by layer, for every type that has a window; a Llama has none."""
    kinds = ["full_attention", "sliding_attention"]
    raw = {**BASE, **SLIDING, "layer_types": kinds}
    assert config_from_hf({**raw, "model_type": model_type}).windows == (None, 8)
    assert config_from_hf({**raw, "model_type": "llama"}).windows == (None, None)


def test_malformed_config_json_is_a_config_error(checkpoint: Path) -> None:
    """Text that is not a JSON object is refused."""
    for text in ("{", "[]"):
        (checkpoint / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=r"config\.json"):
            load_model(checkpoint)


def _edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _edit_weights(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    save_file({**weights, name: change(weights[name]).clone()}, path)


def _write_index(folder: Path, *shards: object) -> None:
    text = json.dumps({"weight_map": {str(shard): shard for shard in shards}})
    (folder / "model.safetensors.index.json").write_text(text)


def _cut(path: Path, share: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_type": "linear"}},
        {"rope_parameters": {"rope_type": "linear", "factor": 0}},
        {"rope_parameters": {"rope_theta": 0}},
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
