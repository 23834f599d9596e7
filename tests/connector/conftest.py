"""What the tests of connectors share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def quiet_log() -> Iterator[None]:
    """What is to be logged need not be printed."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)
