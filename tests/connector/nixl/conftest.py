"""What the tests over real NIXL share."""

from __future__ import annotations

import pytest


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Make both sides speak TCP, where a read needs the peer's help and a hung peer hangs it."""
    environment = {"UCX_TLS": "tcp"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return environment
