"""vLLM's scheduler as an `Engine`, and a small server that records what it decides.

Runs in an interpreter that has vLLM, and imports nothing of pdcore. Reads one trace a line from
standard input, as JSON, and writes its record as one line to standard output, after a line that
says it is ready. Decisions are read from vLLM's public objects; nothing of vLLM is changed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
from scheduler_traces import EOS, Trace
from stepping import Engine, Plan, Result, drive
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    make_block_hash_with_group_id,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 1 << 20,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}


class PeerEngine(Engine):
    """`Scheduler`, or `AsyncScheduler` when several plans are in flight.

    Args:
        trace: what it is to be taken through.
        model_config: of any model; its length limit is set to the trace's.
    """

    def __init__(self, trace: Trace, model_config: ModelConfig) -> None:
        settings = trace.settings
        model_config.max_model_len = settings.max_model_len
        is_async = settings.num_in_flight > 1
        cache_config = CacheConfig(
            block_size=settings.block_size, enable_prefix_caching=settings.enable_prefix_caching
        )
        cache_config.num_gpu_blocks = settings.num_blocks
        # Unchunked prompts need a step that holds any sequence; how much of it is used is a
        # setting of its own.
        config = VllmConfig(
            model_config=model_config,
            cache_config=cache_config,
            scheduler_config=SchedulerConfig(
                max_model_len=settings.max_model_len,
                is_encoder_decoder=False,
                max_num_seqs=settings.max_num_seqs,
                max_num_batched_tokens=max(
                    settings.max_num_batched_tokens,
                    0 if settings.enable_chunked_prefill else settings.max_model_len,
                ),
                max_num_scheduled_tokens=settings.max_num_batched_tokens,
                long_prefill_token_threshold=settings.long_prefill_token_threshold,
                enable_chunked_prefill=settings.enable_chunked_prefill,
                policy=settings.policy,
                async_scheduling=is_async,
            ),
            device_config=DeviceConfig("cpu"),
        )
        spec = FullAttentionSpec(
            block_size=settings.block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        self.trace = trace
        self.scheduler = (AsyncScheduler if is_async else Scheduler)(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=settings.num_blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=settings.block_size,
        )
        _expect_settings(self.scheduler, trace)
        self._pool = self.scheduler.kv_cache_manager.block_pool
        self._hasher = (
            get_request_block_hasher(settings.block_size, sha256)
            if settings.enable_prefix_caching
            else None
        )
        self._indices: dict[str, int] = {}
        self._in_flight: list[tuple[SchedulerOutput, dict[int, int]]] = []

    def add(self, request: int) -> None:
        arrival = self.trace.arrivals[request]
        sampling = SamplingParams(
            max_tokens=arrival.max_tokens,
            min_tokens=arrival.min_tokens,
            stop_token_ids=list(arrival.stop_token_ids),
            ignore_eos=arrival.ignore_eos,
        )
        sampling.update_from_generation_config({}, EOS)
        request_id = self.trace.request_id(request)
        self._indices[request_id] = request
        self.scheduler.add_request(
            Request(
                request_id=request_id,
                prompt_token_ids=self.trace.prompt_token_ids(request).tolist(),
                sampling_params=sampling,
                pooling_params=None,
                arrival_time=arrival.arrival_time,
                priority=arrival.priority,
                cache_salt=arrival.cache_salt,
                block_hasher=self._hasher,
            )
        )

    def abort(self, request: int) -> None:
        self.scheduler.finish_requests(
            self.trace.request_id(request), RequestStatus.FINISHED_ABORTED
        )

    def schedule(self) -> Plan:
        published = self._next_keys()
        output = self.scheduler.schedule()
        cached = output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        new = [
            [self._indices[data.req_id], data.num_computed_tokens]
            for data in output.scheduled_new_reqs
        ]
        resumed = [
            [self._indices[request_id], computed[request_id]]
            for request_id in output.num_scheduled_tokens
            if request_id in cached.resumed_req_ids
        ]
        draws = []
        for request_id in output.num_scheduled_tokens:
            request = self.scheduler.requests[request_id]
            if not request.is_prefill_chunk:
                draws.append((self._indices[request_id], request.num_computed_tokens))
        self._in_flight.append((output, dict(draws)))
        return Plan(
            scheduled=[
                [self._indices[request_id], num_tokens]
                for request_id, num_tokens in output.num_scheduled_tokens.items()
            ],
            new=new,
            resumed=resumed,
            preempted=sorted(self._indices[name] for name in output.preempted_req_ids or ()),
            draws=draws,
            withdrawn=any(
                self._blocks_with(published[name][0]) - published[name][1]
                for name in output.preempted_req_ids or ()
                if name in published
            ),
        )

    def update(self) -> Result:
        output, positions = self._in_flight.pop(0)
        names = list(output.num_scheduled_tokens)
        tokens = []
        for name in names:
            request = self._indices[name]
            position = positions.get(request)
            tokens.append([] if position is None else [self.trace.draw(request, position)])
        told = self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=tokens,
            ),
        )
        events = [event for outputs in told.values() for event in outputs.outputs]
        return Result(
            produced=sorted(
                self._indices[event.request_id] for event in events if event.new_token_ids
            ),
            finished=sorted(
                [self._indices[event.request_id], str(event.finish_reason)]
                for event in events
                if event.finish_reason is not None
            ),
        )

    @property
    def num_free_blocks(self) -> int:
        return self._pool.get_num_free_blocks()

    def _next_keys(self) -> dict[str, tuple[Any, set[int]]]:
        """For each request that runs: the key of its first block without one, if the tokens of
        that are known, and the blocks that have this key.

        Only under priorities can a request give way that was planned before in the same step.
        """
        if self.trace.settings.policy != "priority" or self._hasher is None:
            return {}
        keys = {}
        for request in self.scheduler.running:
            blocks = self.scheduler.kv_cache_manager.get_blocks(request.request_id).blocks[0]
            place = sum(block.block_hash is not None for block in blocks)
            if place < len(request.block_hashes):
                key = make_block_hash_with_group_id(request.block_hashes[place], 0)
                keys[request.request_id] = (key, self._blocks_with(key))
        return keys

    def _blocks_with(self, key: Any) -> set[int]:
        return {block.block_id for block in self._pool.blocks if block.block_hash == key}


def _expect_settings(scheduler: Scheduler, trace: Trace) -> None:
    """vLLM may overrule a setting; then the record would answer another question."""
    settings, config = trace.settings, scheduler.scheduler_config
    wanted = (
        settings.max_model_len,
        settings.max_num_batched_tokens,
        settings.max_num_seqs,
        settings.enable_chunked_prefill,
        settings.enable_prefix_caching,
        settings.long_prefill_token_threshold,
        settings.num_blocks - 1,
        0.0,
    )
    has = (
        scheduler.max_model_len,
        scheduler.max_num_scheduled_tokens,
        scheduler.max_num_running_reqs,
        config.enable_chunked_prefill,
        scheduler.kv_cache_manager.enable_caching,
        config.long_prefill_token_threshold,
        scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        config.watermark,
    )
    if wanted != has:
        raise RuntimeError(f"vLLM changed the settings: asked for {wanted}, has {has}")


def main() -> None:
    """Answer traces until standard input ends."""
    answers = sys.stdout
    # It has something to say about every pool that suits no CPU.
    logging.disable(logging.WARNING)
    with contextlib.redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_LLAMA))
        model_config = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32")
        init_none_hash(sha256)
        print("ready", file=answers, flush=True)
        for line in sys.stdin:
            trace = Trace.from_data(json.loads(line))
            try:
                answer: dict[str, Any] = drive(trace, PeerEngine(trace, model_config)).to_data()
            except Exception:
                answer = {"error": traceback.format_exc()}
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
