"""A random life of one engine, checked after every call.

The engine runs real parts around `FakeKVRunner`. Hypothesis supplies the random choices, so that a
failing life shrinks.
"""

from __future__ import annotations

from random import Random

import attrs
import numpy as np
import numpy.typing as npt

from grammars import CompilesAtOnce
from pdcore import (
    FCFS,
    FinishReason,
    KVCacheManager,
    Limits,
    LRUBlockPool,
    ModelRunnerOutput,
    Priority,
    Request,
    RequestOutput,
    SamplingParams,
    SchedulerOutput,
    SchedulingPolicy,
    ShortestPromptFirst,
    UnifiedScheduler,
    VirtualClock,
)
from pdcore.connector import KVConnector
from pdcore.errors import InvalidRequest
from pdcore.kvcache import KVCacheConfig, PrefixHasher
from pdcore.scheduler import GrammarMatcher
from pdcore.testing import FakeKVRunner
from pdcore.testing.chain import Chain, chain_seed

VOCAB_SIZE = 50
POLICIES: tuple[type[SchedulingPolicy], ...] = (FCFS, Priority, ShortestPromptFirst)


class Matcher(GrammarMatcher):
    """Which tokens it allows depends on all that came before."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def allows(self, token: int) -> bool:
        return (token + sum(self.tokens) + len(self.tokens)) % 3 != 0

    def accept(self, token_id: int) -> bool:
        is_allowed = self.allows(token_id)
        self.tokens.append(token_id)
        return is_allowed

    def fill_bitmask(self, bits: npt.NDArray[np.int32]) -> None:
        for token in filter(self.allows, range(VOCAB_SIZE)):
            bits[token // 32] |= np.array(1 << token % 32, np.uint32).view(np.int32)


def solo_tokens(runner: FakeKVRunner, request: Request, *, max_model_len: int) -> list[int]:
    """What a request must produce, structured or not."""
    if request.sampling.structured_output is None:
        return runner.solo_tokens(request, max_model_len=max_model_len)
    sampling, matcher = request.sampling, Matcher()
    seed = chain_seed(cache_salt=request.cache_salt, lora=request.lora)
    chain = Chain(seed, request.prompt_token_ids)
    while True:
        token = runner.model.next_token(request.request_id, len(chain), chain.hashes[-1])
        while not matcher.allows(token):
            token = (token + 1) % VOCAB_SIZE
        matcher.accept(token)
        chain.append(token)
        is_stop = token in (request.eos_token_id, *sampling.stop_token_ids)
        is_long = len(matcher.tokens) >= sampling.max_tokens or len(chain) >= max_model_len
        if is_long or (is_stop and len(matcher.tokens) >= sampling.min_tokens):
            return matcher.tokens


@attrs.define
class Ledger:
    """What the application was told of each request."""

    requests: dict[str, Request] = attrs.field(factory=dict)
    tokens: dict[str, list[int]] = attrs.field(factory=dict)
    finished: dict[str, RequestOutput] = attrs.field(factory=dict)

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.tokens[request.request_id] = []

    def take(self, output: RequestOutput) -> None:
        assert output.request_id not in self.finished, f"told again after its end: {output}"
        self.tokens[output.request_id].extend(output.new_token_ids)
        if output.finish_reason is not None:
            self.finished[output.request_id] = output

    def check(self, runner: FakeKVRunner, *, max_model_len: int) -> None:
        """Every request ended once, with the tokens of its solo run."""
        assert self.finished.keys() == self.requests.keys()
        for request_id, request in self.requests.items():
            solo = solo_tokens(runner, request, max_model_len=max_model_len)
            tokens, end = self.tokens[request_id], self.finished[request_id]
            assert tokens == solo[: len(tokens)]
            assert end.num_output_tokens == len(tokens)
            if end.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert tokens == solo
            elif end.finish_reason is FinishReason.ERROR:
                assert end.cause
                # Whoever shares blocks that were not written begins anew, and none the wiser.
                assert "left to a row that failed" not in end.cause
            else:
                assert end.finish_reason in (FinishReason.ABORT, FinishReason.CAPACITY)


class Simulation:
    """One engine with tiny limits.

    Attributes:
        salts, loras: what its requests have, in equal shares.
        pool_blocks: how many blocks there are, at least and at most.
        max_new_tokens: the most that any asks for.
        pause: how probable it is that none arrives before a step.
    """

    pool_blocks = (3, 30)
    max_new_tokens = 30
    pause = 0.4

    salts: tuple[str | None, ...] = (None, None, "salt")
    loras: tuple[str | None, ...] = (None, None, "one", "two")

    def __init__(
        self,
        random: Random,
        *,
        depth: int,
        sliding_window: int | None = None,
        connector: KVConnector | None = None,
        hasher: PrefixHasher | None = None,
    ) -> None:
        self.random = random
        self.depth = depth
        block_size = random.choice((1, 2, 4, 16)) if hasher is None else hasher.block_size
        self.num_usable_blocks = random.randint(*self.pool_blocks)
        max_num_seqs = random.randint(1, 6)
        self.limits = Limits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=random.randint(max_num_seqs, 40),
            max_model_len=random.randint(8, 120),
            long_prefill_token_threshold=random.choice((0, 0, 3)),
            enable_chunked_prefill=not self.rarely(0.1),
            max_loras=random.choice((None, 1)),
        )
        self.runner = FakeKVRunner(
            block_size=block_size,
            num_blocks=self.num_usable_blocks + 1,
            vocab_size=VOCAB_SIZE,
            num_special_tokens=0,
            sliding_window=sliding_window,
            connector=None if connector is None else connector.worker_side(),
            row_fault=self.row_fault,
        )
        spec = self.runner.get_kv_cache_spec()
        self.runner.initialize_from_config(
            KVCacheConfig(spec=spec, num_blocks=self.num_usable_blocks + 1)
        )
        self.pool = LRUBlockPool(self.num_usable_blocks + 1, block_size)
        manager = KVCacheManager(
            self.pool,
            enable_prefix_caching=not self.rarely(0.3) or connector is not None,
            groups=(spec,),
            hasher=hasher,
        )
        self.grammar = CompilesAtOnce(lambda request: Matcher(), vocab_size=VOCAB_SIZE)
        policy = Priority(displace=True) if self.rarely(0.2) else random.choice(POLICIES)()
        self.scheduler = UnifiedScheduler(
            manager,
            policy=policy,
            limits=self.limits,
            connector=None if connector is None else connector.scheduler_side(),
            grammar=self.grammar,
            clock=VirtualClock(),
        )
        self.ledger = Ledger()
        self.faults: dict[str, int] = {}
        self.in_flight: list[tuple[SchedulerOutput, ModelRunnerOutput]] = []
        self.prefixes = [[(7 * i + 13 * j) % 46 + 4 for i in range(60)] for j in range(3)]
        self.num_steps = 0

    def row_fault(self, request_id: str, position: int) -> str | None:
        """Why a row fails that comes as far as the position at which its request is to fail."""
        return "bad luck" if position >= self.faults.get(request_id, 1 << 30) else None

    def rarely(self, probability: float) -> bool:
        """Whether something unusual happens. Hypothesis shrinks towards a calm life."""
        return self.random.random() > 1 - probability

    def run(self, *, num_requests: int) -> None:
        """Add requests at random times; step, abort and abandon until all have ended."""
        num_added = 0
        while num_added < num_requests or self.scheduler.has_requests():
            if num_added < num_requests and not self.rarely(self.pause):
                self.add(f"r{num_added}")
                num_added += 1
            self.disturb(num_added)
            self.step()
            self.num_steps += 1
            assert self.num_steps < 5000, f"no end in sight: {self.scheduler!r}"
        self.check_end()

    def add(self, request_id: str) -> None:
        random = self.random
        prefix = random.choice(self.prefixes)[: random.randint(1, 60)]
        suffix = [4 + random.randint(0, 9)] * random.randint(0, 5)
        max_tokens = random.randint(1, self.max_new_tokens)
        request = Request(
            request_id,
            prefix + suffix,
            sampling=SamplingParams(
                max_tokens=max_tokens,
                min_tokens=random.randint(0, max_tokens),
                stop_token_ids=range(random.choice((0, 0, 4))),
                structured_output="picky" if self.rarely(0.3) else None,
            ),
            eos_token_id=random.choice((None, 7)),
            priority=random.randint(0, 3),
            cache_salt=random.choice(self.salts),
            lora=random.choice(self.loras),
        )
        try:
            self.scheduler.add_request(request)
        except InvalidRequest:
            return
        self.ledger.add(request)
        if self.rarely(0.1):
            self.faults[request_id] = random.randint(0, 60)

    def disturb(self, num_added: int) -> None:
        """What happens between steps: an abort, or a plan that nobody runs."""
        random, scheduler = self.random, self.scheduler
        if self.rarely(0.05):
            scheduler.abort_requests([f"r{random.randint(0, num_added)}"])
        if self.rarely(0.1):
            # The first plan takes in compiled grammars, which stay taken in.
            scheduler.abandon(scheduler.schedule())
            before = scheduler.fingerprint()
            scheduler.abandon(scheduler.schedule())
            scheduler.check()
            assert scheduler.fingerprint() == before
        scheduler.check()

    def step(self) -> None:
        """Plan and run a step; take in the oldest once enough are in flight."""
        random, scheduler = self.random, self.scheduler
        if self.ledger.requests.keys() - self.ledger.finished.keys() or not self.in_flight:
            plan = scheduler.schedule()
            scheduler.check()
            self.check_plan(plan)
            if self.rarely(0.05) and self.ledger.requests:
                scheduler.abort_requests([random.choice(list(self.ledger.requests))])
            if self.rarely(0.03):
                scheduler.abandon(plan)
            elif self.rarely(0.02):
                # It failed before any worker heard of it.
                scheduler.abandon(plan, dispatched=True)
            else:
                self.runner.execute_model(plan)
                result = self.runner.sample_tokens(scheduler.get_grammar_bitmask(plan))
                if self.rarely(0.03):
                    report = result.transfer_report
                    scheduler.abandon(plan, dispatched=True, transfer_report=report)
                else:
                    self.in_flight.append((plan, result))
            scheduler.check()
        idle = not self.scheduler.stats().num_running
        while len(self.in_flight) >= self.depth or (idle and self.in_flight):
            for output in scheduler.update_from_output(*self.in_flight.pop(0)).outputs:
                self.ledger.take(output)
            scheduler.check()

    def check_plan(self, plan: SchedulerOutput) -> None:
        limits = self.limits
        assert plan.total_num_scheduled_tokens <= limits.max_num_batched_tokens
        assert plan.rows.size <= limits.max_num_seqs
        ends = plan.num_computed_tokens + plan.num_scheduled_tokens
        assert (ends <= limits.max_model_len).all()
        states = map(self.scheduler._core.table.state, plan.rows.tolist())
        loras = {state.request.lora for state in states} - {None}
        assert limits.max_loras is None or len(loras) <= limits.max_loras

    def check_end(self) -> None:
        for output in self.scheduler.drain():
            self.ledger.take(output)
        self.ledger.check(self.runner, max_model_len=self.limits.max_model_len)
        for request_id, matcher in self.grammar.matchers.items():
            assert matcher.tokens == self.ledger.tokens[request_id]
        counts = self.pool.counts()
        assert counts.free + counts.evictable == self.num_usable_blocks
