"""What the tests of pushes between whole engines share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from nixl_pushes import SlowWire, decode_engine, prefill_engine
from nixl_whole_engine import WholeEngine


@pytest.fixture
def prefill() -> Iterator[WholeEngine]:
    """A prefill engine."""
    with closing(prefill_engine(lease_s=5)) as engine:
        yield engine


@pytest.fixture
def decode() -> Iterator[WholeEngine]:
    """A decode engine with staging memory, which gives writers up after 4 s of silence."""
    with closing(decode_engine(lease_s=4, request_timeout_s=2.0)) as engine:
        yield engine


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowWire]:
    """A wire on which nothing gets through before it is cleared."""
    wire = SlowWire(monkeypatch)
    yield wire
    wire.clear()
