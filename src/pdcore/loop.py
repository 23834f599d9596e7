"""Engine loops: one step at a time, or several under way. Plain code over the parts.

Nothing else in the library calls them: copy one and change it when yours must differ.
"""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from types import FrameType

import attrs
import numpy as np

from pdcore.checks import check_count, check_part
from pdcore.clock import Clock
from pdcore.messages import ModelRunnerOutput, SchedulerOutput, StepResult, TransferReport
from pdcore.runner.executor.base import Executor
from pdcore.scheduler.base import RequestHandle, Scheduler

__all__ = ["BatchQueue", "Waker", "step", "uninterrupted", "wait"]

_NOTHING = ModelRunnerOutput(
    rows=np.zeros(0, np.int32),
    epochs=np.zeros(0, np.int32),
    sampled_token_ids=np.zeros((0, 1), np.int32),
)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait for the end of the block.

    A plan, or a result, that is written to half of the columns can neither be gone on with nor be
    taken back. For the main thread, which alone is interrupted; elsewhere it does nothing. Costs
    two system calls. Other signals whose handlers raise are not held back.
    """
    is_main = threading.get_ident() == threading.main_thread().ident
    # None where a handler was set outside of Python, which could not be put back.
    handler = signal.getsignal(signal.SIGINT) if is_main else None
    if not callable(handler):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *interrupt: came.append(interrupt))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[0])


def step(
    scheduler: Scheduler,
    executor: Executor,
    *,
    aborts: Callable[[], Iterable[str | RequestHandle]] = tuple,
) -> StepResult:
    """Run one step: plan, forward pass, draw, take in.

    Whatever goes wrong, also Ctrl-C, the plan is taken back once the executor is done with it.
    Ctrl-C may cost the application the one `StepResult` that was just made. Plans that are in
    flight when it is called are taken back first: a second Ctrl-C may have cut the wait short.

    Args:
        scheduler: what to run.
        executor: where to run it.
        aborts: asked once, after the model ran, for requests that nobody wants any more.

    Raises:
        ExecutorError: the step failed on a worker. Its plan was taken back: the same requests run
            again with the next step, unless the executor is dead.
        ConfigError: ``executor`` is of another kind, a model runner say; nothing was planned.
    """
    check_part("scheduler", scheduler, Scheduler)
    check_part("executor", executor, Executor)
    _take_back(scheduler, None)
    plan: _UnderWay | None = None
    try:
        with uninterrupted():
            plan = _UnderWay(scheduler.schedule())
        plan.submit(scheduler, executor)
        model_output = plan.result()
        unwanted = aborts()
        with uninterrupted():
            scheduler.abort_requests(unwanted)
            return scheduler.update_from_output(plan.output, model_output)
    except BaseException:
        if plan is not None:
            plan.settle()
        _take_back(scheduler, None if plan is None else plan.transfer_report)
        raise


def _take_back(scheduler: Scheduler, report: TransferReport | None) -> None:
    """Take back every plan in flight, the newest first."""
    if scheduler.in_flight:
        with uninterrupted():
            for plan in reversed(scheduler.in_flight):
                scheduler.abandon(plan, dispatched=True, transfer_report=report)


@attrs.define(eq=False)
class _UnderWay:
    """A plan that was given to the executor, and the calls that it owes for it.

    Both calls are missing when nobody need hear of the plan, and when the executor refused them.
    """

    output: SchedulerOutput
    forward: Future[None] | None = None
    draw: Future[ModelRunnerOutput] | None = None

    def submit(self, scheduler: Scheduler, executor: Executor) -> None:
        """Give the plan to the executor, unless it is empty."""
        if not self.output.is_empty:
            # The executor runs calls in the order in which they are made: this draw comes before
            # the next forward pass. The mask is made while the model runs.
            self.forward = executor.execute_model(self.output, non_block=True)
            bitmask = scheduler.get_grammar_bitmask(self.output)
            self.draw = executor.sample_tokens(bitmask, non_block=True)

    def result(self) -> ModelRunnerOutput:
        """Wait for the result, or raise what went wrong."""
        if self.forward is None or self.draw is None:
            return _NOTHING
        self.forward.result()
        return self.draw.result()

    def settle(self) -> None:
        """Wait until nothing of it runs any more, however it ended."""
        for call in (self.forward, self.draw):
            if isinstance(call, Future):
                with suppress(CancelledError):
                    call.exception()

    @property
    def transfer_report(self) -> TransferReport | None:
        """What the workers' connectors had to say, in a plan that has settled with a result."""
        draw = self.draw
        if not isinstance(draw, Future) or draw.cancelled() or draw.exception() is not None:
            return None
        return getattr(draw.result(), "transfer_report", None)


class BatchQueue:
    """Steps with up to ``depth`` plans under way, so that the device need not wait for the engine.

    `step` fills the pipe first, then waits for the oldest result. With two plans under way one runs
    while the engine takes in the result before it and plans the one after it: a device that needs T
    and an engine that needs E for a step make one every max(T, E), where `step` needs T + E.

    A row's next token is computed before the engine knows its last one, which stays on the device.
    Where that cannot be (structured output: the next mask depends on the last token), the scheduler
    leaves out that row until its token is in, and the others go on. The pipe is as full as there is
    work: a plan that holds nothing is taken back rather than queued. Tokens are those of `step`.
    A request that stops has been computed in up to ``depth - 1`` steps more; these tokens are lost.

    Whatever goes wrong, also Ctrl-C, empties the pipe: once the executor has done all that it was
    given, every plan is taken back, the newest first. No request is lost by it, and the next `step`
    begins with what was taken back, unless the executor is dead. Ctrl-C waits while a plan is made
    and a result is taken in (`uninterrupted`), and may cost the application the one `StepResult`
    that was just made. Other signals whose handlers raise are not held back: one that hits the
    scheduler leaves it half written, to be thrown away.

    Args:
        scheduler: what to run.
        executor: where to run it.
        depth: the most plans under way. 2 hides the engine behind the device.
        aborts: asked once a step, when its result is there, for requests that nobody wants any
            more.

    Raises:
        ConfigError: ``depth`` is less than 1, or a part is of another kind: a model runner in place
            of an executor, say.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        depth: int = 2,
        aborts: Callable[[], Iterable[str | RequestHandle]] = tuple,
    ) -> None:
        check_part("scheduler", scheduler, Scheduler)
        check_part("executor", executor, Executor)
        check_count("depth", depth)
        self.depth = depth
        self._scheduler = scheduler
        self._executor = executor
        self._aborts = aborts
        self._under_way: deque[_UnderWay] = deque()
        self._is_broken = False

    def __len__(self) -> int:
        """How many plans are under way."""
        return len(self._under_way)

    def step(self) -> StepResult:
        """Plan until the pipe is full, then take in the result of the oldest plan.

        Raises:
            ExecutorError: a step failed on a worker. All plans were taken back.
        """
        self._finish_unwinding()
        with self._unwinding():
            if self._may_plan():
                while len(self) < self.depth and self._submit():
                    pass
            return self._take_in_oldest()

    def drain(self) -> Iterator[StepResult]:
        """Yield the results of all plans under way, in order, and plan nothing. Raises as `step`.

        For what must not meet a plan under way, such as new weights.
        """
        self._finish_unwinding()
        while self._under_way:
            with self._unwinding():
                result = self._take_in_oldest()
            yield result

    def abandon(self) -> None:
        """Wait until the executor is done with all plans under way, and take them back.

        An engine that ends, or gives up its executor, calls it. If the wait is interrupted, nothing
        is taken back yet, and the next call of this or of `step` goes on.
        """
        self._is_broken = True
        for plan in self._under_way:
            plan.settle()
        reports = {plan.output.step_id: plan.transfer_report for plan in self._under_way}
        with uninterrupted():
            # The scheduler knows best: an interrupt may have come before a plan was queued here.
            for output in reversed(self._scheduler.in_flight):
                report = reports.get(output.step_id)
                self._scheduler.abandon(output, dispatched=True, transfer_report=report)
            self._under_way.clear()
            self._is_broken = False

    @contextmanager
    def _unwinding(self) -> Iterator[None]:
        """Whatever is raised inside empties the pipe first."""
        try:
            yield
        except BaseException:
            self.abandon()
            raise

    def _finish_unwinding(self) -> None:
        """Go on where `abandon` was interrupted."""
        if self._is_broken:
            self.abandon()

    def _may_plan(self) -> bool:
        """Not behind plans without rows alone: orders may go out with every plan that is made, and
        the loop could never sleep. Their results come at once, and then it is planned again."""
        return not self._under_way or any(plan.output.rows.size for plan in self._under_way)

    def _submit(self) -> bool:
        """Plan a step and give it to the executor; return whether it may be worth to plan on."""
        with uninterrupted():
            output = self._scheduler.schedule()
            is_needless = output.is_empty and bool(self._under_way)
            if is_needless:
                # Who is left waits for results under way.
                self._scheduler.abandon(output)
        if is_needless:
            return False
        plan = _UnderWay(output)
        self._under_way.append(plan)
        plan.submit(self._scheduler, self._executor)
        return bool(output.rows.size)

    def _take_in_oldest(self) -> StepResult:
        plan = self._under_way[0]
        model_output = plan.result()
        unwanted = self._aborts()
        with uninterrupted():
            self._scheduler.abort_requests(unwanted)
            result = self._scheduler.update_from_output(plan.output, model_output)
            self._under_way.popleft()
        return result


class Waker:
    """Wakes a sleeping loop from any thread: pass it as a connector's ``notify``."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def __call__(self) -> None:
        self._event.set()

    def wait(self, timeout_s: float | None) -> bool:
        """Sleep until called or timed out; return whether it was called."""
        woken = self._event.wait(timeout_s)
        self._event.clear()
        return woken


def wait(scheduler: Scheduler, waker: Waker, *, clock: Clock, max_wait_s: float = 1.0) -> None:
    """Sleep until a step could do something: at once, at the next deadline, or when woken.

    Args:
        scheduler: asked for its work and its next deadline.
        waker: woken by connectors and by whoever adds or aborts requests.
        clock: the scheduler's clock.
        max_wait_s: the longest sleep, for parts that cannot wake anybody.
    """
    if scheduler.has_work():
        return
    wakeup = scheduler.next_wakeup()
    timeout_s = max_wait_s
    if wakeup is not None:
        timeout_s = min(timeout_s, max(wakeup - clock.now(), 0.0))
    waker.wait(timeout_s)
