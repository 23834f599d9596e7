"""What must hold for an engine that keeps its KV beyond the pool, whatever happens to it."""

from __future__ import annotations

import logging
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("nixl")

from offload_simulation import OffloadSimulation

pytestmark = pytest.mark.nixl


@pytest.fixture(autouse=True)
def _quiet_log() -> Iterator[None]:
    """A spoiled file is worth a warning, but not ten thousand of them."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def lives(
    random: Random, *, depth: int, max_num_requests: int, background: bool = False
) -> Counter[str]:
    """One or two engines, one after the other, on one directory; what they counted."""
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(random.randint(1, 2)):
            life = OffloadSimulation(random, Path(directory), depth=depth, background=background)
            life.run(num_requests=random.randint(1, max_num_requests))
            counts.update(attrs.asdict(life.counts))
    return counts


@pytest.mark.parametrize("depth", [1, 2])
@settings(max_examples=settings.default.max_examples // 3)
@given(random=st.randoms(use_true_random=False))
def test_no_block_that_comes_back_is_another(random: Random, depth: int) -> None:
    """Evictions, hits, lost steps, aborts, preemption, restarts, resets and spoiled files change no
    token: every slot that attention reads is checked."""
    lives(random, depth=depth, max_num_requests=10)


@pytest.mark.parametrize("background", [False, True])
def test_the_lives_visit_what_they_are_for(background: bool) -> None:
    """Longer lives than those above: blocks are saved, come back from both tiers, and are lost."""
    counts: Counter[str] = Counter()
    for seed in range(6 if background else 12):
        counts += lives(
            Random(seed), depth=1 + seed % 3, max_num_requests=60, background=background
        )
    for name in ("num_saved", "num_loaded_from_host", "num_loaded_from_disk", "num_lost"):
        assert counts[name] > 0, counts
