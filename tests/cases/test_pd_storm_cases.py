"""Storms of cancelled requests."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pd_pair import HAND_OVER, Pair, prompt_of

from pdcore.connector.loopback import LoopbackFaults

# C33


@pytest.fixture
def quiet_log() -> Iterator[None]:
    """Cutting off a peer is worth a warning, but not thousands of them."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


class Storm:
    """Requests come, and all are aborted, each at a moment of its own, on either side."""

    def __init__(self, random: Random, *, num_requests: int) -> None:
        self.random = random
        self.pair = Pair(
            faults=lambda load: LoopbackFaults(
                delay_polls=random.choice((0, 0, 1, 4)),
                late_write=random.random() < 0.5,
                lose=random.random() < 0.1,
                duplicate=random.random() < 0.2,
            ),
            lease_s=random.choice((3.0, 30.0)),
            prefill={"num_usable_blocks": random.randint(6, 40), "max_num_seqs": 4},
            decode={
                "num_usable_blocks": random.randint(6, 40),
                "max_num_seqs": 4,
                "load_timeout_s": 15.0,
                "quarantine_timeout_s": 5.0,
                "max_num_parked": random.choice((2, 100)),
            },
        )
        self._num_requests = num_requests
        self._sent: set[str] = set()

    def run(self) -> None:
        """Every request is aborted on the side where it is found; some are found too late."""
        random, pair = self.random, self.pair
        for index in range(self._num_requests):
            self._add(f"r{index}")
            for _ in range(random.choice((0, 0, 0, 1, 2))):
                self._turn()
            for _ in range(random.choice((0, 1, 1, 2))):
                self._abort(f"r{random.randint(max(0, index - 8), index)}")
        for index in range(self._num_requests):
            self._abort(f"r{index}")
        pair.run()

    def probe(self) -> None:
        """One request goes all the way, and both pools are as they were in the beginning."""
        pair = self.pair
        pair.fabric.faults = LoopbackFaults()
        prompt = prompt_of(3, seed=99)
        pair.send("probe", prompt, max_tokens=10)
        pair.run()
        assert pair.decode.end("probe").num_external_tokens == prompt.size - 1
        pair.decode.assert_as_if_alone("probe")

    def check(self) -> None:
        for engine in (self.pair.prefill, self.pair.decode):
            engine.assert_so_far_as_if_alone()
            assert all(len(ends) == 1 for ends in engine.ends.values())
        self.pair.assert_idle()

    def _add(self, name: str) -> None:
        prompt = prompt_of(self.random.randint(0, 4), more=self.random.randint(1, 15))
        prompt = np.concatenate((prompt, [4 + self.random.randint(0, 3)])).astype(np.int32)
        self.pair.prefill.add(name, prompt, max_tokens=1, kv_transfer_params=HAND_OVER)

    def _turn(self) -> None:
        pair = self.pair
        for engine in (pair.prefill, pair.decode):
            pair.turn(engine)
        for name, ends in list(pair.prefill.ends.items()):
            if ends and name not in self._sent:
                self._sent.add(name)
                params, prompt = ends[0].kv_transfer_params, pair.prefill.requests[name]
                # The router loses one in ten.
                if params is not None and self.random.random() < 0.9:
                    pair.decode.add(name, prompt.prompt_token_ids, kv_transfer_params=params)
        pair.clock.advance(self.random.choice((0.0, 0.1, 1.0)))

    def _abort(self, name: str) -> None:
        side = self.random.choice((self.pair.prefill, self.pair.decode))
        for engine in (side, self.pair.prefill, self.pair.decode):
            if engine.scheduler.status(name) is not None:
                engine.abort(name)
                return


@pytest.mark.usefixtures("quiet_log")
@pytest.mark.parametrize("seed", range(4))
def test_c33_a_storm_of_cancels_leaves_both_engines_alive_and_empty(seed: int) -> None:
    """300 requests aborted at random phases; then a probe is loaded and served."""
    storm = Storm(Random(seed), num_requests=300)
    storm.run()
    storm.check()
    storm.probe()
    storm.check()


@pytest.mark.usefixtures("quiet_log")
@settings(max_examples=settings.default.max_examples // 4)
@given(random=st.randoms(use_true_random=False), num_requests=st.integers(1, 25))
def test_c33_any_small_storm_is_survived(random: Random, num_requests: int) -> None:
    """The same of all sizes, so that what is found is small."""
    storm = Storm(random, num_requests=num_requests)
    storm.run()
    storm.probe()
    storm.check()
