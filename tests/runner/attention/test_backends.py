"""Attention backends against attention by its definition, over caches full of NaN."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attention_cases import INTERPRETED_CASES, make_case
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcore.errors import ConfigError
from pdcore.runner.attention import AttentionShape, resolve_attention_backend
from pdcore.runner.attention.torch_backend import TorchAttentionBackend

HERE = Path(__file__).parent


class GatheringBackend(TorchAttentionBackend):
    """The torch backend as it computes where there are no sparse products."""

    _is_sparse = False


TORCH_BACKENDS = [TorchAttentionBackend, GatheringBackend]


def _shape(**changes: object) -> AttentionShape:
    settings = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "block_size": 4,
        "dtype": "float32",
        "device": "cpu",
        "windows": (None,),
    }
    return AttentionShape(**{**settings, **changes})


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    decodes=st.lists(st.integers(0, 40), max_size=4),
    chunks=st.lists(st.tuples(st.integers(0, 30), st.integers(2, 20)), max_size=3),
    group=st.sampled_from([1, 2, 3]),
    block_size=st.sampled_from([1, 4, 16]),
    windows=st.sampled_from([(None,), (5,), (None, 7), (16, 3)]),
)
def test_torch_backend_matches_the_definition(
    backend: type[TorchAttentionBackend],
    seed: int,
    decodes: list[int],
    chunks: list[tuple[int, int]],
    group: int,
    block_size: int,
    windows: tuple[int | None, ...],
) -> None:
    """Any mix of decodes and chunks, any grouping of heads, block size and windows."""
    sequences = [(before, 1) for before in decodes] + chunks
    if not sequences:
        return
    case = make_case(
        seed=seed,
        sequences=sequences,
        num_heads=2 * group,
        num_kv_heads=2,
        block_size=block_size,
        windows=windows,
    )
    with torch.inference_mode():
        torch.testing.assert_close(case.run(backend), case.expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_torch_backend_runs_half_precision(
    dtype: str, backend: type[TorchAttentionBackend]
) -> None:
    """In 16-bit types the result is within their rounding."""
    case = make_case(seed=1, sequences=[(20, 1), (11, 1), (9, 12)], dtype=dtype)
    with torch.inference_mode():
        torch.testing.assert_close(case.run(backend), case.expected, rtol=0, atol=2e-2)


def test_triton_kernel_matches_the_definition_under_the_interpreter() -> None:
    """The kernel, interpreted on a CPU over a cache with gaps in its strides, gives the answer."""
    pytest.importorskip("triton")
    script = HERE / "attention_cases.py"
    found = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    differences = json.loads(found.stdout)
    assert set(INTERPRETED_CASES) == set(differences)
    for name, difference in differences.items():
        assert difference < (2e-2 if name == "bfloat16" else 2e-6), name


_COMPILE = """
import warnings
warnings.simplefilter("ignore")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from pdcore.runner.attention.triton_kernels import attend_kernel, write_kernel

POINTERS = {"query", "key", "value", "key_cache", "value_cache", "seen"}
INDICES = {"tile_sequences", "tile_starts", "cu_seqlens", "seq_lens", "block_tables"}

def kind(name):
    if name in POINTERS:
        return "*bf16"
    if name in INDICES:
        return "*i32"
    if name in ("slot_blocks", "slot_offsets"):
        return "*i64"
    if name == "scale":
        return "fp32"
    return "i32" if name.islower() else "constexpr"

sizes = dict(GROUP=3, HEAD_DIM=64, BLOCK_SIZE=16, WINDOW=128, BLOCK_M=64, BLOCK_N=32, BLOCK_D=64,
             WIDEN=False)
# Without tiles of chunks, the launch is one of decodes.
no_tiles = {"tile_sequences": None, "tile_starts": None}
for kernel, more in ((attend_kernel, {}), (attend_kernel, no_tiles), (write_kernel, {})):
    constants = {name: sizes[name] for name in kernel.arg_names if name in sizes} | more
    signature = {
        name: "constexpr" if name in constants else kind(name) for name in kernel.arg_names
    }
    source = ASTSource(kernel, signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert compiled.asm["cubin"]
"""


def test_triton_kernels_compile_for_a_gpu_that_is_not_there() -> None:
    """Both kernels pass Triton's compiler, which is stricter than its interpreter."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", _COMPILE], env=environment, check=True, timeout=240)


def test_default_backend_follows_the_device() -> None:
    """Triton on CUDA, torch elsewhere; a class is taken as it is."""
    assert resolve_attention_backend(None, device="cpu") is TorchAttentionBackend
    assert resolve_attention_backend("torch", device="cuda") is TorchAttentionBackend
    assert resolve_attention_backend(TorchAttentionBackend, device="cpu") is TorchAttentionBackend
    pytest.importorskip("triton")
    assert resolve_attention_backend(None, device="cuda").name == "triton"


def test_unknown_backend_lists_the_known() -> None:
    """A wrong name is a ConfigError that says which names exist."""
    with pytest.raises(ConfigError, match="'flash' is unknown; known are torch, triton"):
        resolve_attention_backend("flash", device="cpu")


def test_triton_on_a_cpu_is_refused_with_the_remedy() -> None:
    """Without the interpreter, the Triton backend on a CPU is a ConfigError at construction."""
    pytest.importorskip("triton")
    backend = resolve_attention_backend("triton", device="cpu")
    with pytest.raises(ConfigError, match="use 'torch'"):
        backend(_shape())


def test_unsupported_dtype_is_refused_at_construction() -> None:
    """What a backend cannot run, it says when it is built."""
    with pytest.raises(ConfigError, match="dtype='uint64'; it supports bfloat16"):
        TorchAttentionBackend(_shape(dtype="uint64"))


def test_a_cache_of_another_shape_or_with_gaps_is_refused() -> None:
    """The torch backend takes the one layout it was built for, contiguous."""
    backend = TorchAttentionBackend(_shape())
    with pytest.raises(ConfigError, match="was built for"):
        backend.bind(torch.zeros(3, 1, 2, 8, 2, 16))
    with pytest.raises(ConfigError, match="needs a contiguous KV cache"):
        backend.bind(torch.zeros(3, 2, 2, 4, 2, 16)[:, :1])
