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
from scheduler_rig import RemoteConnector, draw

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
from pdcore.messages import SchedulerOutput
from pdcore.scheduler.starting import Starting

BLOCK_SIZE = 4
NUM_STEPS = 12
PREFIXES = [[1 + family + 7 * place for place in range(24)] for family in range(3)]


class AtOnce(Starting):
    """Starts every request as soon as it is admitted."""

    def add(self, *args: Any, **kwargs: Any) -> None:
        super().add(*args, **kwargs)
        self.run()


class Pair:
    """Two schedulers that get the same requests; one starts them together, one apart."""

    def __init__(self, num_blocks: int, limits: Limits, policies: list[SchedulingPolicy]) -> None:
        self.connectors = [RemoteConnector() for _ in policies]
        self.together, self.apart = (
            UnifiedScheduler(
                KVCacheManager(
                    LRUBlockPool(num_blocks, BLOCK_SIZE),
                    hasher=PrefixHasher(BLOCK_SIZE, secret=bytes(32)),
                ),
                policy=policy,
                limits=limits,
                connector=connector,
                clock=VirtualClock(),
            )
            for policy, connector in zip(policies, self.connectors, strict=True)
        )

    def add(self, name: str, prompt: list[int], *, max_tokens: int = 1, **kwargs: Any) -> None:
        request = Request(name, prompt, sampling=SamplingParams(max_tokens=max_tokens), **kwargs)
        self.together.add_request(request)
        self.apart.add_request(request)

    def end_loads(self) -> None:
        for connector in self.connectors:
            connector.end_loads()

    def plan(self) -> SchedulerOutput:
        """What both plan."""
        output = self.together.schedule()
        with mock.patch("pdcore.scheduler.admission.Starting", AtOnce):
            assert pickle.dumps(self.apart.schedule()) == pickle.dumps(output)
        assert self.apart.fingerprint() == self.together.fingerprint()
        assert self.apart.stats() == self.together.stats()
        return output

    def take_in(self, output: SchedulerOutput) -> None:
        self.together.update_from_output(output, draw(output))
        self.apart.update_from_output(self.apart.in_flight[0], draw(output))
        self.together.check()

    def abandon(self, output: SchedulerOutput) -> None:
        self.together.abandon(output)
        self.apart.abandon(self.apart.in_flight[-1])


@pytest.mark.parametrize("make_policy", [FCFS, Priority])
@given(random=st.randoms(use_true_random=False))
def test_nobody_can_tell(make_policy: Callable[[], SchedulingPolicy], random: Random) -> None:
    """Bursts that share prefixes with what is cached or loaded, with each other, or with nobody.

    The pool is so small that who starts takes the place of what the next one would have found.
    """
    limits = Limits(
        max_num_seqs=random.randint(2, 6),
        max_num_batched_tokens=random.choice((12, 40, 200)),
        max_model_len=32,
        long_prefill_token_threshold=random.choice((0, 0, 9)),
    )
    pair = Pair(random.randint(9, 24), limits, [make_policy() for _ in range(2)])
    num_added = 0
    for _ in range(NUM_STEPS):
        for _ in range(random.choice((0, 0, 1, 3, 6))):
            num_added += 1
            own = [num_added] * random.randint(1, 16)
            load = random.choice((None, None, None, "async", "sync"))
            pair.add(
                f"r{num_added}",
                random.choice((*PREFIXES, own, own))[: random.randint(1, 24)]
                + [random.randrange(3) for _ in range(random.choice((0, 0, 1, 4)))],
                max_tokens=random.randint(1, 4),
                priority=random.randrange(3),
                kv_transfer_params=None if load is None else {"load": load},
            )
        if random.random() < 0.5:
            pair.end_loads()
        output = pair.plan()
        if random.random() < 0.2:
            pair.abandon(output)
        else:
            pair.take_in(output)


def test_what_a_loaded_request_will_fill_is_found_behind_what_another_has_cached() -> None:
    """Two of its blocks are loaded, four are cached by now, and it is about to fill six."""
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=200, max_model_len=64)
    pair = Pair(64, limits, [FCFS(), FCFS()])
    start, rest = list(range(1, 17)), list(range(30, 38))
    pair.add("loaded", [*start, *rest, 50], kv_transfer_params={"load": "async"})
    pair.add("cached", [*start, 51])
    pair.take_in(pair.plan())
    pair.end_loads()
    pair.add("sharing", [*start, *rest, 52])
    output = pair.plan()
    assert output.num_scheduled_tokens.tolist() == [17, 1]
    assert pair.together.stats().num_prefix_hit_tokens == 24
