"""vLLM's control plane, as released, for the benchmarks. Runs in vLLM's own interpreter.

Its public parts are put together as its engine core does: `Scheduler` or `AsyncScheduler`, requests
with a block hasher of the default kind, results as `ModelRunnerOutput`.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import tempfile
import time
import tracemalloc
from typing import Any

from control_tasks import BLOCK_SIZE, VOCABULARY, control_tasks, prompts, take
from serving import StepTimes, serve, timed

os.environ.update(
    VLLM_LOGGING_LEVEL="ERROR",
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
)
logging.disable(logging.WARNING)

import torch  # noqa: E402  (the settings above must come first)
from vllm.config import (  # noqa: E402
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core.block_pool import BlockPool  # noqa: E402
from vllm.v1.core.kv_cache_utils import (  # noqa: E402
    get_request_block_hasher,
    init_none_hash,
    make_block_hash_with_group_id,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.outputs import ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402

SCHEDULERS = {"sync": Scheduler, "async": AsyncScheduler}

init_none_hash(sha256)


def model_folder() -> str:
    """A Llama configuration; no weights are read."""
    folder = tempfile.mkdtemp(prefix="vllm-control-")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "num_hidden_layers": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 131_072,
        "torch_dtype": "float32",
    }
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config, file)
    return folder


MODEL_FOLDER = model_folder()


class VLLMEngine:
    """vLLM's scheduler and, instead of a model, a source of tokens that costs next to nothing."""

    def __init__(
        self,
        *,
        num_seqs: int,
        num_blocks: int,
        caching: bool,
        budget: int,
        max_len: int,
        kind: str = "sync",
    ):
        config = VllmConfig(
            model_config=ModelConfig(
                model=MODEL_FOLDER,
                skip_tokenizer_init=True,
                max_model_len=max_len,
                dtype="float32",
            ),
            cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=caching),
            scheduler_config=SchedulerConfig(
                max_num_seqs=num_seqs,
                max_num_batched_tokens=budget,
                max_model_len=max_len,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
                async_scheduling=kind == "async",
            ),
            device_config=DeviceConfig("cpu"),
        )
        config.cache_config.num_gpu_blocks = num_blocks
        spec = FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=1, head_size=64, dtype=torch.float32
        )
        caches = KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        self.scheduler = SCHEDULERS[kind](
            vllm_config=config,
            kv_cache_config=caches,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
        )
        self.hasher = get_request_block_hasher(BLOCK_SIZE, sha256) if caching else None
        self.num_added = self.num_preemptions = self.num_scheduled_tokens = 0

    def add(self, prompt: list[int], max_tokens: int) -> None:
        """A new request for exactly so many tokens."""
        self.num_added += 1
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.scheduler.add_request(
            Request(
                request_id=f"chatcmpl-{self.num_added:032x}",
                prompt_token_ids=prompt,
                sampling_params=sampling,
                pooling_params=None,
                block_hasher=self.hasher,
            )
        )

    def step(self) -> None:
        """One step, untimed."""
        output = self.scheduler.schedule()
        self.scheduler.update_from_output(output, self.sampled(output))

    def timed_step(self, times: StepTimes) -> None:
        """One step; what the model would do is left out, reading every result is counted."""
        clock = time.perf_counter_ns
        begin = clock()
        output = self.scheduler.schedule()
        planned = clock()
        model_output = self.sampled(output)
        resume = clock()
        result = self.scheduler.update_from_output(output, model_output)
        for client in result.values():
            for event in client.outputs:
                take(event.request_id, event.new_token_ids, event.finish_reason)
        times.add(begin, clock() - (resume - planned))
        self.num_preemptions += len(output.preempted_req_ids or ())
        self.num_scheduled_tokens += output.total_num_scheduled_tokens

    def has_requests(self) -> bool:
        """Whether anything is unfinished."""
        return bool(self.scheduler.has_unfinished_requests())

    def totals(self) -> dict[str, float]:
        """What the timed steps did."""
        return {
            "num_preemptions": self.num_preemptions,
            "num_scheduled_tokens": self.num_scheduled_tokens,
        }

    def sampled(self, output: Any) -> ModelRunnerOutput:
        """A token for every request that draws one; none is a stop token."""
        ids = list(output.num_scheduled_tokens)
        tokens: list[list[int]] = []
        for place, request_id in enumerate(ids):
            request = self.scheduler.requests[request_id]
            draws = request.num_computed_tokens >= request.num_tokens
            tokens.append([place % VOCABULARY] if draws else [])
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=tokens,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )


def blocks(*, size: int, rounds: int) -> dict[str, float]:
    """Nanoseconds a block for each operation of the pool."""
    num_blocks = max(2 * size, 64) + 1

    def new_pool() -> BlockPool:
        return BlockPool(num_blocks, enable_caching=True, hash_block_size=BLOCK_SIZE)

    plain, hashed = new_pool(), new_pool()
    count = rounds * size
    spent: dict[str, float] = {}

    def note(name: str, start: int) -> None:
        spent[name] = spent.get(name, 0.0) + (time.perf_counter_ns() - start) / count

    clock = time.perf_counter_ns
    for _ in range(rounds):
        start = clock()
        taken = plain.get_new_blocks(size)
        note("allocate plain", start)
        start = clock()
        plain.free_blocks(reversed(taken))
        note("release plain", start)
    engine = VLLMEngine(num_seqs=1, num_blocks=64, caching=True, budget=64, max_len=64)
    for turn in range(rounds + 4):
        taken = None
        request = _hashed_request(engine, size, turn)
        start = clock()
        taken = hashed.get_new_blocks(size)
        if turn >= 4:
            note("allocate hashed", start)
        start = clock()
        hashed.cache_full_blocks(
            request=request,
            blocks=taken,
            num_cached_blocks=0,
            num_full_blocks=size,
            block_size=BLOCK_SIZE,
            kv_cache_group_id=0,
        )
        if turn >= 4:
            note("publish", start)
        start = clock()
        for block_hash in request.block_hashes:
            if hashed.get_cached_block(block_hash, [0]) is None:
                raise AssertionError("a published block is not found")
        if turn >= 4:
            note("lookup", start)
        start = clock()
        hashed.free_blocks(reversed(taken))
        if turn >= 4:
            note("release hashed", start)
    return spent


def _hashed_request(engine: VLLMEngine, size: int, turn: int) -> Request:
    """A request whose blocks have hashes that no other turn has."""
    tokens = [turn, *range(1, size * BLOCK_SIZE)]
    request = Request(
        request_id=f"turn-{turn}",
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=engine.hasher,
    )
    for block_hash in request.block_hashes:
        make_block_hash_with_group_id(block_hash, 0)
    return request


def pool(*, num_blocks: int) -> dict[str, float]:
    """Building a big pool: nanoseconds and bytes a block."""
    built: list[BlockPool] = []
    duration = timed(
        lambda: built.append(BlockPool(num_blocks, enable_caching=True, hash_block_size=BLOCK_SIZE))
    )
    built.clear()
    tracemalloc.start()
    built.append(BlockPool(num_blocks, enable_caching=True, hash_block_size=BLOCK_SIZE))
    num_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return {"build": duration * 1e3 / num_blocks, "num_bytes": num_bytes / num_blocks}


def wire(*, n: int, new: bool, prompt: int, repeats: int, seed: int) -> dict[str, float]:
    """A step of decodes that all take a block, or of new prompts, written and read."""
    engine = VLLMEngine(
        num_seqs=n,
        num_blocks=n * (prompt // BLOCK_SIZE + 4) + 1,
        caching=True,
        budget=n * prompt + 1,
        max_len=prompt + 64,
    )
    for tokens, _ in zip(prompts(prompt, seed), range(n), strict=False):
        engine.add(tokens, 48)
    output = engine.scheduler.schedule()
    while not new and not any(output.scheduled_cached_reqs.new_block_ids):
        engine.scheduler.update_from_output(output, engine.sampled(output))
        output = engine.scheduler.schedule()
    data = pickle.dumps(output, protocol=5)

    def write() -> None:
        for _ in range(repeats):
            pickle.dumps(output, protocol=5)

    def read() -> None:
        for _ in range(repeats):
            pickle.loads(data)

    return {
        "num_bytes": len(data),
        "write": timed(write) / repeats,
        "read": timed(read) / repeats,
    }


if __name__ == "__main__":
    serve({**control_tasks(VLLMEngine), "blocks": blocks, "pool": pool, "wire": wire})
