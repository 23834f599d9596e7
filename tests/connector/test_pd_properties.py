"""What must hold between two engines, however bad the wire is."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multi_simulation import MultiPDSimulation
from pd_simulation import PDSimulation


@pytest.fixture(autouse=True)
def _quiet_log() -> Iterator[None]:
    """Cutting off a peer, or a connector that raises, is worth a line, but not ten thousand."""
    logging.disable(logging.ERROR)
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


@pytest.mark.parametrize("depth", [1, 2])
@settings(max_examples=settings.default.max_examples // 3)
@given(random=st.randoms(use_true_random=False))
def test_several_connectors_are_as_safe_as_one(random: Random, depth: int) -> None:
    """Two wires, each with faults of its own, and connectors that raise: as with one."""
    MultiPDSimulation(random, depth=depth).run(num_requests=random.randint(1, 20))
