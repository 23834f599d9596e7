"""A scheduling policy of your own: subclass, override a hook, watch the order change.

Eight requests of three customers arrive at once and two may run at a time. First come, first
served lets the customer with many requests keep the others waiting; `TakeTurns` does not. A policy
says who goes first. Token budget, blocks and progress stay the scheduler's business.
"""

from __future__ import annotations

from collections import Counter

from pdcore import (
    FCFS,
    KVCacheManager,
    Limits,
    LRUBlockPool,
    Request,
    SamplingParams,
    SchedulingPolicy,
    UnifiedScheduler,
)
from pdcore.kvcache import KVCacheConfig
from pdcore.testing import FakeKVRunner

NUM_BLOCKS, BLOCK_SIZE = 64, 4
ARRIVALS = ("ann", "ann", "ann", "ann", "ann", "bob", "bob", "cat")


class TakeTurns(SchedulingPolicy):
    """Every tenant's first request before anybody's second, and so on."""

    def __init__(self) -> None:
        self._num_requests: Counter[str | None] = Counter()

    def key(self, request: Request) -> int:
        self._num_requests[request.tenant] += 1
        return self._num_requests[request.tenant]


def order_of_first_tokens(policy: SchedulingPolicy) -> list[tuple[str, int]]:
    """Run all requests under a policy; who got a first token, in order, and in which step."""
    pool = LRUBlockPool(NUM_BLOCKS, BLOCK_SIZE)
    limits = Limits(max_num_seqs=2, max_num_batched_tokens=32, max_model_len=64)
    scheduler = UnifiedScheduler(KVCacheManager(pool), policy=policy, limits=limits)
    runner = FakeKVRunner(block_size=BLOCK_SIZE)
    runner.initialize_from_config(
        KVCacheConfig(spec=runner.get_kv_cache_spec(), num_blocks=NUM_BLOCKS)
    )
    for index, tenant in enumerate(ARRIVALS):
        scheduler.add_request(
            Request(
                f"{tenant}-{ARRIVALS[:index].count(tenant) + 1}",
                range(10 * index + 1, 10 * index + 7),
                sampling=SamplingParams(max_tokens=4, temperature=0.0),
                tenant=tenant,
            )
        )
    first_steps: dict[str, int] = {}
    while scheduler.has_requests():
        output = scheduler.schedule()
        runner.execute_model(output)
        result = scheduler.update_from_output(output, runner.sample_tokens(None))
        for event in result.outputs:
            first_steps.setdefault(event.request_id, output.step_id)
    return list(first_steps.items())


def main() -> None:
    """Compare the two policies."""
    for policy in (FCFS(), TakeTurns()):
        order = order_of_first_tokens(policy)
        print(f"{type(policy).__name__}: order of first tokens")
        print("  " + "  ".join(name for name, _ in order))
        for tenant in dict.fromkeys(ARRIVALS):
            steps = [step for name, step in order if name.startswith(tenant)]
            mean = sum(steps) / len(steps)
            print(f"  {tenant}: first token after {mean:4.1f} steps, the mean of {len(steps)}")


if __name__ == "__main__":
    main()
