"""Engine loops, as plain functions over the parts.

Nothing else in the library calls them: copy one and change it when yours must differ.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import numpy as np

from pdcore.clock import Clock
from pdcore.messages import ModelRunnerOutput, StepResult
from pdcore.runner.executor.base import Executor
from pdcore.scheduler.base import RequestHandle, Scheduler

__all__ = ["Waker", "step", "wait"]

_NOTHING = ModelRunnerOutput(
    rows=np.zeros(0, np.int32),
    epochs=np.zeros(0, np.int32),
    sampled_token_ids=np.zeros((0, 1), np.int32),
)


def step(
    scheduler: Scheduler,
    executor: Executor,
    *,
    aborts: Callable[[], Iterable[str | RequestHandle]] = tuple,
) -> StepResult:
    """Run one step: plan, forward pass, draw, take in.

    Args:
        scheduler: what to run.
        executor: where to run it.
        aborts: asked once, after the model ran, for requests that nobody wants any more.

    Raises:
        ExecutorError: the step failed on a worker. Its plan was taken back: the same requests run
            again with the next step, unless the executor is dead.
    """
    output = scheduler.schedule()
    model_output = _NOTHING
    try:
        if not output.is_empty:
            forward = executor.execute_model(output, non_block=True)
            bitmask = scheduler.get_grammar_bitmask(output)
            forward.result()
            model_output = executor.sample_tokens(bitmask)
        scheduler.abort_requests(aborts())
    except BaseException:
        scheduler.abandon(output, dispatched=True)
        raise
    return scheduler.update_from_output(output, model_output)


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
