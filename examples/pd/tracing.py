"""The library's parts, made to record what they do. Their own hot path knows nothing of it."""

from __future__ import annotations

from typing import Any

import torch

from pdcore.connector.stats import TransferStats
from pdcore.kvcache.base import BlockPool
from pdcore.kvcache.holds import HoldReason
from pdcore.messages import GrammarBitmask, ModelRunnerOutput, SchedulerOutput, StepResult
from pdcore.request import Request
from pdcore.runner.gpu import GPUModelRunner
from pdcore.scheduler.base import RequestHandle
from pdcore.scheduler.unified import UnifiedScheduler
from pdcore.trace import Tracer

__all__ = ["LANES", "DeviceTimer", "TracedRunner", "TracedScheduler"]

_NUM_CANDIDATES = 8
LANES = ("engine", "worker", "device", "kv transfer")


class TracedScheduler(UnifiedScheduler):
    """Records the time of its calls, and the states of its requests and of their holds."""

    def __init__(self, tracer: Tracer, pool: BlockPool, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tracer = tracer
        self._traced_pool = pool
        self._unfinished: set[str] = set()
        self._held: set[str] = set()

    def add_request(self, request: Request) -> RequestHandle:
        handle = super().add_request(request)
        self._unfinished.add(request.request_id)
        self._record_states()
        return handle

    def schedule(self) -> SchedulerOutput:
        with self._tracer.span("engine", "schedule"):
            output = super().schedule()
        self._record_states()
        return output

    def update_from_output(
        self, output: SchedulerOutput, model_output: ModelRunnerOutput
    ) -> StepResult:
        with self._tracer.span("engine", "update"):
            result = super().update_from_output(output, model_output)
        self._record_states()
        return result

    def _record_states(self) -> None:
        for request_id in tuple(self._unfinished):
            status = self.status(request_id)
            self._tracer.state(request_id, status)
            if status is None:
                self._unfinished.discard(request_id)
        holds = self._traced_pool.holds()
        held = {f"held {hold.owner}" for hold in holds if hold.reason is HoldReason.SEND}
        for name in held | self._held:
            self._tracer.state(name, "HELD" if name in held else None)
        self._held = held


class DeviceTimer:
    """When the device itself was busy: by CUDA events, or by the clock where the device is the CPU.

    Args:
        tracer: records the spans in its lane "device".
        is_cuda: whether the device has a clock of its own.
    """

    def __init__(self, tracer: Tracer, *, is_cuda: bool) -> None:
        self._tracer = tracer
        self._is_cuda = is_cuda
        self._zero = 0.0
        self._marks: list[Any] = []
        if is_cuda:
            self._marks = [self._mark()]
            torch.cuda.synchronize()
            self._zero = tracer.clock.now()

    def begin(self) -> None:
        """Work is about to be given to the device."""
        del self._marks[int(self._is_cuda) :]
        self._marks.append(self._mark())

    def end(self) -> None:
        """All work of the step was given to the device."""
        self._marks.append(self._mark())

    def record(self, name: str) -> None:
        """The step's result is on the host, so its marks are known."""
        start, end = self._marks[-2:]
        if self._is_cuda:
            start = self._zero + 1e-3 * self._marks[0].elapsed_time(start)
            end = self._zero + 1e-3 * self._marks[0].elapsed_time(end)
        self._tracer.add_span("device", name, start, end)

    def _mark(self) -> Any:
        if not self._is_cuda:
            return self._tracer.clock.now()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


class TracedRunner(GPUModelRunner):
    """Records the time of its steps, and what its connector measured.

    Args:
        tracer: records in the lanes "worker", "device" and "kv transfer".
        args, kwargs: as for `GPUModelRunner`. With ``keep_logits``, `candidates` is filled.

    Attributes:
        candidates: by request and place, the likeliest tokens and how many logits each was behind.
        moved: reads that ended since somebody last looked; the runner appends, the reader pops.
    """

    def __init__(self, tracer: Tracer, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tracer = tracer
        self._timer = DeviceTimer(tracer, is_cuda=self._device.type == "cuda")
        self._name = ""
        self._tenants: dict[tuple[int, int], str] = {}
        self.candidates: dict[str, list[dict[int, float]]] = {}
        self.moved: list[TransferStats] = []

    def execute_model(self, output: SchedulerOutput) -> None:
        for new in output.scheduled_new_reqs:
            self._tenants[new.row, new.epoch] = new.request_id
        self._name = _describe(output)
        with self._tracer.span("worker", self._name or "connector", step_id=output.step_id):
            self._timer.begin()
            super().execute_model(output)
            self._timer.end()

    def sample_tokens(self, bitmask: GrammarBitmask | None) -> ModelRunnerOutput:
        with self._tracer.span("worker", "sample"):
            result = super().sample_tokens(bitmask)
        if self._name:
            self._timer.record(self._name)
        self._record_candidates(result)
        self.moved.extend(result.transfer_report.measured)
        return result

    def _record_candidates(self, result: ModelRunnerOutput) -> None:
        if self.logits is None or not result.rows.size:
            return
        values, tokens = self.logits.topk(_NUM_CANDIDATES, dim=-1)
        behind = (values[:, :1] - values).tolist()
        pairs = zip(result.rows.tolist(), result.epochs.tolist(), strict=True)
        for tenant, near, margins in zip(pairs, tokens.tolist(), behind, strict=True):
            places = self.candidates.setdefault(self._tenants[tenant], [])
            places.append(dict(zip(near, margins, strict=True)))


def _describe(output: SchedulerOutput) -> str:
    """A step in a few words: how many prompt tokens it computes and how many rows it decodes."""
    counts = output.num_scheduled_tokens
    num_prefill_tokens = int(counts[counts > 1].sum())
    num_decode_rows = int((counts == 1).sum())
    parts = []
    if num_prefill_tokens:
        parts.append(f"prefill {num_prefill_tokens}")
    if num_decode_rows:
        parts.append(f"decode {num_decode_rows}")
    return " + ".join(parts)
