"""`InProcessExecutor`: the model's thread, its queue, and every way it can end."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from pdcore.errors import ConfigError, ExecutorDead, ExecutorError
from pdcore.kvcache.spec import KVCacheConfig
from pdcore.messages import GrammarBitmask, ModelRunnerOutput, NewRequestData, SchedulerOutput
from pdcore.request import Request, SamplingParams
from pdcore.runner.base import ModelRunner
from pdcore.runner.executor import InProcessExecutor
from pdcore.testing import FakeKVRunner, StaleKV

TIMEOUT_S = 20.0
PROMPT = np.arange(5, 11, dtype=np.int32)
REQUEST = Request("r", PROMPT, sampling=SamplingParams(max_tokens=4))


def plan(step_id: int = 0) -> SchedulerOutput:
    """Step 0 computes the prompt; each later one computes the token that came before it."""
    nothing = np.zeros(0, dtype=np.int32)
    start = NewRequestData(
        row=0,
        epoch=0,
        uid=0,
        request_id="r",
        token_ids=PROMPT,
        num_prompt_tokens=PROMPT.size,
        num_computed_tokens=0,
        block_ids=np.array([1, 2, 3], dtype=np.int32),
        sampling=REQUEST.sampling,
    )
    computed = PROMPT.size + step_id - 1 if step_id else 0
    return SchedulerOutput(
        step_id=step_id,
        rows=np.zeros(1, dtype=np.int32),
        epochs=np.zeros(1, dtype=np.int32),
        num_scheduled_tokens=np.array([1 if step_id else PROMPT.size], dtype=np.int32),
        num_computed_tokens=np.array([computed], dtype=np.int32),
        samples=np.ones(1, dtype=np.bool_),
        scheduled_new_reqs=() if step_id else (start,),
        block_rows=nothing,
        block_positions=nothing,
        block_ids=nothing,
        finished_rows=nothing,
    )


class Recorder(FakeKVRunner):
    """Writes down who called it, and waits at a gate before every step if it has one."""

    def __init__(self, *, gate: threading.Event | None = None, **kwargs: Any) -> None:
        super().__init__(block_size=4, num_blocks=16, **kwargs)
        self.calls: list[tuple[str, str]] = []
        self.entered = threading.Event()
        self._gate = gate

    def execute_model(self, output: SchedulerOutput) -> None:
        self._note("execute_model")
        self.entered.set()
        if self._gate is not None:
            assert self._gate.wait(TIMEOUT_S)
        super().execute_model(output)

    def sample_tokens(self, bitmask: GrammarBitmask | None) -> ModelRunnerOutput:
        self._note("sample_tokens")
        return super().sample_tokens(bitmask)

    def close(self) -> None:
        self._note("close")
        super().close()

    def _note(self, name: str) -> None:
        self.calls.append((name, threading.current_thread().name))


Start = Callable[..., InProcessExecutor]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts executors and closes them when the test is over."""
    executors: list[InProcessExecutor] = []

    def start_one(make_runner: Callable[[], ModelRunner], **kwargs: Any) -> InProcessExecutor:
        executor = InProcessExecutor(make_runner, **kwargs)
        executors.append(executor)
        executor.start()
        return executor

    yield start_one
    for executor in executors:
        executor.close()


def tokens(future: Future[ModelRunnerOutput]) -> list[int]:
    """What a step drew."""
    return future.result(TIMEOUT_S).sampled_token_ids[:, 0].tolist()


# Its start.


def test_the_cache_has_the_size_that_was_asked_for(start: Start):
    """``num_blocks`` is taken as it is."""
    executor = start(lambda: Recorder(), num_blocks=7)
    assert executor.kv_cache_config.num_blocks == 7


def test_the_cache_fills_the_runners_memory_when_no_size_was_asked_for(start: Start):
    """Without ``num_blocks`` the runner's memory decides."""
    executor = start(lambda: Recorder())
    assert executor.kv_cache_config == KVCacheConfig(
        spec=Recorder().get_kv_cache_spec(), num_blocks=16
    )


def test_the_runner_is_built_and_run_on_the_named_thread(start: Start):
    """Everything the runner does happens on one thread with the name that was given."""
    executor = start(lambda: Recorder(), name="model")
    executor.execute_model(plan())
    executor.sample_tokens(None)
    [runner] = executor.collective_rpc(lambda runner: runner)
    executor.close()
    names = ["execute_model", "sample_tokens", "close"]
    assert runner.calls == [(name, "model") for name in names]


def test_what_makes_no_runner_is_refused_by_name():
    """A runner is no function that makes one, and what is made must be a runner."""
    with pytest.raises(ConfigError, match=r"make_runner=<.*lambda: runner"):
        InProcessExecutor(Recorder())
    executor = InProcessExecutor(lambda: Recorder)
    with pytest.raises(ConfigError, match=r"make_runner\(\)=<.*: pass an instance of ModelRunner"):
        executor.start()


def test_a_runner_that_cannot_be_built_leaves_nothing_behind():
    """`start` raises the runner's own error and its thread is gone."""

    def make_runner() -> ModelRunner:
        raise FileNotFoundError("no weights")

    executor = InProcessExecutor(make_runner, name="doomed")
    with pytest.raises(FileNotFoundError, match="no weights"):
        executor.start()
    assert "doomed" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(ExecutorDead):
        executor.check_health()


def test_a_runner_that_cannot_have_its_cache_is_closed():
    """A runner that was built is closed when its cache does not fit."""
    runner = Recorder()
    executor = InProcessExecutor(lambda: runner)
    runner.determine_available_memory = lambda: 0  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="at least 2"):
        executor.start()
    assert [name for name, _ in runner.calls] == ["close"]


def test_it_says_what_to_call_before_its_start():
    """Calls before `start` name it."""
    executor = InProcessExecutor(lambda: Recorder())
    for call in (executor.check_health, lambda: executor.execute_model(plan())):
        with pytest.raises(ExecutorDead, match=r"call start\(\) first"):
            call()
    with pytest.raises(ExecutorError, match=r"call start\(\) first"):
        _ = executor.kv_cache_config
    executor.close()


def test_it_starts_once(start: Start):
    """A second `start` is refused and harms nothing."""
    executor = start(lambda: Recorder())
    with pytest.raises(ExecutorError, match="starts once"):
        executor.start()
    executor.check_health()


def test_a_cache_of_one_block_is_refused():
    """Block 0 is the null block, so one is not enough."""
    with pytest.raises(ConfigError, match="num_blocks=1"):
        InProcessExecutor(lambda: Recorder(), num_blocks=1)


# Its steps.


def test_steps_queue_up_and_run_in_order(start: Start):
    """Four steps queued at once draw what the request draws alone."""
    executor = start(lambda: Recorder())
    futures = []
    for step_id in range(4):
        executor.execute_model(plan(step_id), non_block=True)
        futures.append(executor.sample_tokens(None, non_block=True))
    drawn = [token for future in futures for token in tokens(future)]
    assert drawn == FakeKVRunner(block_size=4).solo_tokens(REQUEST)


def test_the_engine_goes_on_while_the_model_runs(start: Start):
    """A call that does not block returns while the model is still in its step."""
    gate = threading.Event()
    executor = start(lambda: Recorder(gate=gate))
    forward = executor.execute_model(plan(), non_block=True)
    sampled = executor.sample_tokens(None, non_block=True)
    assert not forward.done()
    assert not sampled.done()
    gate.set()
    assert forward.result(TIMEOUT_S) is None
    assert len(tokens(sampled)) == 1


def test_a_queued_step_cannot_be_cancelled(start: Start):
    """Its pair would go on without it."""
    gate = threading.Event()
    executor = start(lambda: Recorder(gate=gate))
    forward = executor.execute_model(plan(), non_block=True)
    assert not forward.cancel()
    gate.set()
    executor.sample_tokens(None)


def test_a_failed_step_fails_both_of_its_calls_and_nothing_else(start: Start):
    """The error names the rank, the step and the cause; the next step runs."""
    faults = [StaleKV("a foreign chain"), None]
    executor = start(lambda: Recorder(step_fault=lambda _: faults.pop(0)))
    forward = executor.execute_model(plan(), non_block=True)
    sampled = executor.sample_tokens(None, non_block=True)
    for future in (forward, sampled):
        with pytest.raises(ExecutorError, match=r"rank 0 .* step 0: StaleKV: a foreign") as error:
            future.result(TIMEOUT_S)
        assert not isinstance(error.value, ExecutorDead)
        assert isinstance(error.value.__cause__, StaleKV)
    executor.execute_model(plan())
    assert executor.sample_tokens(None).rows.tolist() == [0]


def test_a_failed_step_that_nobody_samples_does_not_spoil_the_next(start: Start):
    """A loop may give up after `execute_model` raised and never call `sample_tokens`."""
    faults = [RuntimeError("once"), None]
    executor = start(lambda: Recorder(step_fault=lambda _: faults.pop(0)))
    with pytest.raises(ExecutorError, match="once"):
        executor.execute_model(plan())
    executor.execute_model(plan())
    assert executor.sample_tokens(None).rows.tolist() == [0]


def test_sampling_without_a_plan_is_an_error(start: Start):
    """Each plan is sampled once."""
    executor = start(lambda: Recorder())
    executor.execute_model(plan())
    executor.sample_tokens(None)
    with pytest.raises(ExecutorError, match="call execute_model before"):
        executor.sample_tokens(None)


def test_step_errors_survive_pickling(start: Start):
    """What a worker raises can be sent on."""
    executor = start(lambda: Recorder(step_fault=lambda _: RuntimeError("x")))
    with pytest.raises(ExecutorError) as error:
        executor.execute_model(plan())
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


# Its remote calls.


def test_collective_rpc_calls_methods_and_functions(start: Start):
    """A name calls the runner's method; a callable gets the runner first."""
    executor = start(lambda: Recorder())
    spec = Recorder().get_kv_cache_spec()
    assert executor.collective_rpc("get_kv_cache_spec") == [spec]
    assert executor.collective_rpc(lambda runner, x: x + 1, (4,), output_rank=0) == [5]


def test_collective_rpc_wraps_what_it_calls(start: Start):
    """A failing call is an error of the rank, and the executor lives."""
    executor = start(lambda: Recorder())
    with pytest.raises(ExecutorError, match="rank 0 failed in no_such_method: AttributeError"):
        executor.collective_rpc("no_such_method")
    executor.check_health()


def test_there_is_no_second_rank(start: Start):
    """Asking for another rank's result is a mistake of the caller."""
    executor = start(lambda: Recorder())
    with pytest.raises(ConfigError, match="output_rank=1"):
        executor.collective_rpc("get_kv_cache_spec", output_rank=1)


# Its end.


def test_close_lets_the_running_step_end_and_fails_the_others(start: Start):
    """What runs is finished; what waits fails, and so does everything after."""
    gate = threading.Event()
    runner = Recorder(gate=gate)
    executor = start(lambda: runner)
    forward = executor.execute_model(plan(), non_block=True)
    sampled = executor.sample_tokens(None, non_block=True)
    assert runner.entered.wait(TIMEOUT_S)
    sampled.add_done_callback(lambda _: gate.set())
    executor.close()
    assert forward.result(0) is None
    with pytest.raises(ExecutorDead, match="closed"):
        sampled.result(0)
    with pytest.raises(ExecutorDead, match="closed"):
        executor.execute_model(plan())
    assert runner.calls[-1][0] == "close"
    executor.close()


def test_close_is_bounded(start: Start):
    """A step that hangs is left behind, its future failed, its late result dropped."""
    gate = threading.Event()
    runner = Recorder(gate=gate)
    executor = start(lambda: runner, close_timeout_s=0.01)
    forward = executor.execute_model(plan(), non_block=True)
    assert runner.entered.wait(TIMEOUT_S)
    executor.close()
    with pytest.raises(ExecutorDead):
        forward.result(0)
    gate.set()
    executor._thread.join(TIMEOUT_S)  # type: ignore[union-attr]
    assert runner.calls[-1][0] == "close"


def test_a_dead_thread_fails_everything(start: Start):
    """After `SystemExit` on the thread, what waits and what comes fails with the cause."""
    gate = threading.Event()

    def die(runner: ModelRunner) -> None:
        assert gate.wait(TIMEOUT_S)
        raise SystemExit(3)

    runner = Recorder()
    executor = start(lambda: runner)
    failures: list[ExecutorDead] = []

    def call() -> None:
        try:
            executor.collective_rpc(die)
        except ExecutorDead as error:
            failures.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    forward = None
    while forward is None:
        # The call must be in front of this one in the queue.
        if executor._running is not None:
            forward = executor.execute_model(plan(), non_block=True)
    gate.set()
    caller.join(TIMEOUT_S)
    with pytest.raises(ExecutorDead, match="SystemExit") as error:
        forward.result(TIMEOUT_S)
    assert isinstance(error.value.__cause__, SystemExit)
    assert [str(failure) for failure in failures] == [str(failures[0])]
    with pytest.raises(ExecutorDead, match="SystemExit"):
        executor.check_health()
    executor.close()
    assert runner.calls[-1][0] == "close"


def test_a_done_callback_may_call_the_executor(start: Start):
    """Whoever hears of a failure may ask at once how the executor is."""
    gate = threading.Event()
    runner = Recorder(gate=gate)
    executor = start(lambda: runner)
    heard: list[str] = []

    def ask(_: Future[Any]) -> None:
        try:
            executor.check_health()
        except ExecutorDead as error:
            heard.append(str(error))
        gate.set()

    executor.execute_model(plan(), non_block=True)
    assert runner.entered.wait(TIMEOUT_S)
    executor.sample_tokens(None, non_block=True).add_done_callback(ask)
    executor.close()
    assert len(heard) == 1
