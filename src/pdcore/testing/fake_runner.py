"""A model runner without a model that makes every KV mistake an error."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import numpy as np

from pdcore.checks import check_pool_serves
from pdcore.connector.base import KVCaches, WorkerConnector
from pdcore.connector.layout import KVLayout
from pdcore.errors import ConfigError, ExecutorError
from pdcore.kvcache.spec import KVCacheConfig, KVCacheSpec
from pdcore.messages import GrammarBitmask, ModelRunnerOutput, RowError, SchedulerOutput
from pdcore.request import Request
from pdcore.runner.base import ModelRunner, poll_connector
from pdcore.testing.fake_memory import FakeKVMemory
from pdcore.testing.fake_rows import FakeRows, Span
from pdcore.testing.oracle import FakeModel, Script

__all__ = ["FakeKVRunner"]

RowFault = Callable[[str, int], str | None]
StepFault = Callable[[SchedulerOutput], Exception | None]

_LAYER = 0


@attrs.frozen(eq=False)
class _State:
    """What exists once the size of the KV cache is known."""

    rows: FakeRows
    memory: FakeKVMemory
    caches: KVCaches


class FakeKVRunner(ModelRunner):
    """Runs plans exactly, without a model.

    Each KV slot holds a hash of the whole prefix up to its token, of cache salt and of LoRA.
    Attention compares every slot that a row sees with the hash that this row's own prefix gives, so
    a stale or foreign block raises `StaleKV` and never just yields another token. The next token is
    a function of the last hash, so `solo_tokens` knows what any request must produce. Every claim
    of a plan is checked against the worker's own count; a wrong one raises `PlanError`.

    Sampled tokens feed back inside the runner, so the scheduler may plan ahead of the results.

    Args:
        block_size: tokens in a block.
        num_blocks: what `determine_available_memory` has room for, the null block included.
        vocab_size: tokens are drawn below it.
        num_special_tokens: ids below it are never drawn unless the script or a bitmask says so.
        script: forces the token at a place: called with a request id and the token's position.
        sliding_window: how many tokens back a token sees, itself included; None means all.
        connector: the worker's half of a KV connector, or None.
        model_name: part of the cache's fingerprint; give peers different ones to see a refusal.
        row_fault: makes single rows fail: called with a request id and the position of the row's
            last scheduled token, returns a cause or None.
        step_fault: makes whole steps fail: called with the plan before anything of it is applied,
            returns what `execute_model` raises, or None.
    """

    def __init__(
        self,
        *,
        block_size: int = 16,
        num_blocks: int = 1024,
        vocab_size: int = 32_000,
        num_special_tokens: int = 4,
        script: Script | None = None,
        sliding_window: int | None = None,
        connector: WorkerConnector | None = None,
        model_name: str = "fake",
        row_fault: RowFault | None = None,
        step_fault: StepFault | None = None,
    ) -> None:
        self.model = FakeModel(
            vocab_size=vocab_size, num_special_tokens=num_special_tokens, script=script
        )
        # A slot is one uint64: the room that a float32 key and a float32 value take.
        self._spec = KVCacheSpec(
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            block_size=block_size,
            dtype="float32",
            sliding_window=sliding_window,
        )
        self._memory_bytes = num_blocks * self._spec.bytes_per_block
        self._connector = connector
        self._model_name = model_name
        self._row_fault = row_fault
        self._step_fault = step_fault
        self._state: _State | None = None
        self._executed: list[Span] = []
        self._causes: dict[int, str] = {}
        self._failed: dict[tuple[int, int], str] = {}
        self._again: tuple[RowError, ...] = ()

    @property
    def kv_caches(self) -> KVCaches:
        """The KV memory; its buffer is uint64 (num_blocks, block_size)."""
        return self._initialized().caches

    def solo_tokens(self, request: Request, *, max_model_len: int = 2**31 - 1) -> list[int]:
        """What a request must produce: its tokens when it runs alone. Touches no state."""
        return self.model.solo_tokens(request, max_model_len=max_model_len)

    def get_kv_cache_spec(self) -> KVCacheSpec:
        return self._spec

    def determine_available_memory(self) -> int:
        return self._memory_bytes

    def initialize_from_config(self, config: KVCacheConfig) -> None:
        if self._state is not None:
            raise ConfigError("initialize_from_config() was called before: a cache is made once")
        if config.spec != self._spec:
            raise ConfigError(
                f"the KV cache was configured for {config.spec}, but the runner needs {self._spec}"
            )
        block_size = config.spec.block_size
        memory = FakeKVMemory(
            num_blocks=config.num_blocks,
            block_size=block_size,
            sliding_window=config.spec.sliding_window,
        )
        caches = KVCaches(
            buffer=memory.slots,
            bytes_per_block=memory.slots.itemsize * block_size,
            fingerprint=f"{self._model_name}-uint64-block{block_size}",
            layout=KVLayout(
                model=self._model_name,
                dtype="uint64",
                element_size=memory.slots.itemsize,
                num_layers=1,
                num_components=1,
                block_size=block_size,
                num_kv_heads=1,
                head_dim=1,
            ),
        )
        rows = FakeRows(num_blocks=config.num_blocks, block_size=block_size)
        self._state = _State(rows, memory, caches)
        if self._connector is not None:
            self._connector.register_kv_caches(caches)

    def execute_model(self, output: SchedulerOutput) -> None:
        """As promised by `ModelRunner`.

        Raises:
            ConfigError: the scheduler's pool has more blocks than this worker, or others.
            PlanError: the plan contradicts itself or what the worker knows.
            StaleKV: a row would read KV that is not its own.
        """
        state, connector = self._initialized(), self._connector
        self._executed = []
        check_pool_serves(
            output.num_pool_blocks,
            output.pool_block_size,
            num_blocks=state.caches.num_blocks,
            block_size=self._spec.block_size,
        )
        self._raise_step_fault(output)
        state.rows.apply(output)
        output, self._again = self._without_failed(output)
        spans = state.rows.spans(output)
        if connector is not None and output.connector_meta is not None:
            connector.start_save_kv(output.connector_meta)
            connector.start_load_kv(output.connector_meta)
        self._causes = self._row_faults(spans)
        # A row that fails writes nothing, as one that the model is never run for.
        running = [span for span in spans if span.row.row not in self._causes]
        # All rows write before any reads, as a layer does: rows of one step may share blocks.
        state.memory.write(output.step_id, running)
        state.memory.omit([span for span in spans if span.row.row in self._causes])
        if connector is not None:
            connector.wait_for_layer_load(_LAYER)
        for span in running:
            cause = state.memory.attend(output.step_id, span)
            if cause is not None:
                self._causes[span.row.row] = cause
                state.memory.omit([span])
        if connector is not None:
            connector.save_kv_layer(_LAYER)
            connector.wait_for_save()
        for span in spans:
            span.row.num_computed_tokens = span.stop
        self._executed = spans

    def sample_tokens(self, bitmask: GrammarBitmask | None) -> ModelRunnerOutput:
        self._initialized()
        spans, self._executed = self._executed, []
        drawn: list[tuple[int, int, int]] = []
        errors: list[RowError] = list(self._again)
        for span in spans:
            row = span.row
            result = self._run_row(span, bitmask)
            if isinstance(result, str):
                errors.append(RowError(row=row.row, epoch=row.epoch, cause=result))
                self._failed[row.row, row.epoch] = result
            elif result is not None:
                row.chain.append(result)
                drawn.append((row.row, row.epoch, result))
        columns = np.array(drawn, dtype=np.int32).reshape(-1, 3)
        return ModelRunnerOutput(
            rows=columns[:, 0].copy(),
            epochs=columns[:, 1].copy(),
            sampled_token_ids=columns[:, 2:].copy(),
            errors=tuple(errors),
            transfer_report=poll_connector(self._connector),
        )

    def close(self) -> None:
        self._state = None
        self._executed = []
        connector, self._connector = self._connector, None
        if connector is not None:
            connector.close()

    def _initialized(self) -> _State:
        if self._state is None:
            raise ExecutorError(
                "the runner has no KV cache: call initialize_from_config() first, and nothing "
                "after close()"
            )
        return self._state

    def _raise_step_fault(self, output: SchedulerOutput) -> None:
        fault = None if self._step_fault is None else self._step_fault(output)
        if fault is not None:
            raise fault

    def _without_failed(
        self, output: SchedulerOutput
    ) -> tuple[SchedulerOutput, tuple[RowError, ...]]:
        """Rows that failed before, in a plan made ahead of that result, fail again."""
        pairs = list(zip(output.rows.tolist(), output.epochs.tolist(), strict=True))
        again = tuple(
            RowError(row=row, epoch=epoch, cause=self._failed[row, epoch])
            for row, epoch in pairs
            if (row, epoch) in self._failed
        )
        if not again:
            return output, ()
        kept = np.array([pair not in self._failed for pair in pairs], np.bool_)
        names = ("rows", "epochs", "num_scheduled_tokens", "num_computed_tokens", "samples")
        columns = {name: getattr(output, name)[kept] for name in names}
        return attrs.evolve(output, **columns), again

    def _row_faults(self, spans: list[Span]) -> dict[int, str]:
        """Why single rows fail in this step, by row."""
        if self._row_fault is None:
            return {}
        causes = {
            span.row.row: self._row_fault(span.row.request_id, span.stop - 1) for span in spans
        }
        return {row: cause for row, cause in causes.items() if cause is not None}

    def _run_row(self, span: Span, bitmask: GrammarBitmask | None) -> int | str | None:
        """The token that a row draws; in words why it failed; or None when it draws none."""
        row = span.row
        if row.row in self._causes:
            return self._causes[row.row]
        if not span.samples:
            return None
        token = self.model.next_token(row.request_id, len(row.chain), row.chain.hashes[-1])
        return token if bitmask is None else self._masked(span, token, bitmask)

    def _masked(self, span: Span, token: int, bitmask: GrammarBitmask) -> int | str:
        """The first allowed token at or after ``token``, beginning again at 0 after the last."""
        is_row = (bitmask.rows == span.row.row) & (bitmask.epochs == span.row.epoch)
        if not is_row.any():
            return token
        words = np.ascontiguousarray(bitmask.bits[is_row][0]).astype("<i4")
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: self.model.vocab_size]
        allowed = np.flatnonzero(bits)
        if not allowed.size:
            return "the grammar allows no token"
        return int(allowed[np.searchsorted(allowed, token) % allowed.size])
