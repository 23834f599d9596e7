"""The reference model runner: torch, on CUDA when there is one and on the CPU otherwise."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pdcore.checks import check_pool_serves
from pdcore.connector.base import KVCaches, WorkerConnector
from pdcore.errors import ExecutorError
from pdcore.kvcache.spec import KVCacheConfig, KVCacheSpec
from pdcore.messages import GrammarBitmask, ModelRunnerOutput, RowError, SchedulerOutput
from pdcore.runner.argument_checks import (
    check_cache_config,
    check_model_serves,
    check_runner_settings,
)
from pdcore.runner.attention.base import AttentionBackend
from pdcore.runner.attention.registry import resolve_attention_backend
from pdcore.runner.base import ModelRunner, poll_connector
from pdcore.runner.batch import BatchState
from pdcore.runner.decode_graphs import DecodeGraphs, choose_graph_sizes
from pdcore.runner.device import DTYPES, choose_device, choose_dtype, on_device, on_own_device
from pdcore.runner.drawing import ExecutedStep, draw, find_broken_kv
from pdcore.runner.graph_capture import CUDAGraphCapture, GraphCapture
from pdcore.runner.kv_identity import kv_fingerprint, kv_layout
from pdcore.runner.memory import allocate_cache, available_memory, stand_in
from pdcore.runner.models.llama import Attend
from pdcore.runner.models.loader import load_model
from pdcore.runner.models.rope import RotaryTable
from pdcore.runner.plan_checks import check_mask, check_plan
from pdcore.runner.shapes import attention_shape, kv_cache_spec
from pdcore.runner.step import StepInputs, StepLayout
from pdcore.runner.trial import trial_plan
from pdcore.scheduler.base import Limits

__all__ = ["GPUModelRunner"]

logger = logging.getLogger(__name__)

_NOTHING = np.zeros(0, np.int32)


class GPUModelRunner(ModelRunner):
    """Runs a Llama-family model over paged KV memory. One thread calls it, in step order.

    On a CPU it sets ``THP_MEM_ALLOC_ENABLE``, unless the process has it, so that torch takes huge
    pages for large tensors. Torch heeds it only if it has allocated nothing before.

    Args:
        model_path: a Hugging Face folder with safetensors, or a GGUF file.
        limits: the scheduler's limits; they size every buffer.
        device: "cpu"; "cuda", which is the current device of the thread that makes the runner;
            "cuda:1" and so on; None takes CUDA when there is one.
        dtype: "float32", "bfloat16" or "float16", of weights and KV; None takes float32 on a CPU
            and bfloat16 on CUDA.
        block_size: tokens in a block.
        attention_backend: a name ("torch", "triton"), a class, or None for the device's own.
        connector: the worker's half of a KV connector, or None.
        memory_utilization: which share of memory may be used; see `pdcore.runner.memory`.
        kv_cache_memory_bytes: size of the KV cache; given, nothing is measured.
        num_threads: torch's threads on a CPU, for the whole process; None leaves torch's choice.
        seed: what draws without a seed are derived from; None takes the operating system's entropy.
        keep_logits: whether `logits` holds on to the last step's logits.
        cuda_graph_sizes: of how many rows decode steps are captured as CUDA graphs, when the KV
            cache is allocated; others run kernel by kernel. Empty for none; None for a series up to
            ``max_num_seqs``. See `pdcore.runner.decode_graphs`.
        graph_capture: what captures them. None takes CUDA's graphs on CUDA, and elsewhere none.

    Attributes:
        logits: with ``keep_logits``, float32 (n, vocab_size) of the rows that drew in the last
            step, in the order of the result, before any grammar; None before the first.

    Raises:
        ConfigError: the settings do not fit each other, the model or the machine.
        UnsupportedModel, MissingWeights: the checkpoint cannot be run.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        limits: Limits,
        device: str | None = None,
        dtype: str | None = None,
        block_size: int = 16,
        attention_backend: str | type[AttentionBackend] | None = None,
        connector: WorkerConnector | None = None,
        memory_utilization: float | None = None,
        kv_cache_memory_bytes: int | None = None,
        num_threads: int | None = None,
        seed: int | None = None,
        keep_logits: bool = False,
        cuda_graph_sizes: tuple[int, ...] | None = None,
        graph_capture: GraphCapture | None = None,
    ) -> None:
        check_runner_settings(
            model_path=model_path,
            limits=limits,
            connector=connector,
            memory_utilization=memory_utilization,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            num_threads=num_threads,
            seed=seed,
            keep_logits=keep_logits,
            graph_capture=graph_capture,
        )
        self._device = choose_device(device)
        self._dtype_name = choose_dtype(dtype, self._device)
        backend = resolve_attention_backend(attention_backend, device=self._device.type)
        self._graph_sizes = choose_graph_sizes(cuda_graph_sizes, limits.max_num_seqs)
        if graph_capture is None and self._device.type == "cuda" and self._graph_sizes:
            graph_capture = CUDAGraphCapture(self._device)
        self._graph_capture = graph_capture
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        if self._device.type == "cpu":
            # Torch asks for huge pages if this is set when it allocates for the first time. A step
            # walks through all weights and a wide KV cache, and spends a tenth on finding pages.
            os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
        self._limits = limits
        self._connector = connector
        self._memory_utilization = memory_utilization
        self._kv_cache_memory_bytes = kv_cache_memory_bytes
        self._keep_logits = keep_logits
        self._seed = int.from_bytes(os.urandom(8), "little") if seed is None else seed
        with on_device(self._device):
            self._model = load_model(
                model_path, device=self._device, dtype=DTYPES[self._dtype_name]
            )
            self._config = config = self._model.config
            check_model_serves(limits, config)
            self._spec = kv_cache_spec(config, block_size=block_size, dtype=self._dtype_name)
            self._attention = backend(attention_shape(config, self._spec, self._device))
            self._rotary = RotaryTable(
                config.rope,
                self._spec.head_dim,
                num_positions=limits.max_model_len,
                device=self._device,
            )
            self._state = self._make_state()
        self._kv_cache: Tensor | None = None
        self._graphs: DecodeGraphs | None = None
        self._has_plan = self._is_closed = False
        self._executed: ExecutedStep | None = None
        self._errors: tuple[RowError, ...] = ()
        self.logits: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Where the model runs. While one of the runner's methods does, it is the current one."""
        return self._device

    @property
    def vocab_size(self) -> int:
        """Size of the model's vocabulary, for `Limits.vocab_size`."""
        return self._config.vocab_size

    @property
    def num_weight_bytes(self) -> int:
        """The bytes of weights that a decode step reads."""
        self._check_open("num_weight_bytes")
        return self._model.num_weight_bytes

    def get_kv_cache_spec(self) -> KVCacheSpec:
        return self._spec

    @on_own_device
    @torch.inference_mode()
    def determine_available_memory(self) -> int:
        self._check_open("determine_available_memory")
        if self._kv_cache_memory_bytes is not None:
            return self._kv_cache_memory_bytes
        if self._kv_cache is not None:
            raise ExecutorError(
                "determine_available_memory was called after initialize_from_config: its trial "
                "step would overwrite what rows refer to. Ask before the cache is made."
            )
        return available_memory(
            self._device, utilization=self._memory_utilization, trial=self._run_largest_step
        )

    @on_own_device
    def initialize_from_config(self, config: KVCacheConfig) -> None:
        self._check_open("initialize_from_config")
        if self._kv_cache is not None:
            raise ExecutorError("initialize_from_config was called before: a cache is made once")
        check_cache_config(config, self._spec)
        # Not in inference mode: connectors write to the cache from threads of their own, and torch
        # lets nobody outside inference mode write to a tensor that was made inside.
        self._kv_cache = self._allocate(config.num_blocks)
        self._attention.bind(self._kv_cache)
        self._capture_graphs()
        if self._connector is not None:
            self._connector.register_kv_caches(
                KVCaches(
                    buffer=self._kv_cache,
                    bytes_per_block=self._spec.bytes_per_block,
                    fingerprint=self.fingerprint,
                    layout=kv_layout(self._model, self._spec),
                )
            )

    @property
    def fingerprint(self) -> str:
        """Describes the KV: model, weights, element type and layout."""
        self._check_open("fingerprint")
        return kv_fingerprint(self._model, self._spec)

    @on_own_device
    @torch.inference_mode()
    def execute_model(self, output: SchedulerOutput) -> None:
        self._check_open("execute_model")
        if self._kv_cache is None:
            raise ExecutorError("execute_model was called before initialize_from_config")
        self._forget_step()
        check_plan(
            output,
            max_num_seqs=self._limits.max_num_seqs,
            max_num_blocks=self._state.max_num_blocks,
        )
        check_pool_serves(
            output.num_pool_blocks,
            output.pool_block_size,
            num_blocks=len(self._kv_cache),
            block_size=self._spec.block_size,
        )
        if self._connector is not None and output.connector_meta is not None:
            if self._device.type == "cuda":
                # Blocks that a load fills may have been written by kernels that still run.
                torch.cuda.current_stream(self._device).synchronize()
            self._connector.start_save_kv(output.connector_meta)
            self._connector.start_load_kv(output.connector_meta)
        self._run(output, num_blocks=len(self._kv_cache))
        if self._connector is not None:
            self._connector.wait_for_save()
        self._has_plan = True

    @on_own_device
    @torch.inference_mode()
    def sample_tokens(self, bitmask: GrammarBitmask | None) -> ModelRunnerOutput:
        self._check_open("sample_tokens")
        if not self._has_plan:
            raise ExecutorError("sample_tokens was called without an execute_model before it")
        step, errors = self._executed, self._errors
        self._forget_step()
        check_mask(bitmask, max_num_seqs=self._limits.max_num_seqs)
        rows = epochs = tokens = _NOTHING
        if step is not None:
            # A copy: the next replay overwrites them, and a mask does here.
            kept = step.logits.clone() if self._keep_logits else None
            drawn = draw(self._state, step, bitmask)
            rows, epochs, tokens = drawn.rows, drawn.epochs, drawn.token_ids
            errors += drawn.errors
            if kept is not None and len(kept):
                self.logits = kept[torch.from_numpy(drawn.has_drawn)] if drawn.errors else kept
        return ModelRunnerOutput(
            rows=rows,
            epochs=epochs,
            sampled_token_ids=tokens.reshape(-1, 1),
            errors=errors,
            transfer_report=poll_connector(self._connector),
        )

    @on_own_device
    def close(self) -> None:
        self._is_closed = True
        connector, self._connector = self._connector, None
        if connector is not None:
            connector.close()
        for name in ("_graphs", "_kv_cache", "_attention", "_model", "_state", "_executed"):
            self.__dict__[name] = None
        self.logits = None

    def _check_open(self, call: str) -> None:
        if self._is_closed:
            raise ExecutorError(f"{call} was called after close(): build a new runner")

    def _forget_step(self) -> None:
        self._has_plan, self._executed, self._errors = False, None, ()

    def _run(self, output: SchedulerOutput, *, num_blocks: int) -> None:
        self._state.apply(output, num_blocks=num_blocks)
        if not output.rows.size:
            return
        layout = self._state.lay_out(output)
        self._errors = layout.errors
        if layout.num_rows:
            self._executed = self._compute(layout)

    def _compute(self, layout: StepLayout) -> ExecutedStep:
        if self._graphs is not None and self._graphs.fits(layout):
            return ExecutedStep(layout=layout, logits=self._graphs.run(layout), has_broken_kv=None)
        has_broken_kv: Tensor | None = None

        def attend(layer: int, query: Tensor, key_value: Tensor) -> Tensor:
            nonlocal has_broken_kv
            if layer == self._spec.num_layers - 1:
                has_broken_kv = find_broken_kv(key_value.to(self._model.dtype))
            return self._attend(layer, query, key_value)

        inputs = self._state.inputs(layout)
        hidden = self._compute_hidden(inputs, self._attend if layout.is_all_draws else attend)
        logits = self._model.compute_logits(hidden)
        return ExecutedStep(layout=layout, logits=logits, has_broken_kv=has_broken_kv)

    def _compute_hidden(self, inputs: StepInputs, attend: Attend) -> Tensor:
        self._attention.plan(inputs.attention)
        return self._model.forward(
            inputs.token_ids,
            inputs.positions,
            rotary=self._rotary,
            attend=attend,
            wanted=inputs.sample_tokens,
        )

    def _compute_logits(self, inputs: StepInputs, logits: Tensor) -> None:
        self._model.compute_logits(self._compute_hidden(inputs, self._attend), out=logits)

    def _attend(self, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        if self._connector is None:
            return self._attention.forward(layer, query, key_value)
        self._connector.wait_for_layer_load(layer)
        seen = self._attention.forward(layer, query, key_value)
        self._connector.save_kv_layer(layer)
        return seen

    def _run_largest_step(self) -> None:
        """Run as many tokens as a step may have, over a small cache that is thrown away."""
        limits = self._limits
        num_rows = -(-limits.max_num_batched_tokens // limits.max_model_len)
        num_rows = min(num_rows, limits.max_num_seqs)
        length = min(limits.max_num_batched_tokens, limits.max_model_len)
        num_blocks = -(-length // self._spec.block_size)
        num_blocks += 1  # the null block
        self._attention.bind(self._allocate(num_blocks))
        graphs = self._make_graphs()
        graph_memory = None if graphs is None else stand_in(self._device, graphs.run_largest)
        self._run(trial_plan(num_rows, length, num_blocks - 1), num_blocks=num_blocks)
        hidden = torch.zeros(
            (limits.max_num_seqs, self._model.config.hidden_size),
            dtype=self._model.activation_dtype,
            device=self._device,
        )
        self._model.compute_logits(hidden)
        del graphs, graph_memory  # until here they took their share
        self._forget_step()
        self._state = self._make_state()

    @torch.no_grad()  # what torch keeps for graphs must be of use to others outside inference mode
    def _capture_graphs(self) -> None:
        self._graphs = self._make_graphs()
        if self._graphs is not None and self._graph_capture is not None:
            self._graphs.capture(self._graph_capture)

    def _make_graphs(self) -> DecodeGraphs | None:
        if self._graph_capture is None or not self._graph_sizes:
            return None
        if not self._attention.support.graph_decodes:
            logger.info("no CUDA graphs: attention backend %r has none", self._attention.name)
            return None
        if self._connector is not None and self._connector.needs_layer_calls():
            logger.info("no CUDA graphs: the KV connector has calls between layers")
            return None
        return DecodeGraphs(
            state=self._state,
            compute=self._compute_logits,
            sizes=self._graph_sizes,
            vocab_size=self.vocab_size,
            device=self._device,
        )

    def _allocate(self, num_blocks: int) -> Tensor:
        return allocate_cache(num_blocks, self._spec, self._device, DTYPES[self._dtype_name])

    def _make_state(self) -> BatchState:
        return BatchState(
            max_num_seqs=self._limits.max_num_seqs,
            max_model_len=self._limits.max_model_len,
            block_size=self._spec.block_size,
            sliding_window=self._spec.sliding_window,
            vocab_size=self.vocab_size,
            device=self._device,
            seed=self._seed,
        )
