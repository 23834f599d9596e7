"""Scheduler halves of a prefill and a decode engine, talking over a real side channel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from nixl_halves import Half, half

from pdcore.connector.nixl.link import PeerLink


@pytest.fixture
def prefill() -> Iterator[Half]:
    """A prefill engine."""
    with half() as made:
        yield made


@pytest.fixture
def decode() -> Iterator[Half]:
    """A decode engine that loses patience soon."""
    with half(request_timeout_s=1.0) as made:
        yield made


@pytest.fixture
def notices(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The release notices that go out, by transfer id."""
    sent: list[str] = []
    release = PeerLink.release

    async def counted(link: PeerLink, transfer_id: str, reason: str) -> None:
        sent.append(transfer_id)
        await release(link, transfer_id, reason)

    monkeypatch.setattr(PeerLink, "release", counted)
    return sent
