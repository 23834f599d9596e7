"""The public surface: what is exported is there, documented, and complete."""

from __future__ import annotations

import importlib
import inspect
import pickle
import pkgutil

import pytest

import pdcore
import pdcore.abc
from pdcore import errors

PACKAGES = [
    "pdcore",
    "pdcore.abc",
    "pdcore.loop",
    "pdcore.messages",
    "pdcore.scheduler",
    "pdcore.kvcache",
    "pdcore.connector",
]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_exported_name_exists_and_is_documented(package: str) -> None:
    """Each name in __all__ resolves, and classes and functions have a docstring of their own."""
    module = importlib.import_module(package)
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__doc__, f"{package}.{name} has no docstring"


def test_abc_lists_every_interface() -> None:
    """A class with abstract methods in a base.py (or a hook class) is on the one page."""
    torch_free = (
        "pdcore.scheduler",
        "pdcore.kvcache",
        "pdcore.connector.base",
        "pdcore.runner.base",
        "pdcore.runner.executor.base",
        "pdcore.clock",
    )
    found = set()
    for info in pkgutil.walk_packages(pdcore.__path__, "pdcore."):
        if info.name.startswith(torch_free):
            module = importlib.import_module(info.name)
            found |= {
                name
                for name, value in vars(module).items()
                if inspect.isclass(value)
                and value.__module__ == info.name
                and inspect.isabstract(value)
            }
    # A policy has a default for every hook, so it is not abstract.
    assert found | {"SchedulingPolicy"} == set(pdcore.abc.__all__)


def test_every_error_is_in_the_tree_of_the_docstring() -> None:
    """The tree drawn in errors.py names each exception, below its base."""
    tree = errors.__doc__ or ""
    depth: dict[str, int] = {}
    for line in tree.splitlines():
        words = [word for word in line.replace("│", " ").split() if word.isidentifier()]
        if words and words[0] in errors.__all__:
            depth[words[0]] = line.index(words[0])
    assert set(depth) == set(errors.__all__)
    for name in errors.__all__:
        bases = [base.__name__ for base in getattr(errors, name).__bases__]
        if name != "PdcoreError":
            assert depth[name] == depth[bases[0]] + 4


def test_errors_with_numbers_survive_pickling() -> None:
    """An error that crosses a process keeps its numbers and its message."""
    copy = pickle.loads(pickle.dumps(errors.OutOfBlocks(5, 3)))
    assert (copy.needed, copy.available, str(copy)) == (5, 3, str(errors.OutOfBlocks(5, 3)))
