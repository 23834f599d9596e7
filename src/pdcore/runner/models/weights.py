"""Where weights come from: tensors by their Hugging Face names."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from pdcore.errors import MissingWeights

__all__ = ["SafetensorsSource", "WeightSource"]


class WeightSource(ABC):
    """Tensors of one checkpoint, named as in Hugging Face checkpoints."""

    path: Path

    @abstractmethod
    def __contains__(self, name: str) -> bool:
        """Whether the checkpoint has a tensor of this name."""

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """Return a tensor on the CPU, in whatever float type it is stored or unpacked to.

        Raises:
            MissingWeights: there is no such tensor, or its data is damaged.
        """

    @abstractmethod
    def unread(self) -> list[str]:
        """Return the tensors that nothing has read and that the model may need all the same."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the files."""


class SafetensorsSource(WeightSource):
    """A Hugging Face folder: ``model.safetensors`` or, without it, shards named by an index.

    Raises:
        MissingWeights: a file is absent, truncated or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._files = ExitStack()
        self._home: dict[str, Any] = {}
        try:
            for path in _safetensors_files(folder):
                with _damage_named(path):
                    handle = self._files.enter_context(safe_open(path, framework="pt"))
                    self._home.update(dict.fromkeys(handle.keys(), handle))
        except BaseException:
            self._files.close()
            raise

    def __contains__(self, name: str) -> bool:
        return name in self._home

    def read(self, name: str) -> Tensor:
        if name not in self._home:
            raise MissingWeights(
                f"{self.path} has no tensor {name!r}, which its config.json calls for"
            )
        with _damage_named(self.path):
            tensor: Tensor = self._home[name].get_tensor(name)
        return tensor

    def unread(self) -> list[str]:
        # config.json says what is computed; transformers passes over further tensors as well.
        return []

    def close(self) -> None:
        self._home.clear()
        self._files.close()


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise MissingWeights(
            f"{path} is truncated or damaged ({error}); download it again"
        ) from error


def _safetensors_files(folder: Path) -> list[Path]:
    # As for transformers, an index counts only where there is no single file.
    names = ["model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if index.exists() and not (folder / names[0]).exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            outside = [
                name for name in names if Path(name).is_absolute() or ".." in Path(name).parts
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise MissingWeights(f"{index} is damaged ({error!r}); download it again") from error
        if outside:
            raise MissingWeights(
                f"{index} names {outside[0]!r}, which is not in its folder: put the file there and "
                "name it by its path within the folder"
            )
    paths = [folder / name for name in names]
    absent = [path.name for path in paths if not path.exists()]
    if absent:
        raise MissingWeights(f"{folder} lacks {', '.join(absent)}")
    return paths
