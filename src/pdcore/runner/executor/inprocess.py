"""An executor for one process and one rank: the model runs in a thread of its own."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any, Literal, overload

import attrs

from pdcore.checks import check_part
from pdcore.errors import ConfigError, ExecutorDead, ExecutorError
from pdcore.kvcache.spec import KVCacheConfig
from pdcore.messages import GrammarBitmask, ModelRunnerOutput, SchedulerOutput
from pdcore.runner.base import ModelRunner
from pdcore.runner.executor.base import Executor

__all__ = ["InProcessExecutor"]

logger = logging.getLogger(__name__)

_RANK = 0


@attrs.frozen(eq=False)
class _Job:
    """One call on the runner: what errors call it, what to do, and where its result goes."""

    label: str
    call: Callable[[ModelRunner], Any]
    future: Future[Any]


def _settle(future: Future[Any], *, result: Any = None, error: BaseException | None = None) -> None:
    """Give a future its end. It may have one: `close` fails what takes too long."""
    try:
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
    except InvalidStateError:
        logger.debug("a result came after its future was failed by close()")


def _step_error(label: str, cause: BaseException) -> ExecutorError:
    error = ExecutorError(f"rank {_RANK} failed in {label}: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


def _dead_error(label: str, cause: BaseException | None = None) -> ExecutorDead:
    reason = (
        "the executor is closed" if cause is None else f"its thread died of {type(cause).__name__}"
    )
    error = ExecutorDead(f"rank {_RANK} will never answer {label}: {reason}. Build a new executor.")
    error.__cause__ = cause
    return error


class InProcessExecutor(Executor):
    """Runs one `ModelRunner` in a named thread, so that the engine can plan meanwhile.

    Calls queue up and run in the order in which they were made. An exception in one fails that
    call's future (and, for `execute_model`, the `sample_tokens` that belongs to it); the thread
    goes on. Only what is not an `Exception`, such as `SystemExit`, ends the thread.

    Args:
        make_runner: builds the runner; called once, on the executor's thread. A `ModelRunner`
            class without arguments will do.
        num_blocks: size of the KV cache, the null block included; None takes what the runner's
            memory allows.
        name: the thread's name.
        close_timeout_s: how long `close` waits for the call that is running.
    """

    def __init__(
        self,
        make_runner: Callable[[], ModelRunner],
        *,
        num_blocks: int | None = None,
        name: str = "pdcore-runner",
        close_timeout_s: float = 30.0,
    ) -> None:
        if not callable(make_runner):
            raise ConfigError(
                f"make_runner={make_runner!r:.80}: pass a function that makes the runner, which is "
                "called on the executor's thread: lambda: runner, say"
            )
        if num_blocks is not None and num_blocks < 2:
            raise ConfigError(
                f"num_blocks={num_blocks}: at least 2 are needed, since block 0 is the null block"
            )
        self._make_runner = make_runner
        self._num_blocks = num_blocks
        self._name = name
        self._close_timeout_s = close_timeout_s
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        # Guards the state below: nothing may be queued once nobody is there to serve it.
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_open = False
        self._death: BaseException | None = None
        self._running: _Job | None = None
        self._config: KVCacheConfig | None = None
        # Written on the executor's thread alone: how the plan that waits to be sampled went.
        self._has_plan = False
        self._plan_error: ExecutorError | None = None

    @property
    def kv_cache_config(self) -> KVCacheConfig:
        """The size and shape of the KV cache; raises `ExecutorError` before `start`."""
        if self._config is None:
            raise ExecutorError("the KV cache has no size yet: call start() first")
        return self._config

    def start(self) -> None:
        if self._thread is not None:
            raise ExecutorError("start() was called before: an executor starts once")
        ready: Future[KVCacheConfig] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(ready,), name=self._name, daemon=True
        )
        self._thread.start()
        try:
            self._config = ready.result()
        except BaseException:
            self.close()
            raise

    @overload
    def execute_model(
        self, output: SchedulerOutput, *, non_block: Literal[True]
    ) -> Future[None]: ...

    @overload
    def execute_model(
        self, output: SchedulerOutput, *, non_block: Literal[False] = False
    ) -> None: ...

    def execute_model(
        self, output: SchedulerOutput, *, non_block: bool = False
    ) -> Future[None] | None:
        label = f"execute_model of step {output.step_id}"
        future = self._submit(label, lambda runner: self._execute(runner, output, label))
        return future if non_block else future.result()

    @overload
    def sample_tokens(
        self, bitmask: GrammarBitmask | None, *, non_block: Literal[True]
    ) -> Future[ModelRunnerOutput]: ...

    @overload
    def sample_tokens(
        self, bitmask: GrammarBitmask | None, *, non_block: Literal[False] = False
    ) -> ModelRunnerOutput: ...

    def sample_tokens(
        self, bitmask: GrammarBitmask | None, *, non_block: bool = False
    ) -> Future[ModelRunnerOutput] | ModelRunnerOutput:
        future: Future[ModelRunnerOutput] = self._submit(
            "sample_tokens", lambda runner: self._sample(runner, bitmask)
        )
        return future if non_block else future.result()

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: tuple[Any, ...] = (),
        *,
        output_rank: int | None = None,
    ) -> list[Any]:
        if output_rank not in (None, _RANK):
            raise ConfigError(f"output_rank={output_rank}: this executor has rank {_RANK} alone")
        if isinstance(method, str):
            name = method
            future = self._submit(name, lambda runner: getattr(runner, name)(*args))
        else:
            label = getattr(method, "__name__", repr(method))
            future = self._submit(label, lambda runner: method(runner, *args))
        return [future.result()]

    def check_health(self) -> None:
        with self._lock:
            self._raise_if_dead("calls")

    def close(self) -> None:
        with self._lock:
            self._is_open = False
            orphans = self._take_queued()
            self._jobs.put(None)
        self._fail(orphans)
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(self._close_timeout_s)
        if thread.is_alive():
            self._give_up_running()

    # On the engine's thread.

    def _submit(self, label: str, call: Callable[[ModelRunner], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        # A call in the queue cannot be cancelled: its pair would go on without it.
        future.set_running_or_notify_cancel()
        with self._lock:
            self._raise_if_dead(label)
            self._jobs.put(_Job(label, call, future))
        return future

    def _raise_if_dead(self, label: str) -> None:
        if self._thread is None:
            raise ExecutorDead(f"rank {_RANK} cannot take {label}: call start() first")
        if not self._is_open or not self._thread.is_alive():
            raise _dead_error(label, self._death)

    def _give_up_running(self) -> None:
        with self._lock:
            job = self._running
        logger.warning(
            "%s did not end within %g s of close(); its thread is left behind",
            "the runner's close()" if job is None else job.label,
            self._close_timeout_s,
        )
        if job is not None:
            self._fail([job])

    # On the executor's thread.

    def _run(self, ready: Future[KVCacheConfig]) -> None:
        runner: ModelRunner | None = None
        try:
            made = self._make_runner()
            check_part("make_runner()", made, ModelRunner)
            runner = made
            config = self._initialize(runner)
        except BaseException as error:
            _close_runner(runner)
            ready.set_exception(error)
            return
        with self._lock:
            self._is_open = True
        ready.set_result(config)
        try:
            self._serve(runner)
        finally:
            _close_runner(runner)

    def _initialize(self, runner: ModelRunner) -> KVCacheConfig:
        spec = runner.get_kv_cache_spec()
        num_blocks = self._num_blocks
        if num_blocks is None:
            num_blocks = spec.num_blocks_for(runner.determine_available_memory())
        config = KVCacheConfig(spec=spec, num_blocks=num_blocks)
        runner.initialize_from_config(config)
        return config

    def _serve(self, runner: ModelRunner) -> None:
        while (job := self._jobs.get()) is not None:
            with self._lock:
                self._running = job
            try:
                _settle(job.future, result=job.call(runner))
            except ExecutorError as error:
                _settle(job.future, error=error)
            except Exception as error:
                _settle(job.future, error=_step_error(job.label, error))
            except BaseException as error:
                self._die(job, error)
                return
            finally:
                with self._lock:
                    self._running = None

    def _execute(self, runner: ModelRunner, output: SchedulerOutput, label: str) -> None:
        self._has_plan, self._plan_error = True, None
        try:
            runner.execute_model(output)
        except Exception as error:
            self._plan_error = _step_error(label, error)
            raise self._plan_error from error

    def _sample(self, runner: ModelRunner, bitmask: GrammarBitmask | None) -> ModelRunnerOutput:
        has_plan, error = self._has_plan, self._plan_error
        self._has_plan, self._plan_error = False, None
        if not has_plan:
            raise ExecutorError("sample_tokens has no plan: call execute_model before each call")
        if error is not None:
            raise ExecutorError(f"nothing to sample: {error}") from error.__cause__
        return runner.sample_tokens(bitmask)

    def _die(self, job: _Job, error: BaseException) -> None:
        logger.error("the thread of rank %d died in %s", _RANK, job.label, exc_info=error)
        with self._lock:
            self._is_open = False
            self._death = error
            orphans = self._take_queued()
        self._fail([job, *orphans])

    # On either.

    def _take_queued(self) -> list[_Job]:
        """Take out what nobody will serve. The lock is held, so nothing can be queued after it."""
        orphans: list[_Job] = []
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return orphans
            if job is not None:
                orphans.append(job)

    def _fail(self, jobs: list[_Job]) -> None:
        """Tell those who wait. The lock is not held: they may call this executor at once."""
        for job in jobs:
            _settle(job.future, error=_dead_error(job.label, self._death))


def _close_runner(runner: ModelRunner | None) -> None:
    if runner is None:
        return
    try:
        runner.close()
    except Exception:
        logger.exception("the runner's close() raised; its memory may not have been freed")
