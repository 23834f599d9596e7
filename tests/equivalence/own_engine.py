"""pdcore's scheduler as an `Engine`."""

from __future__ import annotations

import numpy as np
from scheduler_traces import EOS, Trace
from stepping import Engine, Plan, Result

from pdcore.clock import VirtualClock
from pdcore.kvcache import EvictionOrder, KVCacheManager, LRUBlockPool, PrefixHasher
from pdcore.messages import ModelRunnerOutput, SchedulerOutput
from pdcore.request import FinishReason, Request, SamplingParams
from pdcore.scheduler import FCFS, Limits, Priority, SchedulingPolicy, UnifiedScheduler

__all__ = ["OwnEngine"]


class OwnEngine(Engine):
    """`UnifiedScheduler`, watched through its messages alone.

    Args:
        trace: what it is to be taken through.
        policy: the scheduler's; that of the trace's settings when None.
        eviction: the pool's order of eviction; its default when None.
    """

    def __init__(
        self,
        trace: Trace,
        *,
        policy: SchedulingPolicy | None = None,
        eviction: EvictionOrder | None = None,
    ) -> None:
        settings = trace.settings
        self.trace = trace
        self._pool = LRUBlockPool(settings.num_blocks, settings.block_size, eviction=eviction)
        self.scheduler = UnifiedScheduler(
            KVCacheManager(
                self._pool,
                enable_prefix_caching=settings.enable_prefix_caching,
                hasher=PrefixHasher(settings.block_size, secret=b"the same in every run"),
            ),
            policy=policy or (Priority() if settings.policy == "priority" else FCFS()),
            limits=Limits(
                max_num_seqs=settings.max_num_seqs,
                max_num_batched_tokens=settings.max_num_batched_tokens,
                max_model_len=settings.max_model_len,
                enable_chunked_prefill=settings.enable_chunked_prefill,
                long_prefill_token_threshold=settings.long_prefill_token_threshold,
            ),
            clock=VirtualClock(),
        )
        self._indices: dict[str, int] = {}
        self._owner_of_row: dict[int, int] = {}
        self._started: set[int] = set()
        self._ended: set[int] = set()
        self._in_flight: list[tuple[SchedulerOutput, list[tuple[int, int]]]] = []

    def add(self, request: int) -> None:
        arrival = self.trace.arrivals[request]
        request_id = self.trace.request_id(request)
        self._indices[request_id] = request
        self.scheduler.add_request(
            Request(
                request_id,
                self.trace.prompt_token_ids(request),
                sampling=SamplingParams(
                    max_tokens=arrival.max_tokens,
                    min_tokens=arrival.min_tokens,
                    stop_token_ids=arrival.stop_token_ids,
                    ignore_eos=arrival.ignore_eos,
                ),
                eos_token_id=EOS,
                priority=arrival.priority,
                arrival_time=arrival.arrival_time,
                cache_salt=arrival.cache_salt,
            )
        )

    def abort(self, request: int) -> None:
        self.scheduler.abort_requests([self.trace.request_id(request)])
        self._ended.add(request)

    def schedule(self) -> Plan:
        output = self.scheduler.schedule()
        given_up = [self._owner_of_row.pop(row) for row in output.finished_rows.tolist()]
        preempted = sorted(request for request in given_up if request not in self._ended)
        new, resumed = [], []
        for data in output.scheduled_new_reqs:
            request = self._indices[data.request_id]
            self._owner_of_row[data.row] = request
            admitted = resumed if request in self._started else new
            admitted.append([request, data.num_computed_tokens])
            self._started.add(request)
        requests = [self._owner_of_row[row] for row in output.rows.tolist()]
        counts = output.num_scheduled_tokens.tolist()
        ends = (output.num_computed_tokens + output.num_scheduled_tokens).tolist()
        draws = [
            (request, end)
            for request, end, is_drawn in zip(requests, ends, output.samples.tolist(), strict=True)
            if is_drawn
        ]
        self._in_flight.append((output, draws))
        return Plan(
            scheduled=[list(pair) for pair in zip(requests, counts, strict=True)],
            new=new,
            resumed=resumed,
            preempted=preempted,
            draws=draws,
        )

    def update(self) -> Result:
        output, draws = self._in_flight.pop(0)
        tokens = [self.trace.draw(request, position) for request, position in draws]
        told = self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                rows=output.rows[output.samples],
                epochs=output.epochs[output.samples],
                sampled_token_ids=np.array(tokens, np.int32).reshape(-1, 1),
            ),
        )
        requests = [self._indices[request_id] for request_id in told.request_ids]
        drawn = {request: token for (request, _), token in zip(draws, tokens, strict=True)}
        produced = requests[: told.token_ids.size]
        if [drawn[request] for request in produced] != told.token_ids.tolist():
            raise AssertionError(f"step {output.step_id} delivered tokens that nobody drew")
        finished = [
            [request, str(FinishReason(reason))]
            for request, reason in zip(requests, told.finish_reasons.tolist(), strict=True)
            if reason not in (0, FinishReason.ABORT)
        ]
        self._ended.update(request for request, _ in finished)
        return Result(produced=sorted(produced), finished=sorted(finished))

    @property
    def num_in_flight(self) -> int:
        """Plans whose result was not taken in."""
        return len(self._in_flight)

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free_blocks
