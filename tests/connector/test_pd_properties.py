"""What must hold between two engines, however bad the wire is."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_simulation import PDSimulation


@pytest.fixture(autouse=True)
def _quiet_log() -> Iterator[None]:
    """Cutting off a peer is worth a warning, but not ten thousand of them."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("depth", [1, 2])
@settings(max_examples=settings.default.max_examples // 3)
@given(random=st.randoms(use_true_random=False))
def test_no_fault_of_the_wire_gives_a_wrong_token_a_hang_or_a_leak(
    random: Random, depth: int
) -> None:
    """Delays, loss, repeats, late writes, restarts and aborts end in solo tokens or a cause."""
    PDSimulation(random, depth=depth).run(num_requests=random.randint(1, 12))
