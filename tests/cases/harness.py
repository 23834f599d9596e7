"""An engine of real parts and a fake runner, driven plan by plan and audited after every call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pdcore.clock import VirtualClock
from pdcore.connector.base import KVConnector
from pdcore.kvcache import KVCacheConfig, KVCacheManager, LRUBlockPool, PrefixHasher
from pdcore.messages import ModelRunnerOutput, RequestOutput, SchedulerOutput, StepResult
from pdcore.request import FinishReason, Request, SamplingParams
from pdcore.scheduler import GrammarBackend, Limits, RequestHandle, SchedulingPolicy
from pdcore.scheduler.unified import UnifiedScheduler
from pdcore.testing import FakeKVRunner, FakeModel
from pdcore.testing.chain import POISON

__all__ = ["Engine", "some_tokens"]

# A fault that makes an engine spin must fail its test, not hang it.
_MAX_STEPS = 3000


def some_tokens(num_tokens: int, *, seed: int = 0) -> npt.NDArray[np.int32]:
    """A prompt; equal seeds give equal prompts, each a prefix of the longer ones."""
    return np.random.default_rng(seed).integers(4, 30_000, num_tokens, dtype=np.int32)


class Engine:
    """Scheduler, pool and runner of one engine.

    Up to any number of plans may be in flight: `dispatch` makes and runs one, `land` hands the
    oldest result back. Tokens are compared with those of a solo run by `assert_as_if_alone`.
    """

    def __init__(
        self,
        *,
        num_usable_blocks: int = 64,
        block_size: int = 16,
        policy: SchedulingPolicy | None = None,
        connector: KVConnector | None = None,
        grammar: GrammarBackend | None = None,
        clock: VirtualClock | None = None,
        hasher: PrefixHasher | None = None,
        sliding_window: int | None = None,
        enable_prefix_caching: bool = True,
        enable_events: bool = False,
        runner: dict[str, Any] | None = None,
        **limits: Any,
    ) -> None:
        self.clock = clock or VirtualClock()
        self.limits = Limits(**limits)
        num_blocks = num_usable_blocks + 1
        self.runner = FakeKVRunner(
            block_size=block_size,
            num_blocks=num_blocks,
            sliding_window=sliding_window,
            connector=None if connector is None else connector.worker_side(),
            **(runner or {}),
        )
        spec = self.runner.get_kv_cache_spec()
        self.runner.initialize_from_config(KVCacheConfig(spec=spec, num_blocks=num_blocks))
        self.pool = LRUBlockPool(num_blocks, block_size, enable_events=enable_events)
        self.manager = KVCacheManager(
            self.pool,
            enable_prefix_caching=enable_prefix_caching,
            groups=(spec,),
            hasher=hasher,
        )
        self.scheduler = UnifiedScheduler(
            self.manager,
            policy=policy,
            limits=self.limits,
            connector=None if connector is None else connector.scheduler_side(),
            grammar=grammar,
            clock=self.clock,
        )
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, list[RequestOutput]] = {}
        self.plans: list[dict[str, int]] = []
        self._names: dict[tuple[int, int], str] = {}
        self._in_flight: list[tuple[SchedulerOutput, ModelRunnerOutput]] = []

    def add(
        self,
        request_id: str,
        prompt: int | Sequence[int] | npt.NDArray[np.int32],
        *,
        max_tokens: int = 4,
        min_tokens: int = 0,
        stop_token_ids: tuple[int, ...] = (),
        structured_output: Any = None,
        **options: Any,
    ) -> RequestHandle:
        """Add a request; a number as prompt means so many tokens, shared with no other request."""
        if isinstance(prompt, int):
            prompt = some_tokens(prompt, seed=1000 + len(self.requests))
        sampling = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=stop_token_ids,
            structured_output=structured_output,
        )
        request = Request(request_id, prompt, sampling=sampling, **options)
        handle = self.scheduler.add_request(request)
        self.requests[request_id] = request
        self.tokens[request_id] = []
        self.ends[request_id] = []
        return handle

    def abort(self, *requests: str | RequestHandle) -> None:
        self.scheduler.abort_requests(requests)
        self.scheduler.check()

    def schedule(self) -> SchedulerOutput:
        """Make a plan and no more; whoever calls this runs or abandons it."""
        output = self.scheduler.schedule()
        self.scheduler.check()
        for new in output.scheduled_new_reqs:
            self._names[new.row, new.epoch] = new.request_id
        return output

    def named(self, output: SchedulerOutput) -> dict[str, int]:
        """How many tokens a plan computes for each request."""
        keys = zip(output.rows.tolist(), output.epochs.tolist(), strict=True)
        counts = output.num_scheduled_tokens.tolist()
        return {self._names[key]: count for key, count in zip(keys, counts, strict=True)}

    def execute(self, output: SchedulerOutput) -> dict[str, int]:
        """Run a plan on the worker; its result waits for `land`."""
        self.runner.execute_model(output)
        bitmask = self.scheduler.get_grammar_bitmask(output)
        self._in_flight.append((output, self.runner.sample_tokens(bitmask)))
        self.plans.append(self.named(output))
        return self.plans[-1]

    def dispatch(self) -> dict[str, int]:
        """Make and run a plan; return how many tokens it computes for each request."""
        return self.execute(self.schedule())

    def land(self) -> StepResult:
        """Hand the oldest result back to the scheduler."""
        output, model_output = self._in_flight.pop(0)
        result = self.scheduler.update_from_output(output, model_output)
        self.scheduler.check()
        for event in result.outputs:
            self._take(event)
        return result

    def step(self) -> dict[str, int]:
        """One plan and its result, then one second passes."""
        planned = self.dispatch()
        while self._in_flight:
            self.land()
        self.clock.advance(1.0)
        return planned

    def run(self, *, num_in_flight: int = 1, max_steps: int = _MAX_STEPS) -> int:
        """Run until nothing is left to do, so many plans ahead; return the number of plans."""
        for num_steps in range(max_steps):
            if not self.scheduler.has_requests():
                return num_steps
            planned = self.dispatch()
            while len(self._in_flight) >= (num_in_flight if planned else 1):
                self.land()
            if not planned:
                self._sleep()
        raise AssertionError(f"not done after {max_steps} steps: {self.scheduler}")

    def end(self, request_id: str) -> RequestOutput:
        """The only finish event of a request."""
        (end,) = self.ends[request_id]
        return end

    def reason(self, request_id: str) -> FinishReason | None:
        return self.end(request_id).finish_reason

    def solo(self, request_id: str) -> list[int]:
        """What a request must produce: its tokens when it runs alone."""
        return self.runner.solo_tokens(
            self.requests[request_id], max_model_len=self.limits.max_model_len
        )

    def assert_as_if_alone(self, *request_ids: str) -> None:
        """These requests (all, if none is named) ended once, with the tokens of their solo runs."""
        model: FakeModel = self.runner.model
        for request_id in request_ids or self.requests:
            tokens, reason = model.solo_run(
                self.requests[request_id], max_model_len=self.limits.max_model_len
            )
            assert (self.tokens[request_id], self.reason(request_id)) == (tokens, reason)

    def assert_so_far_as_if_alone(self, *request_ids: str) -> None:
        """What these requests (all, if none is named) produced yet is how their solo runs begin."""
        for request_id in request_ids or self.requests:
            tokens = self.tokens[request_id]
            assert tokens == self.solo(request_id)[: len(tokens)]

    def assert_idle(self) -> None:
        """Nothing is left: no request, no owner of a block, no block lost."""
        assert not self.scheduler.has_requests()
        counts = self.pool.counts()
        assert counts.free + counts.evictable == self.pool.num_usable_blocks
        stats = self.scheduler.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_parked) == (0, 0, 0)
        assert stats.num_quarantined_blocks == 0

    def poison_unowned_slots(self) -> None:
        """Overwrite every block that no running request has; for engines without a prefix cache."""
        rows = np.flatnonzero(self.manager.tables.num_blocks).tolist()
        owned = [self.manager.tables.row_blocks(row) for row in rows]
        dead = np.setdiff1d(np.arange(self.pool.num_blocks), np.concatenate([*owned, [0]]))
        self.runner.kv_caches.buffer[dead] = POISON

    def _take(self, event: RequestOutput) -> None:
        """Nothing may be told of a request after its end, and the end must know what was told."""
        tokens, ends = self.tokens[event.request_id], self.ends[event.request_id]
        assert not ends, f"{event} came after {ends}"
        tokens.extend(event.new_token_ids)
        if event.finish_reason is not None:
            assert event.num_output_tokens == len(tokens)
            ends.append(event)

    def _sleep(self) -> None:
        """After a plan without tokens: let the time pass until something can happen."""
        if self._in_flight or not self.scheduler.has_requests():
            return
        wakeup = self.scheduler.next_wakeup()
        if self.scheduler.has_work() or wakeup is None:
            self.clock.advance(1.0)
        else:
            self.clock.advance(max(wakeup - self.clock.now(), 0.0))
