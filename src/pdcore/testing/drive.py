"""A loop for tests: it drives a scheduler to the end and checks what it promises to its loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import attrs
import numpy as np

from pdcore.checks import check_count
from pdcore.clock import VirtualClock
from pdcore.messages import ModelRunnerOutput, RequestOutput, SchedulerOutput, StepResult
from pdcore.request import FinishReason, Request
from pdcore.runner.base import ModelRunner
from pdcore.runner.executor.base import Executor
from pdcore.scheduler.base import Scheduler
from pdcore.testing.errors import DriveError

__all__ = ["Delivered", "Driver", "run_to_completion"]

_PATIENCE = 10


@attrs.define(eq=False)
class Delivered:
    """What the application was told of one request.

    Args:
        request: the request.
        token_ids: its tokens so far.
        end: the output that ended it, or None while it lives.
    """

    request: Request
    token_ids: list[int] = attrs.field(factory=list)
    end: RequestOutput | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        return None if self.end is None else self.end.finish_reason


class Driver:
    """Steps a scheduler with up to ``num_in_flight`` plans under way, and collects what it tells.

    Args:
        scheduler: the scheduler under test.
        runner: runs the plans: a runner with its KV cache initialised, or a started executor.
        clock: the scheduler's clock, if it is virtual: it is moved on when only time can help.
        num_in_flight: plans made before the result of the oldest is taken in.
        checks: whether to call the scheduler's `check` after every step.
        max_idle_steps: how many steps in a row may do nothing before `run` gives up.

    Raises:
        ConfigError: ``num_in_flight`` is less than 1.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner | Executor,
        *,
        clock: VirtualClock | None = None,
        num_in_flight: int = 1,
        checks: bool = True,
        max_idle_steps: int = 200,
    ) -> None:
        check_count("num_in_flight", num_in_flight)
        self.scheduler = scheduler
        self.delivered: dict[str, Delivered] = {}
        self._runner = runner
        self._clock = clock
        self._num_in_flight = num_in_flight
        self._checks = checks
        self._max_idle_steps = max_idle_steps
        self._in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()

    def add(self, request: Request) -> None:
        """Add a request. An id may come again once its request has ended."""
        self.scheduler.add_request(request)
        self.delivered[request.request_id] = Delivered(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Abort requests now, with whatever plans are in flight."""
        self.scheduler.abort_requests(request_ids)

    def step(self, *, aborts: Iterable[str] = ()) -> bool:
        """Plan and run one step, and take in the oldest result when enough plans are in flight.

        Args:
            aborts: request ids to abort between ``schedule`` and ``update_from_output``.

        Returns:
            Whether anything was computed or told.

        Raises:
            DriveError: the scheduler told the application something it must not.
        """
        output = self.scheduler.schedule()
        self._in_flight.append((output, self._run(output)))
        self.abort(aborts)
        is_busy = has_rows = bool(output.rows.size)
        # A plan without rows waits for results, or is the last: nothing is gained by planning on.
        while self._in_flight and (len(self._in_flight) >= self._num_in_flight or not has_rows):
            is_busy |= self._take_in_oldest()
        if self._checks:
            self.scheduler.check()
        return is_busy

    def settle(self) -> None:
        """Take in every result that is still out."""
        while self._in_flight:
            self._take_in_oldest()

    def run(self) -> dict[str, Delivered]:
        """Step until nothing is left, and return what each request got, by its id.

        Raises:
            DriveError: a request ended twice or never, or nothing moves any more.
        """
        num_idle = 0
        while self.scheduler.has_requests():
            num_idle = 0 if self.step() else num_idle + 1
            if num_idle > self._max_idle_steps:
                raise DriveError(self._describe_stall())
            # A part that asks to be polled may need a few steps, or time after all.
            if num_idle and (not self.scheduler.has_work() or num_idle % _PATIENCE == 0):
                self._let_time_pass()
        self.settle()
        self._collect(self.scheduler.drain())
        endless = [name for name, got in self.delivered.items() if got.end is None]
        if endless:
            raise DriveError(f"the scheduler is done, and {endless} were never told to end")
        return self.delivered

    def _run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        if output.is_empty:
            nothing = np.zeros(0, dtype=np.int32)
            return ModelRunnerOutput(
                rows=nothing, epochs=nothing, sampled_token_ids=nothing.reshape(0, 1)
            )
        self._runner.execute_model(output)
        return self._runner.sample_tokens(self.scheduler.get_grammar_bitmask(output))

    def _take_in_oldest(self) -> bool:
        output, model_output = self._in_flight.popleft()
        result: StepResult = self.scheduler.update_from_output(output, model_output)
        self._collect(result.outputs)
        return bool(result.request_ids)

    def _collect(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            got = self.delivered.get(output.request_id)
            if got is None:
                raise DriveError(f"an output names {output.request_id!r}, which was never added")
            if got.end is not None:
                raise DriveError(f"{output} came after the end of the request, {got.end}")
            got.token_ids.extend(output.new_token_ids)
            if output.finish_reason is not None:
                got.end = output

    def _let_time_pass(self) -> None:
        if self._clock is None:
            return
        wakeup = self.scheduler.next_wakeup()
        if wakeup is not None and wakeup > self._clock.now():
            self._clock.advance(wakeup - self._clock.now())

    def _describe_stall(self) -> str:
        waiting = {
            name: self.scheduler.explain(name)
            for name, got in self.delivered.items()
            if got.end is None
        }
        return (
            f"{self._max_idle_steps} steps in a row did nothing; next_wakeup() is "
            f"{self.scheduler.next_wakeup()}; unfinished: {waiting}"
        )


def run_to_completion(
    scheduler: Scheduler,
    runner: ModelRunner | Executor,
    requests: Iterable[Request] = (),
    *,
    clock: VirtualClock | None = None,
    num_in_flight: int = 1,
    checks: bool = True,
) -> dict[str, Delivered]:
    """Add requests, step until all have ended, and return what each got, by its id.

    Args:
        scheduler: the scheduler under test.
        runner: runs the plans.
        requests: added before the first step.
        clock, num_in_flight, checks: as for `Driver`.

    Raises:
        DriveError: a request ended twice or never, got tokens after its end, or nothing moves.
    """
    driver = Driver(scheduler, runner, clock=clock, num_in_flight=num_in_flight, checks=checks)
    for request in requests:
        driver.add(request)
    return driver.run()
