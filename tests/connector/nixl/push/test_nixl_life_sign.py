"""A port that shows that its process lives."""

from __future__ import annotations

import asyncio
from contextlib import closing

from pdcore.connector.nixl.push.life_sign import LifeSign, is_refused


def test_it_is_seen_however_often_somebody_looks() -> None:
    """Every push is a look or more, and all peers look at the same port."""

    async def look(port: int) -> list[bool | None]:
        return [await is_refused("127.0.0.1", port, timeout_s=5) for _ in range(100)]

    with closing(LifeSign("127.0.0.1")) as sign:
        assert asyncio.run(look(sign.port)) == [False] * 100


def test_it_is_gone_once_it_is_closed() -> None:
    """Also if it is closed twice."""
    sign = LifeSign("127.0.0.1")
    sign.close()
    sign.close()
    assert asyncio.run(is_refused("127.0.0.1", sign.port, timeout_s=5)) is True


def test_a_host_that_is_not_here_shows_nothing() -> None:
    """There is no port then, which peers take for what it is."""
    with closing(LifeSign("203.0.113.1")) as sign:
        assert sign.port == 0
