"""A random life of a prefill and a decode engine over a bad wire, checked after every call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

from engine_simulation import Ledger
from pdcore import (
    KVCacheManager,
    Limits,
    LRUBlockPool,
    ModelRunnerOutput,
    Request,
    RequestOutput,
    SamplingParams,
    SchedulerOutput,
    UnifiedScheduler,
    VirtualClock,
)
from pdcore.connector import KVConnector
from pdcore.connector.loopback import LoopbackConnector, LoopbackFabric, LoopbackFaults
from pdcore.errors import InvalidRequest, InvalidTransferParams
from pdcore.kvcache import KVCacheConfig
from pdcore.testing import FakeKVRunner

VOCAB_SIZE = 50
MAX_MODEL_LEN = 100


class PDEngine:
    """One side of the pair."""

    pool_blocks = (8, 60)

    def __init__(
        self,
        random: Random,
        fabric: LoopbackFabric,
        clock: VirtualClock,
        *,
        name: str,
        block_size: int,
        depth: int,
    ) -> None:
        self.random, self.depth = random, depth
        self.num_usable_blocks = random.randint(*self.pool_blocks)
        connector = self.make_connector(fabric, name, block_size)
        worker_side = connector.worker_side()
        self.runner = FakeKVRunner(
            block_size=block_size,
            num_blocks=self.num_usable_blocks + 1,
            vocab_size=VOCAB_SIZE,
            connector=worker_side,
        )
        spec = self.runner.get_kv_cache_spec()
        self.runner.initialize_from_config(
            KVCacheConfig(spec=spec, num_blocks=self.num_usable_blocks + 1)
        )
        self.pool = LRUBlockPool(self.num_usable_blocks + 1, block_size)
        scheduler_side = connector.scheduler_side()
        scheduler_side.start(clock=clock, notify=lambda: None)
        scheduler_side.set_xfer_handshake_metadata([worker_side.get_handshake_metadata()])
        max_num_seqs = random.randint(1, 5)
        self.scheduler = UnifiedScheduler(
            KVCacheManager(self.pool),
            limits=Limits(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=random.randint(max_num_seqs, 40),
                max_model_len=MAX_MODEL_LEN,
                load_timeout_s=random.choice((20, 4)),
                quarantine_timeout_s=random.choice((10, 5)),
                max_quarantined_share=random.choice((1.0, 0.5, 0.1)),
                max_num_parked=random.choice((100, 3, 1)),
                on_load_failure=random.choice(("recompute", "fail")),
                max_load_retries=random.choice((0, 1)),
            ),
            connector=scheduler_side,
            clock=clock,
        )
        self.ledger = Ledger()
        self.in_flight: list[tuple[SchedulerOutput, ModelRunnerOutput]] = []

    def make_connector(self, fabric: LoopbackFabric, name: str, block_size: int) -> KVConnector:
        lease_s = self.random.choice((30, 3))
        return LoopbackConnector(fabric, engine_id=name, block_size=block_size, lease_s=lease_s)

    def add(self, request: Request) -> None:
        try:
            self.scheduler.add_request(request)
        except (InvalidRequest, InvalidTransferParams):
            return
        self.ledger.add(request)

    def step(self) -> Iterator[RequestOutput]:
        """Plan and run a step, take in old ones; yield the requests that ended."""
        scheduler = self.scheduler
        if self.random.random() > 0.9:
            # The first plan takes in outside events, which stay taken in.
            scheduler.abandon(scheduler.schedule())
            before = scheduler.fingerprint()
            scheduler.abandon(scheduler.schedule())
            assert scheduler.fingerprint() == before
        if scheduler.stats().num_in_flight == 0 or self.has_unfinished:
            plan = scheduler.schedule()
            scheduler.check()
            self.runner.execute_model(plan)
            self.in_flight.append((plan, self.runner.sample_tokens(None)))
        while len(self.in_flight) >= self.depth or (self.in_flight and not self.has_unfinished):
            result = scheduler.update_from_output(*self.in_flight.pop(0))
            scheduler.check()
            for output in result.outputs:
                self.ledger.take(output)
                if output.finish_reason is not None:
                    yield output

    @property
    def has_unfinished(self) -> bool:
        return len(self.ledger.finished) < len(self.ledger.requests)

    def check_end(self) -> None:
        self.ledger.check(self.runner, max_model_len=MAX_MODEL_LEN)
        counts = self.pool.counts()
        assert counts.free + counts.evictable == self.num_usable_blocks


class PDSimulation:
    """Requests go through prefill, a router that may lose them, and decode."""

    num_prefixes = 2

    def __init__(
        self, random: Random, *, depth: int, make_engine: Callable[..., PDEngine] = PDEngine
    ) -> None:
        self.random = random
        self.clock = VirtualClock()
        self.fabric = LoopbackFabric(clock=self.clock, faults=lambda load: self.faults())
        block_size = random.choice((2, 4, 8))
        self.prefill, self.decode = (
            make_engine(
                random, self.fabric, self.clock, name=name, block_size=block_size, depth=depth
            )
            for name in ("prefill", "decode")
        )
        self.prefixes = [
            [(7 * i + 13 * j) % 46 + 4 for i in range(60)] for j in range(self.num_prefixes)
        ]
        self.sent: dict[str, Request] = {}

    def faults(self) -> LoopbackFaults:
        random = self.random
        kind = random.random()
        return LoopbackFaults(
            delay_polls=random.choice((0, 0, 1, 3)),
            delay_s=random.choice((0, 0, 1, 5)),
            late_write=random.random() > 0.5,
            duplicate=random.random() > 0.8,
            reorder=random.random() > 0.7,
            lose=kind > 0.9,
            fail="the wire broke" if 0.8 < kind <= 0.9 else None,
            num_valid_tokens=random.randint(0, 60) if 0.7 < kind <= 0.8 else None,
        )

    def run(self, *, num_requests: int) -> None:
        random, num_added, num_steps = self.random, 0, 0
        while num_added < num_requests or self.has_requests:
            if num_added < num_requests:
                self.add(f"r{num_added}")
                num_added += 1
            if random.random() > 0.95:
                side = random.choice((self.prefill, self.decode))
                side.scheduler.abort_requests([f"r{random.randint(0, num_added)}"])
            if random.random() > 0.98:
                self.restart()
            for output in self.prefill.step():
                # The router loses one in twenty.
                if output.kv_transfer_params is not None and random.random() < 0.95:
                    self.decode.add(self.decode_request(output))
            for _ in self.decode.step():
                pass
            self.clock.advance(random.choice((1, 0.1, 0)))
            num_steps += 1
            assert num_steps < 3000, f"no end: {self.prefill.scheduler} {self.decode.scheduler}"
        self.prefill.check_end()
        self.decode.check_end()

    def restart(self) -> None:
        self.fabric.restart("prefill")

    @property
    def has_requests(self) -> bool:
        return self.prefill.scheduler.has_requests() or self.decode.scheduler.has_requests()

    def add(self, request_id: str) -> None:
        random = self.random
        prefix = random.choice(self.prefixes)[: random.randint(1, 50)]
        prompt = prefix + [4 + random.randint(0, 9)] * random.randint(0, 4)
        sampling = SamplingParams(max_tokens=random.randint(1, 15), stop_token_ids=(5, 6))
        self.sent[request_id] = Request(request_id, prompt, sampling=sampling)
        self.prefill.add(
            Request(
                request_id,
                prompt,
                sampling=SamplingParams(max_tokens=1, stop_token_ids=(5, 6)),
                kv_transfer_params={"do_remote_decode": True},
            )
        )

    def decode_request(self, output: RequestOutput) -> Request:
        sent = self.sent[output.request_id]
        return Request(
            sent.request_id,
            sent.prompt_token_ids,
            sampling=sent.sampling,
            kv_transfer_params=output.kv_transfer_params,
        )
