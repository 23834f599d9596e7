"""Executors without a thread: one that runs late and badly, one whose steps take virtual time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from pdcore import VirtualClock
from pdcore.errors import ExecutorError
from pdcore.messages import GrammarBitmask, ModelRunnerOutput, SchedulerOutput
from pdcore.runner.base import ModelRunner
from pdcore.runner.executor import Executor

__all__ = ["SimulatedExecutor", "TimedExecutor", "Trouble"]

Trouble = Callable[[str], BaseException | None]
"""Asked at each place where something can go wrong; what it returns is raised there."""


class _Call(Future[Any]):
    """A future that does what must be done before somebody can have its result."""

    def __init__(self, before_result: Callable[[_Call], None]) -> None:
        super().__init__()
        self._before_result = before_result

    def result(self, timeout: float | None = None) -> Any:
        self._before_result(self)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._before_result(self)
        return super().exception(0)


class SimulatedExecutor(Executor):
    """Queues calls on one runner, and runs them in the caller's thread as ``run_next`` is called.

    Args:
        runner: its KV cache is initialised.
        trouble: what goes wrong. The places: ``submit`` (the call raises), ``execute_model`` and
            ``sample_tokens`` (it fails before the runner is reached), ``executed`` and ``sampled``
            (it fails when the runner is done), ``wait`` (whoever waits is interrupted).
    """

    def __init__(self, runner: ModelRunner, *, trouble: Trouble = lambda place: None) -> None:
        self.executed: list[SchedulerOutput] = []
        self._runner = runner
        self._trouble = trouble
        self._queue: deque[tuple[_Call, Callable[[], Any]]] = deque()
        self._step_error: Exception | None = None

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def start(self) -> None: ...

    def execute_model(self, output: SchedulerOutput, *, non_block: bool = False) -> Any:
        call = self._submit(lambda: self._execute(output))
        return call if non_block else call.result()

    def sample_tokens(self, bitmask: GrammarBitmask | None, *, non_block: bool = False) -> Any:
        call = self._submit(lambda: self._sample(bitmask))
        return call if non_block else call.result()

    def collective_rpc(self, method: Any, args: Any = (), *, output_rank: Any = None) -> list[Any]:
        raise NotImplementedError

    def check_health(self) -> None: ...

    def close(self) -> None: ...

    def run_next(self) -> None:
        """Run the oldest call."""
        call, job = self._queue.popleft()
        try:
            result = job()
        except Exception as error:
            call.set_exception(error)
        else:
            call.set_result(result)

    def _submit(self, job: Callable[[], Any]) -> _Call:
        self._raise_trouble("submit")
        call = _Call(self._await)
        self._queue.append((call, job))
        return call

    def _await(self, call: _Call) -> None:
        if not call.done():
            self._raise_trouble("wait")
        while not call.done():
            self.run_next()

    def _execute(self, output: SchedulerOutput) -> None:
        self._step_error = ExecutorError(f"step {output.step_id} failed")
        self._raise_trouble("execute_model")
        self.executed.append(output)
        self._runner.execute_model(output)
        self._raise_trouble("executed")
        self._step_error = None

    def _sample(self, bitmask: GrammarBitmask | None) -> ModelRunnerOutput:
        if self._step_error is not None:
            raise self._step_error
        self._raise_trouble("sample_tokens")
        result = self._runner.sample_tokens(bitmask)
        self._raise_trouble("sampled")
        return result

    def _raise_trouble(self, place: str) -> None:
        error = self._trouble(place)
        if error is not None:
            raise error


class TimedExecutor(SimulatedExecutor):
    """A device on a virtual clock, which somebody who waits for a result moves on.

    Args:
        runner: as above.
        clock: tells when plans come, and when results are there.
        step_s: how long each stage is busy with a plan that has tokens.
        num_stages: a plan goes through so many stages, each of which takes one plan at a time. The
            first can begin with a row's next token only when the last has drawn its previous one.
    """

    def __init__(
        self, runner: ModelRunner, *, clock: VirtualClock, step_s: float, num_stages: int = 1
    ) -> None:
        super().__init__(runner)
        self.busy_s = [0.0] * num_stages
        self.starts: list[float] = []
        self._clock = clock
        self._step_s = step_s
        self._free_at = [0.0] * num_stages
        self._drawn_at: dict[tuple[int, int], float] = {}
        self._ready_at: dict[_Call, float] = {}
        self._last_ready_at = 0.0

    def execute_model(self, output: SchedulerOutput, *, non_block: bool = False) -> Any:
        draws = zip(
            output.rows.tolist(), output.epochs.tolist(), output.samples.tolist(), strict=True
        )
        tenants = [((row, epoch), is_drawn) for row, epoch, is_drawn in draws]
        time = max([self._clock.now(), *(self._drawn_at.get(tenant, 0.0) for tenant, _ in tenants)])
        step_s = self._step_s if tenants else 0.0
        for stage, free_at in enumerate(self._free_at):
            start = max(time, free_at)
            if stage == 0:
                self.starts.append(start)
            time = self._free_at[stage] = start + step_s
            self.busy_s[stage] += step_s
        self._drawn_at.update((tenant, time) for tenant, is_drawn in tenants if is_drawn)
        self._last_ready_at = time
        return super().execute_model(output, non_block=non_block)

    def _submit(self, job: Callable[[], Any]) -> _Call:
        call = super()._submit(job)
        self._ready_at[call] = self._last_ready_at
        return call

    def _await(self, call: _Call) -> None:
        self._clock.advance(max(self._ready_at.pop(call, 0.0) - self._clock.now(), 0.0))
        super()._await(call)
