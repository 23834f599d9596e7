"""GGUF files: nothing of them is passed over in silence, and no damage costs more than an error."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGUFValueType
from tiny_models import write_gguf

from pdcore.errors import ConfigError, MissingWeights, UnsupportedModel
from pdcore.runner.models import load_model
from pdcore.runner.models.llama import LlamaModel

NAN = float("nan")


def _load(path: Path, **parts: Any) -> LlamaModel:
    return load_model(write_gguf(path / "model.gguf", "llama", "llama", **parts))


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.999])
def test_truncated_gguf_is_named(tmp_path: Path, share: float) -> None:
    """A file cut anywhere, in its metadata or its tensors, is truncated or damaged."""
    path = write_gguf(tmp_path / "model.gguf", "llama", "llama")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(MissingWeights, match="truncated or damaged"):
        load_model(path)


@pytest.mark.parametrize(
    ("kind", "length"),
    [
        (GGUFValueType.UINT32, 2**60),
        (GGUFValueType.BOOL, 2**40),
        (GGUFValueType.STRING, 2**60),
        (GGUFValueType.ARRAY, 2**60),
    ],
)
def test_an_array_longer_than_the_file_is_damage(
    tmp_path: Path, kind: GGUFValueType, length: int
) -> None:
    """It ends at the end of the file, whatever its length says."""
    path = tmp_path / "model.gguf"
    head = struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a"
    path.write_bytes(b"GGUF" + head + struct.pack("<IIQ", GGUFValueType.ARRAY, kind, length))
    with pytest.raises(MissingWeights, match="truncated or damaged"):
        load_model(path)


@pytest.mark.parametrize("offset", [0, 3, 2**63])
def test_tensors_out_of_their_places_are_damage(tmp_path: Path, offset: int) -> None:
    """Tensors follow each other: none lies over another, or beside its alignment."""
    path = write_gguf(tmp_path / "model.gguf", "llama", "llama")
    reader = gguf.GGUFReader(path, "r+")
    reader.tensors[1].field.parts[-1][0] = offset
    reader.data.flush()
    with pytest.raises(MissingWeights, match="truncated or damaged"):
        load_model(path)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("blk.0.ffn_up.bias", 96),
        ("blk.1.attn_output.bias", 48),
        ("blk.1.attn_q_norm.weight", 8),
        ("blk.2.attn_norm.weight", 48),
        ("output.bias", 128),
        ("rope_factors_long.weight", 4),
    ],
)
def test_tensors_that_nothing_computes_are_refused(tmp_path: Path, name: str, shape: int) -> None:
    """A tensor that is there changes the result, so passing it over would be wrong."""
    with pytest.raises(UnsupportedModel, match=name):
        _load(tmp_path, tensors={name: np.ones(shape, np.float32)})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.scale", 0.01),
        ("attention.causal", False),
        ("attention.value_length", 16),
        ("attention.sliding_window_pattern", [1, 0]),
        ("expert_count", 8),
        ("rope.dimension_count", 4),
        ("rope.scaling.type", "yarn"),
        ("rope.scaling.attn_factor", 0.5),
    ],
)
def test_metadata_that_nothing_computes_is_refused(tmp_path: Path, key: str, value: object) -> None:
    """Whatever metadata of the architecture is not known to be harmless."""
    with pytest.raises(UnsupportedModel, match=r"not be computed|not supported"):
        _load(tmp_path, metadata={key: value})


def test_metadata_that_changes_nothing_is_taken(tmp_path: Path) -> None:
    """What says the same in other words, or switches a feature off."""
    harmless = {
        "attention.causal": True,
        "attention.value_length": 8,
        "rope.dimension_count": 8,
        "expert_count": 0,
        "attention.scale": 0.0,
        "vocab_size": 128,
    }
    assert _load(tmp_path, metadata=harmless).config.windows == (None, None)


@pytest.mark.parametrize(
    ("metadata", "factor"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scale_linear": 4.0}, 4.0),
        ({"rope.scale_linear": 2.0, "rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, 1.0),
    ],
)
def test_linear_scaling_is_read_as_llama_cpp_does(
    tmp_path: Path, metadata: dict[str, object], factor: float
) -> None:
    """With a type or without, under its key of today or of old."""
    assert factor == _load(tmp_path, metadata=metadata).config.rope.linear_factor


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", 0),
        ("block_count", 2**31 - 1),
        ("block_count", 2.0),
        ("context_length", "128"),
        ("context_length", [128]),
        ("attention.head_count", [6, 6]),
        ("attention.head_count_kv", 0),
        ("attention.sliding_window", -3),
        ("attention.layer_norm_rms_epsilon", -1.0),
        ("attention.layer_norm_rms_epsilon", NAN),
        ("rope.freq_base", -1.0),
        ("rope.freq_base", NAN),
        ("rope.scaling.factor", "4"),
    ],
)
def test_metadata_out_of_its_range_is_named(tmp_path: Path, key: str, value: object) -> None:
    """A number of the wrong kind or size is an error that says which one it is."""
    with pytest.raises(ConfigError, match=f"has {key}=.*: it must be"):
        _load(tmp_path, metadata={key: value})


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        (np.ones((4, 4), np.float32), r"has shape \(4, 4\)"),
        (np.ones(4, np.int32), "I32 cannot be unpacked"),
        (np.zeros(4, np.float32), "not finite"),
        (np.ones(7, np.float32), "7 rope frequency factors"),
    ],
)
def test_frequency_factors_that_cannot_be_are_refused(
    tmp_path: Path, factors: np.ndarray, message: str
) -> None:
    """One finite number for each frequency, or an error at load."""
    with pytest.raises(ConfigError, match=message):
        _load(tmp_path, tensors={"rope_freqs.weight": factors})


def test_frequency_factors_are_unpacked(tmp_path: Path) -> None:
    """Of whatever type weights can be."""
    config = _load(tmp_path, tensors={"rope_freqs.weight": np.full(4, 2, np.float16)}).config
    assert config.rope.frequency_factors == (2.0, 2.0, 2.0, 2.0)
