"""What must hold for any traffic, any limits and any timing."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_simulation import Simulation

randoms = st.randoms(use_true_random=False)
# A life is a few hundred steps, each audited; a third of the usual number of them is enough here.
lives = settings(max_examples=settings.default.max_examples // 3)


@pytest.mark.parametrize("depth", [1, 2, 3])
@lives
@given(random=randoms)
def test_every_request_gets_its_solo_tokens_whatever_happens(random: Random, depth: int) -> None:
    """Chunks, hits, preemption, aborts, lost plans and steps in flight change no token."""
    Simulation(random, depth=depth).run(num_requests=random.randint(1, 12))


@pytest.mark.parametrize("depth", [1, 2, 3])
@lives
@given(random=randoms)
def test_a_sliding_window_changes_no_token(random: Random, depth: int) -> None:
    """Blocks behind a window are given back only once nothing in flight reads them."""
    window = random.choice((1, 2, random.randint(3, 20)))
    Simulation(random, depth=depth, sliding_window=window).run(num_requests=random.randint(1, 8))
