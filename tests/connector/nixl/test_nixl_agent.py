"""Importing NIXL: late, quietly, and with a clear error when it is missing."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pdcore.connector.nixl.agent import load_nixl
from pdcore.errors import MissingExtra


@pytest.fixture
def fresh_import() -> Iterator[None]:
    """Forget that NIXL was imported, before and after."""
    load_nixl.cache_clear()
    yield
    load_nixl.cache_clear()


@pytest.mark.usefixtures("fresh_import")
def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without NIXL the error says what to install."""
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(MissingExtra, match=r"pip install 'pdcore\[nixl\]'"):
        load_nixl()


@pytest.mark.nixl
@pytest.mark.usefixtures("fresh_import")
def test_logging_is_left_as_it_was() -> None:
    """NIXL's import turns off error reports of logging; ours puts them back."""
    before = logging.raiseExceptions
    load_nixl()
    assert logging.raiseExceptions is before


def test_the_connector_imports_neither_nixl_nor_torch() -> None:
    """Building and configuring a connector needs neither library."""
    code = (
        "import sys\n"
        "from pdcore.connector.nixl import NixlConfig, NixlConnector\n"
        "connector = NixlConnector(NixlConfig(block_size=4))\n"
        "connector.scheduler_side(), connector.worker_side()\n"
        "sys.exit(len({'nixl', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
