"""A whole engine without a model: scheduler, pool, runner, a connector, and the loop round them.

The runner checks every slot that it reads, so a block of the wrong prompt, position or age is an
error, and tokens must be those of a solo run.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from nixl_engines import LIMIT_S

from pdcore.clock import MonotonicClock
from pdcore.connector import KVConnector
from pdcore.connector.nixl import NixlConfig, NixlConnector
from pdcore.kvcache import KVCacheManager, LRUBlockPool
from pdcore.loop import Waker, step, wait
from pdcore.messages import RequestOutput
from pdcore.request import Request, SamplingParams
from pdcore.runner.executor import InProcessExecutor
from pdcore.scheduler import Limits, UnifiedScheduler
from pdcore.testing import FakeKVRunner

BLOCK_SIZE = 4
NUM_BLOCKS = 65


class WholeEngine:
    """Scheduler, pool, runner and connector of one engine, and the loop round them."""

    def __init__(
        self,
        *,
        limits: dict[str, Any] | None = None,
        block_size: int = BLOCK_SIZE,
        num_blocks: int = NUM_BLOCKS,
        connector: KVConnector | None = None,
        **config: Any,
    ) -> None:
        self.block_size, self.num_blocks = block_size, num_blocks
        connector = connector or NixlConnector(NixlConfig(block_size=block_size, **config))
        self.worker = connector.worker_side()
        self.executor = InProcessExecutor(self._make_runner, num_blocks=num_blocks)
        self.executor.start()
        self.connector = connector.scheduler_side()
        self.waker, self.clock = Waker(), MonotonicClock()
        self.connector.start(clock=self.clock, notify=self.waker)
        self.connector.set_xfer_handshake_metadata([self.worker.get_handshake_metadata()])
        self.pool = LRUBlockPool(num_blocks, block_size)
        spec = self.runner.get_kv_cache_spec()
        self.scheduler = UnifiedScheduler(
            KVCacheManager(self.pool, groups=(spec,)),
            limits=Limits(**{"max_num_batched_tokens": 64, "max_num_seqs": 8} | (limits or {})),
            connector=self.connector,
            clock=self.clock,
        )
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, RequestOutput] = {}

    def _make_runner(self) -> FakeKVRunner:
        self.runner = FakeKVRunner(
            block_size=self.block_size, num_blocks=self.num_blocks, connector=self.worker
        )
        return self.runner

    def add(
        self,
        name: str,
        prompt: list[int],
        *,
        max_tokens: int,
        params: dict[str, Any] | None = None,
    ) -> Request:
        request = Request(
            name,
            prompt,
            sampling=SamplingParams(max_tokens=max_tokens),
            kv_transfer_params=params,
        )
        self.scheduler.add_request(request)
        self.tokens[name] = []
        return request

    def step(self) -> None:
        """One turn of the loop, and an audit."""
        result = step(self.scheduler, self.executor)
        self.scheduler.check()
        for output in result.outputs:
            self.tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                assert output.request_id not in self.ends
                self.ends[output.request_id] = output

    def prefill(self, name: str, prompt: list[int], *beside: WholeEngine) -> dict[str, Any]:
        """Compute a prompt and hand it over, while the engines ``beside`` it go on."""
        self.add(name, prompt, max_tokens=1, params={"do_remote_decode": True})
        run_until(lambda: name in self.ends, self, *beside)
        params = self.ends[name].kv_transfer_params
        assert params is not None
        return params

    def what_it_waits_for(self) -> tuple[Any, Any]:
        """For the message of a test that waited in vain."""
        unfinished = self.tokens.keys() - self.ends.keys()
        reasons = {name: self.scheduler.explain(name) for name in unfinished}
        return reasons, self.scheduler.stats()

    @property
    def num_free(self) -> int:
        return self.pool.num_free_blocks

    def close(self) -> None:
        self.executor.close()
        self.worker.close()
        self.connector.close()


def run_until(
    condition: Callable[[], bool], *engines: WholeEngine, limit_s: float = LIMIT_S
) -> None:
    """Step engines in turn, asleep when there is nothing to do, until a condition holds."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, [engine.what_it_waits_for() for engine in engines]
        for engine in engines:
            wait(engine.scheduler, engine.waker, clock=engine.clock, max_wait_s=0.002)
            engine.step()


def until_read(engine: WholeEngine, name: str) -> None:
    """Step until a request's read was ordered, and a while longer: its thread has to post it."""
    run_until(lambda: "being read" in (engine.scheduler.explain(name).waits_on or ""), engine)
    posted_by = time.monotonic() + 0.5
    run_until(lambda: time.monotonic() > posted_by, engine)


def prompts(num: int, *, seed: int, shared: int = 0) -> list[list[int]]:
    """Random prompts of 5 to 40 tokens after a shared beginning."""
    rng = random.Random(seed)
    start = [rng.randrange(10, 1000) for _ in range(shared)]
    return [
        start + [rng.randrange(10, 1000) for _ in range(rng.randrange(5, 40))] for _ in range(num)
    ]
