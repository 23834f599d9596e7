"""Two engines of one process, stepped by hand, with a loopback connector between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pdcore import KVCacheManager, Limits, LRUBlockPool, UnifiedScheduler
from pdcore.connector import KVCaches, KVLoad
from pdcore.connector.loopback import LoopbackConnector, LoopbackFabric, LoopbackFaults
from pdcore.connector.loopback.meta import LoopbackMeta
from pdcore.connector.loopback.ticket import LoopbackTicket
from pdcore.connector.ticket_contents import prompt_digest
from pdcore.kvcache import KVCacheConfig
from pdcore.messages import SchedulerOutput, TransferKey
from pdcore.request import Request, SamplingParams
from pdcore.testing import Driver, FakeKVRunner, VirtualClock

BLOCK_SIZE = 4
LEASE_S = 30.0
PROMPT = tuple(range(5, 24))
MAX_TOKENS = 4


class Engine:
    """A scheduler, a runner and a loopback connector, stepped by hand."""

    def __init__(
        self,
        fabric: LoopbackFabric,
        name: str,
        *,
        num_blocks: int = 40,
        model_name: str = "fake",
        block_size: int = BLOCK_SIZE,
        **limits: Any,
    ) -> None:
        connector = LoopbackConnector(
            fabric, engine_id=name, block_size=block_size, lease_s=LEASE_S
        )
        self.connector = connector.scheduler_side()
        self.runner = FakeKVRunner(
            block_size=block_size, connector=connector.worker_side(), model_name=model_name
        )
        spec = self.runner.get_kv_cache_spec()
        self.runner.initialize_from_config(KVCacheConfig(spec=spec, num_blocks=num_blocks))
        self.pool = LRUBlockPool(num_blocks, block_size)
        clock = fabric.clock
        assert isinstance(clock, VirtualClock)
        self.scheduler = UnifiedScheduler(
            KVCacheManager(self.pool),
            limits=Limits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, **limits),
            connector=self.connector,
            clock=clock,
        )
        self.driver = Driver(self.scheduler, self.runner, clock=clock)

    def prefill(self, prompt: Sequence[int] = PROMPT, name: str = "r") -> dict[str, Any]:
        """Compute a prompt and return what its hand-over says."""
        request = Request(
            name,
            prompt,
            sampling=SamplingParams(max_tokens=1),
            kv_transfer_params={"do_remote_decode": True},
        )
        self.driver.add(request)
        end = None
        while end is None:
            self.driver.step()
            end = self.driver.delivered[name].end
        assert end.kv_transfer_params is not None
        return end.kv_transfer_params

    def add(
        self, params: Mapping[str, Any], prompt: Sequence[int] = PROMPT, name: str = "r"
    ) -> Request:
        """Add a request whose KV lies elsewhere."""
        request = Request(
            name,
            prompt,
            sampling=SamplingParams(max_tokens=MAX_TOKENS),
            kv_transfer_params=params,
        )
        self.driver.add(request)
        return request

    def decode(self, params: Mapping[str, Any], prompt: Sequence[int] = PROMPT) -> list[int]:
        """Serve such a request to its end."""
        self.add(params, prompt)
        return self.driver.run()["r"].token_ids

    def step(self, n: int = 1) -> None:
        """Run some steps."""
        for _ in range(n):
            self.driver.step()

    @property
    def num_external_tokens(self) -> int:
        return self.scheduler.stats().num_external_tokens

    @property
    def num_held(self) -> int:
        return len(self.pool.holds())


Pair = tuple[Engine, Engine, LoopbackFabric]


def make_pair(
    faults: LoopbackFaults | Callable[[KVLoad], LoopbackFaults] | None = None, **limits: Any
) -> Pair:
    """A prefill engine and a decode engine on one virtual clock."""
    fabric = LoopbackFabric(clock=VirtualClock(), faults=faults)
    return Engine(fabric, "p"), Engine(fabric, "d", **limits), fabric


def solo(engine: Engine, prompt: Sequence[int] = PROMPT) -> list[int]:
    """What a prompt gives alone."""
    return engine.runner.solo_tokens(
        Request("r", prompt, sampling=SamplingParams(max_tokens=MAX_TOKENS))
    )


class Halves:
    """Both halves of a decode engine's connector, called by hand; engine p is its peer."""

    def __init__(
        self, buffers: Sequence[Any] | None = None, *, faults: LoopbackFaults | None = None
    ) -> None:
        fabric = LoopbackFabric(clock=VirtualClock(), faults=faults)
        for name, buffer in zip("pd", buffers or np.zeros((2, 6, 2)), strict=True):
            connector = LoopbackConnector(fabric, engine_id=name, block_size=2)
            self.scheduler = connector.scheduler_side()
            self.worker = connector.worker_side()
            caches = KVCaches(buffer=buffer, bytes_per_block=16, fingerprint="f")
            self.worker.register_kv_caches(caches)
            if name == "p":
                self.registry = self.scheduler._engine.registry

    def allocate(self, uid: int, block_ids: Sequence[int] = (1, 5)) -> tuple[Request, KVLoad]:
        """Add a request of five tokens, four of them at the peer, and plan its load."""
        ticket = LoopbackTicket(
            engine_id="p",
            engine_epoch=0,
            transfer_id=f"t{uid}",
            block_ids=(4, 2),
            generations=(1, 1),
            num_tokens=5 - 1,
            block_size=2,
            prompt_digest=prompt_digest(Request("r", [1, 2, 3, 4, 5])),
            lease_s=9.0,
        )
        self.registry.grant(f"t{uid}", ticket.contents, lease_s=9.0)
        request = Request(f"r{uid}", [1, 2, 3, 4, 5], kv_transfer_params=ticket.to_params())
        self.scheduler.request_added(request, uid)
        load = KVLoad(
            transfer=TransferKey(uid, 1),
            request=request,
            num_local_tokens=0,
            num_external_tokens=4,
            block_ids=np.array(block_ids, dtype=np.int32),
            deadline=9.0,
        )
        self.scheduler.update_state_after_alloc(request, load)
        return request, load

    def build(self) -> LoopbackMeta | None:
        """What the worker hears with a plan without tokens."""
        nothing = np.zeros(0, dtype=np.int32)
        plan = SchedulerOutput(
            step_id=0,
            rows=nothing,
            epochs=nothing,
            num_scheduled_tokens=nothing,
            num_computed_tokens=nothing,
            samples=nothing.astype(np.bool_),
            block_rows=nothing,
            block_positions=nothing,
            block_ids=nothing,
            finished_rows=nothing,
        )
        return self.scheduler.build_connector_meta(plan)
