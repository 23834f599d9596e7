"""Real uses of the public API, for the type checker alone: nothing here is run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pdcore
from pdcore import FCFS, KVCacheManager, Limits, LRUBlockPool, Request, SamplingParams
from pdcore.connector.null import NullConnector
from pdcore.loop import BatchQueue, Waker, step, wait
from pdcore.runner.executor import InProcessExecutor
from pdcore.scheduler import Admission, AdmissionContext, Skip
from pdcore.testing import FakeKVRunner


class Own(FCFS):
    """A policy with hooks of its own."""

    def key(self, request: Request) -> tuple[int, str]:
        return request.num_prompt_tokens, request.request_id

    def admit(self, request: Request, context: AdmissionContext) -> Admission:
        return Admission.SKIP if context.num_free_blocks < 4 else Admission.ADMIT


def run(prompts: Sequence[Sequence[int]]) -> dict[str, list[int]]:
    """The loop that the README shows."""
    connector = NullConnector()
    scheduler = pdcore.UnifiedScheduler(
        KVCacheManager(LRUBlockPool(64, 16)),
        policy=Own(),
        limits=Limits(max_num_seqs=8),
        connector=connector.scheduler_side(),
    )
    executor = InProcessExecutor(lambda: FakeKVRunner(block_size=16), num_blocks=64)
    executor.start()
    waker = Waker()
    for index, prompt in enumerate(prompts):
        request = Request(f"r{index}", prompt, sampling=SamplingParams(max_tokens=4))
        handle: pdcore.RequestHandle = scheduler.add_request(request)
        scheduler.abort_requests([handle, "other"])
    tokens: dict[str, list[int]] = {}
    while scheduler.has_requests():
        wait(scheduler, waker, clock=scheduler.clock)
        for output in step(scheduler, executor).outputs:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            params: dict[str, Any] | None = output.kv_transfer_params
            reason: pdcore.FinishReason | None = output.finish_reason
            print(params, reason)
    skip: Skip = scheduler.explain("r0")
    print(skip.code.value, scheduler.stats().num_running)
    return tokens


def run_pipelined(scheduler: pdcore.UnifiedScheduler, executor: InProcessExecutor) -> list[str]:
    """The loop with two steps under way, to its orderly end."""
    queue = BatchQueue(scheduler, executor, depth=2, aborts=lambda: ["r1"])
    result: pdcore.StepResult = queue.step()
    ended = [output.request_id for output in result.finished.values()]
    for drained in queue.drain():
        ended.extend(drained.request_ids)
    queue.abandon()
    return ended[: len(queue)]
