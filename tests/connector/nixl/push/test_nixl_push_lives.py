"""Random lives of pushes: whatever happens, tokens are exact and everything is free at the end."""

from __future__ import annotations

import random
import time
from contextlib import closing
from typing import Any

import pytest
from nixl_pushes import WHOLE_ENGINES, decode_engine, landings, prefill_engine, pushes, run_idle
from nixl_whole_engine import WholeEngine, prompts, run_until

from pdcore.connector.nixl.agent import TransferAgent
from pdcore.request import FinishReason, Request

pytestmark = WHOLE_ENGINES

NUM_REQUESTS = 30
NUM_SLOTS = 40


class Lives:
    """An application that starts prompts, passes tickets on, and gives up when it likes."""

    def __init__(self, rng: random.Random, prefill: WholeEngine, decode: WholeEngine) -> None:
        self.rng = rng
        self.prefill, self.decode = prefill, decode
        self.prompts: dict[str, list[int]] = {}
        self.leaves: dict[str, dict[str, Any]] = {}
        self.requests: dict[str, Request] = {}

    def arrive(self, name: str, prompt: list[int]) -> None:
        params: dict[str, Any] = {"do_remote_decode": True}
        if self.rng.random() < 0.85:
            params["push_to"] = self.decode.connector.expect_push(Request(name, prompt))
        if params.get("push_to"):
            self.leaves[name] = params["push_to"]
        self.prompts[name] = prompt
        self.prefill.add(name, prompt, max_tokens=1, params=params)

    def step(self) -> None:
        """Something happens to somebody."""
        for _ in range(self.rng.randrange(4)):
            self.prefill.step()
        for _ in range(self.rng.randrange(3)):
            self.decode.step()
        self.pass_on()
        name = self.rng.choice(list(self.prompts))
        match self.rng.randrange(12):
            case 0:
                self.prefill.scheduler.abort_requests([name])
            case 1:
                self.decode.scheduler.abort_requests([name])
            case 2 if name in self.leaves:
                self.decode.connector.call_off_push(self.leaves[name])
            case 3:
                self.prefill.scheduler.reset_prefix_cache(preempt_running=True)
            case 4:
                time.sleep(0.01)

    def pass_on(self) -> None:
        """Give tickets to the decode engine, most of them."""
        for name, end in self.prefill.ends.items():
            if name not in self.requests and end.kv_transfer_params is not None:
                self.requests[name] = self.decode.add(
                    name, self.prompts[name], max_tokens=5, params=end.kv_transfer_params
                )
                if self.rng.random() < 0.1:
                    self.decode.scheduler.abort_requests([name])

    def has_ended(self) -> bool:
        self.pass_on()
        return len(self.prefill.ends) == len(self.prompts) and len(self.decode.ends) == len(
            self.requests
        )


@pytest.mark.parametrize("seed", range(4))
def test_random_lives(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Aborts, preemptions, calls-off and slow writes, with more prompts than blocks and slots."""
    rng = random.Random(seed)
    _slow_down(monkeypatch, random.Random(seed + 1))
    config = {"lease_s": 2.0, "request_timeout_s": 1.0}
    with (
        closing(prefill_engine(**config)) as prefill,
        closing(decode_engine(num_slots=NUM_SLOTS, **config)) as decode,
    ):
        lives = Lives(rng, prefill, decode)
        for i, prompt in enumerate(prompts(NUM_REQUESTS, seed=seed, shared=11)):
            lives.arrive(f"r{i}", prompt + prompt[:20])
            lives.step()
        run_until(lives.has_ended, prefill, decode)
        for name, request in lives.requests.items():
            if decode.ends[name].finish_reason is not FinishReason.ABORT:
                assert decode.tokens[name] == decode.runner.solo_tokens(request)
        run_idle(prefill, decode, limit_s=15)
        assert pushes(prefill).num_blocks > 0
        assert landings(decode).num_used > 0


def _slow_down(monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
    """Let writes arrive when it pleases them."""
    post_write = TransferAgent.post_write

    def post_later(agent: TransferAgent, *ids: Any) -> Any:
        time.sleep(rng.choice([0, 0, 0.002, 0.03]))
        return post_write(agent, *ids)

    monkeypatch.setattr(TransferAgent, "post_write", post_later)
