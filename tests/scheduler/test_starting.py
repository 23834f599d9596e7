"""Requests that start in one step start as if one after the other."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from random import Random
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_rig import draw

from pdcore import (
    FCFS,
    KVCacheManager,
    Limits,
    LRUBlockPool,
    Priority,
    Request,
    SamplingParams,
    SchedulingPolicy,
    UnifiedScheduler,
    VirtualClock,
)
from pdcore.kvcache import PrefixHasher
from pdcore.scheduler.starting import Starting

BLOCK_SIZE = 4
NUM_STEPS = 16
PREFIXES = [[1 + family + 7 * place for place in range(24)] for family in range(3)]


class AtOnce(Starting):
    """Starts every request as soon as it is admitted."""

    def add(self, *args: Any, **kwargs: Any) -> None:
        super().add(*args, **kwargs)
        self.run()


@pytest.mark.parametrize("make_policy", [FCFS, Priority])
@given(random=st.randoms(use_true_random=False))
def test_nobody_can_tell(make_policy: Callable[[], SchedulingPolicy], random: Random) -> None:
    """Bursts that share prefixes with what is cached, with each other, or with nobody.

    The pool is so small that who starts takes the place of what the next one would have found.
    """
    num_blocks = random.randint(9, 24)
    limits = Limits(
        max_num_seqs=random.randint(2, 6),
        max_num_batched_tokens=random.choice((12, 40, 200)),
        max_model_len=32,
        long_prefill_token_threshold=random.choice((0, 0, 9)),
    )
    together, apart = (
        UnifiedScheduler(
            KVCacheManager(
                LRUBlockPool(num_blocks, BLOCK_SIZE),
                hasher=PrefixHasher(BLOCK_SIZE, secret=bytes(32)),
            ),
            policy=make_policy(),
            limits=limits,
            clock=VirtualClock(),
        )
        for _ in range(2)
    )
    num_added = 0
    for _ in range(NUM_STEPS):
        for _ in range(random.choice((0, 0, 1, 3, 6))):
            num_added += 1
            own = [num_added] * random.randint(1, 16)
            request = Request(
                f"r{num_added}",
                random.choice((*PREFIXES, own, own))[: random.randint(1, 24)]
                + [random.randrange(3) for _ in range(random.choice((0, 0, 1, 4)))],
                sampling=SamplingParams(max_tokens=random.randint(1, 4)),
                priority=random.randrange(3),
            )
            together.add_request(request)
            apart.add_request(request)
        output = together.schedule()
        with mock.patch("pdcore.scheduler.admission.Starting", AtOnce):
            assert pickle.dumps(apart.schedule()) == pickle.dumps(output)
        assert apart.fingerprint() == together.fingerprint()
        assert apart.stats() == together.stats()
        if random.random() < 0.2:
            together.abandon(output)
            apart.abandon(apart.in_flight[-1])
        else:
            together.update_from_output(output, draw(output))
            apart.update_from_output(apart.in_flight[0], draw(output))
        together.check()
