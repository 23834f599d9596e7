"""The smallest engine: a scheduler, a runner, and a loop of one step at a time.

The runner is a fake without a model that checks every KV slot it reads, so this runs anywhere. Put
`pdcore.runner.GPUModelRunner` in its place and it is a real engine: the loop stays as it is.
"""

from __future__ import annotations

from pdcore import KVCacheManager, Limits, LRUBlockPool, Request, SamplingParams, UnifiedScheduler
from pdcore.kvcache import KVCacheConfig
from pdcore.messages import SchedulerOutput
from pdcore.testing import FakeKVRunner

NUM_BLOCKS, BLOCK_SIZE = 14, 4  # one is the null block: the KV of 52 tokens, which is tight


def make_requests() -> list[Request]:
    """A long prompt, a short one, and two that begin with the same 16 tokens."""
    shared = list(range(500, 516))
    prompts = {
        "long": list(range(100, 125)),
        "short": [7, 8, 9],
        "shared-1": [*shared, 1, 2],
        "shared-2": [*shared, 3, 4, 5],
    }
    sampling = SamplingParams(max_tokens=6, temperature=0.0)
    return [Request(name, prompt, sampling=sampling) for name, prompt in prompts.items()]


def main() -> None:
    """Run four requests to their end and show what each step did."""
    pool = LRUBlockPool(NUM_BLOCKS, BLOCK_SIZE)
    limits = Limits(max_num_seqs=3, max_num_batched_tokens=16, max_model_len=64)
    scheduler = UnifiedScheduler(KVCacheManager(pool), limits=limits)
    runner = FakeKVRunner(block_size=BLOCK_SIZE)
    runner.initialize_from_config(
        KVCacheConfig(spec=runner.get_kv_cache_spec(), num_blocks=NUM_BLOCKS)
    )
    names: dict[int, str] = {}

    for request in make_requests():
        scheduler.add_request(request)

    print(f"step  {'tokens to compute':36}  produced  free blocks")
    while scheduler.has_requests():
        output = scheduler.schedule()  # plan: who computes how many tokens
        runner.execute_model(output)  # the forward pass
        bitmask = scheduler.get_grammar_bitmask(output)  # what structured rows may draw
        model_output = runner.sample_tokens(bitmask)  # draw the tokens
        result = scheduler.update_from_output(output, model_output)  # commit

        print(
            f"{output.step_id:4}  {describe(output, names):36}  {result.token_ids.size:8}"
            f"  {pool.num_free_blocks:5} of {pool.num_usable_blocks}"
        )
        for event in result.outputs:
            if event.finish_reason is not None:
                names = {row: name for row, name in names.items() if name != event.request_id}
                again = ", after it had given way and begun anew" if event.num_preemptions else ""
                print(
                    f"      {event.request_id} is done: {event.num_prompt_tokens} prompt tokens "
                    f"({event.num_cached_tokens} from the cache), {event.num_output_tokens} output "
                    f"tokens{again}"
                )
    scheduler.check()


def describe(output: SchedulerOutput, names: dict[int, str]) -> str:
    """Who computes how many tokens in a step, and who lost its row and blocks to others."""
    preempted = [names.pop(row) for row in output.finished_rows.tolist() if row in names]
    names.update((new.row, new.request_id) for new in output.scheduled_new_reqs)
    pairs = zip(output.rows.tolist(), output.num_scheduled_tokens.tolist(), strict=True)
    parts = [f"{names[row]} {num_tokens}" for row, num_tokens in pairs]
    return ", ".join(parts + [f"{name} gives way" for name in preempted])


if __name__ == "__main__":
    main()
