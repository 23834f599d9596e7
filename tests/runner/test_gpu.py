"""The runner around the model: bad rows, grammars, connectors, memory, misuse."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from runner_driver import GREEDY, RunnerDriver

from pdcore.connector.base import KVCaches, WorkerConnector
from pdcore.errors import ConfigError, ExecutorError, UnsupportedModel
from pdcore.kvcache.spec import KVCacheConfig
from pdcore.messages import GrammarBitmask, TransferKey, TransferReport
from pdcore.request import SamplingParams
from pdcore.runner.gpu import GPUModelRunner
from pdcore.runner.models import linear
from pdcore.scheduler.base import Limits

LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=48)
PROMPTS = [list(range(3, 3 + length)) for length in (5, 9, 17)]
MakeRunner = Callable[..., GPUModelRunner]


@pytest.fixture
def make_runner(tiny_llama: Path) -> Iterator[MakeRunner]:
    runners = []

    def make(**settings: Any) -> GPUModelRunner:
        defaults = {
            "limits": LIMITS,
            "device": "cpu",
            "block_size": 4,
            "kv_cache_memory_bytes": 1 << 20,
            "num_threads": 1,
            "seed": 0,
            "keep_logits": True,
        }
        runners.append(GPUModelRunner(tiny_llama, **{**defaults, **settings}))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


@pytest.fixture
def driver(make_runner: MakeRunner) -> RunnerDriver:
    return RunnerDriver(make_runner(), num_blocks=64)


def _start_all(driver: RunnerDriver, **settings: Any) -> None:
    for row, prompt in enumerate(PROMPTS):
        driver.start(row, prompt, **settings)
        driver.prefill(row)


def _solo_tokens(make_runner: MakeRunner, prompt: list[int], count: int, **settings: Any) -> Any:
    driver = RunnerDriver(make_runner(), num_blocks=64)
    driver.start(0, prompt, **settings)
    driver.prefill(0)
    driver.decode(count - 1)
    return driver.output(0)


def test_rows_come_back_in_the_plans_order(driver: RunnerDriver) -> None:
    """However the runner lays out chunks and decodes, results follow the plan."""
    _start_all(driver)
    driver.start(5, list(range(30)))
    plan = driver.plan({2: 1, 5: 30, 0: 1})
    driver.runner.execute_model(plan)
    result = driver.runner.sample_tokens(None)
    assert result.rows.tolist() == [2, 5, 0]
    assert plan.epochs.tolist() == result.epochs.tolist()
    assert result.sampled_token_ids.shape == (3, 1)
    assert driver.runner.logits.argmax(-1).tolist() == result.sampled_token_ids[:, 0].tolist()


def test_a_chunk_that_does_not_finish_the_prompt_draws_nothing(driver: RunnerDriver) -> None:
    """Only rows that the plan says sample get a token."""
    driver.start(0, PROMPTS[2])
    assert driver.step({0: 16}) == {}
    assert {0} == set(driver.step({0: 1}))


def test_steps_can_be_dispatched_before_their_tokens_are_known(
    driver: RunnerDriver, make_runner: MakeRunner
) -> None:
    """A plan made without looking at the last result decodes from the token on the device."""
    _start_all(driver)
    plans = [driver.plan(dict.fromkeys(range(3), 1)) for _ in range(6)]
    results = []
    for plan in plans:
        driver.runner.execute_model(plan)
        results.append(driver.runner.sample_tokens(None))
    for result in results:
        driver.take(result)
    for row, prompt in enumerate(PROMPTS):
        assert _solo_tokens(make_runner, prompt, 7) == driver.output(row)


def test_a_seeded_row_draws_the_same_in_any_row_and_batch(
    driver: RunnerDriver, make_runner: MakeRunner
) -> None:
    """The tokens of a seeded request are those of its solo run."""
    sampling = SamplingParams(temperature=1.3, top_k=40, top_p=0.95, seed=1234)
    driver.start(3, PROMPTS[0])
    driver.start(6, PROMPTS[1], sampling=sampling)
    driver.start(1, PROMPTS[2], sampling=SamplingParams(seed=99))
    driver.step({3: 5, 6: 9, 1: 17})
    driver.decode(9)
    assert _solo_tokens(make_runner, PROMPTS[1], 10, sampling=sampling) == driver.output(6)


def test_a_new_tenant_of_a_live_row_replaces_it(
    driver: RunnerDriver, make_runner: MakeRunner
) -> None:
    """A row that is told again, without having been given up, starts afresh."""
    _start_all(driver)
    driver.decode(2)
    driver.start(1, PROMPTS[0] * 3)
    driver.step({0: 1, 1: 15, 2: 1})
    driver.decode(3)
    assert _solo_tokens(make_runner, PROMPTS[0] * 3, 4) == driver.output(1)
    assert _solo_tokens(make_runner, PROMPTS[2], 7) == driver.output(2)


def test_ids_outside_the_vocabulary_fail_their_row_alone(
    driver: RunnerDriver, make_runner: MakeRunner
) -> None:
    """The row is reported with the numbers; the others run, and the row can be used again."""
    driver.start(0, PROMPTS[0])
    driver.start(1, [3, 128, 5])
    assert {0} == set(driver.step({0: 5, 1: 3}))
    assert "span 3..128, but the model's vocabulary is 0..127" in driver.errors[1]
    driver.finish(1)
    driver.start(1, PROMPTS[1])
    driver.step({0: 1, 1: 9})
    assert _solo_tokens(make_runner, PROMPTS[1], 1) == driver.output(1)


def test_nan_in_one_row_fails_that_row_alone(driver: RunnerDriver, make_runner: MakeRunner) -> None:
    """Blocks gone bad cost their own request and no other."""
    _start_all(driver)
    driver.runner._kv_cache[driver.rows[1].block_ids[0]] = torch.nan
    assert {0, 2} == set(driver.step(dict.fromkeys(range(3), 1)))
    assert driver.errors == {1: "the logits hold NaN or inf, or allow no token"}
    assert tuple(driver.runner.logits.shape) == (2, 128)
    for row in (0, 2):
        assert _solo_tokens(make_runner, PROMPTS[row], 2) == driver.output(row)


def test_a_row_that_was_never_started_is_an_error_of_its_own(driver: RunnerDriver) -> None:
    """A plan for an unknown tenancy, or for tokens nobody knows, fails that row alone."""
    _start_all(driver)
    driver.rows[1].epoch += 7
    driver.rows[2].num_computed += 1
    driver.rows[2].num_tokens += 1
    assert {0} == set(driver.step(dict.fromkeys(range(3), 1)))
    assert "was not started for epoch" in driver.errors[1]
    assert "but the worker knows 17" in driver.errors[2]


def test_bitmask_constrains_its_rows(driver: RunnerDriver) -> None:
    """A row with a mask draws an allowed token; a mask for a former tenancy is ignored."""
    _start_all(driver)
    plan = driver.plan(dict.fromkeys(range(3), 1))
    bits = np.zeros((3, 4), np.uint32)
    bits[:, 2] = 1 << 6
    mask = GrammarBitmask(
        rows=np.array([2, 0, 7], np.int32),
        epochs=np.array([driver.rows[2].epoch, driver.rows[0].epoch - 1, 1], np.int32),
        bits=bits.view(np.int32),
    )
    driver.runner.execute_model(plan)
    tokens = driver.take(driver.runner.sample_tokens(mask))
    greedy = driver.runner.logits.argmax(-1).tolist()
    assert {0: greedy[0], 1: greedy[1], 2: 70} == tokens


def test_a_bitmask_that_allows_nothing_fails_its_row(driver: RunnerDriver) -> None:
    """A row with no allowed token is an error of its own."""
    _start_all(driver)
    plan = driver.plan(dict.fromkeys(range(3), 1))
    mask = GrammarBitmask(
        rows=np.array([1], np.int32),
        epochs=np.array([driver.rows[1].epoch], np.int32),
        bits=np.zeros((1, 4), np.int32),
    )
    driver.runner.execute_model(plan)
    assert {0, 2} == set(driver.take(driver.runner.sample_tokens(mask)))
    assert {1} == set(driver.errors)


class _RecordingConnector(WorkerConnector):
    """Writes down its calls; a synchronous load of what ``kv`` holds when the metadata says so."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.caches: KVCaches | None = None
        self.kv: torch.Tensor | None = None
        self.raises = False

    def register_kv_caches(self, caches: KVCaches) -> None:
        self.caches = caches

    def start_save_kv(self, meta: Any) -> None:
        self.calls.append(f"rescue {meta}")

    def start_load_kv(self, meta: Any) -> None:
        self.calls.append(f"load {meta}")
        if self.kv is not None:
            self.caches.buffer.copy_(self.kv)

    def wait_for_layer_load(self, layer: int) -> None:
        self.calls.append(f"wait {layer}")

    def save_kv_layer(self, layer: int) -> None:
        self.calls.append(f"save {layer}")

    def wait_for_save(self) -> None:
        self.calls.append("saved")

    def get_finished(self) -> TransferReport:
        self.calls.append("report")
        if self.raises:
            raise RuntimeError("broken")
        return TransferReport(finished_recving=(TransferKey(4, 1),))

    def close(self) -> None:
        self.calls.append("close")


def test_connector_hooks_are_called_in_order(make_runner: MakeRunner) -> None:
    """What may be overwritten is saved, then loads start; wait and save for each layer, then the
    save as a whole, then the report."""
    connector = _RecordingConnector()
    driver = RunnerDriver(make_runner(connector=connector), num_blocks=64)
    driver.connector_meta = "m"
    driver.start(0, PROMPTS[0])
    driver.step({0: 5})
    layers = ["wait 0", "save 0", "wait 1", "save 1"]
    assert ["rescue m", "load m", *layers, "saved", "report"] == connector.calls
    connector.calls.clear()
    driver.connector_meta = None
    driver.step({0: 1})
    assert [*layers, "saved", "report"] == connector.calls


def test_a_plan_without_tokens_still_serves_the_connector(make_runner: MakeRunner) -> None:
    """Connector metadata is taken and the report comes back in an empty step."""
    connector = _RecordingConnector()
    driver = RunnerDriver(make_runner(connector=connector), num_blocks=64)
    driver.connector_meta = 7
    driver.runner.execute_model(driver.plan({}))
    result = driver.runner.sample_tokens(None)
    assert (TransferKey(4, 1),) == result.transfer_report.finished_recving
    assert result.rows.size == 0
    assert connector.calls == ["rescue 7", "load 7", "saved", "report"]


def test_a_connector_whose_report_raises_harms_no_step(make_runner: MakeRunner) -> None:
    """The tokens come back all the same."""
    connector = _RecordingConnector()
    connector.raises = True
    driver = RunnerDriver(make_runner(connector=connector), num_blocks=64)
    driver.start(0, PROMPTS[0])
    assert {0} == set(driver.step({0: 5}))


def test_blocks_copied_from_another_runner_continue_its_request(make_runner: MakeRunner) -> None:
    """KV is a function of tokens alone: loaded blocks give the tokens of computed ones."""
    source = RunnerDriver(make_runner(), num_blocks=64)
    source.start(0, PROMPTS[2])
    source.prefill(0)
    source.decode(3)
    connector = _RecordingConnector()
    target = RunnerDriver(make_runner(connector=connector), num_blocks=64)
    assert connector.caches.num_blocks == 64
    assert connector.caches.bytes_per_block * 64 == connector.caches.buffer.nbytes
    connector.kv = source.runner._kv_cache
    target.connector_meta = "load"
    target.start(0, PROMPTS[2], num_computed=16, shared_blocks=source.rows[0].block_ids[:4])
    target.step({0: 1})
    target.connector_meta = None
    target.decode(3)
    assert source.output(0) == target.output(0)


def test_fingerprint_tells_layouts_apart(make_runner: MakeRunner) -> None:
    """Equal for equal runners, different for another block size or dtype."""
    base = make_runner().fingerprint
    assert base == make_runner().fingerprint
    assert base.endswith("-rotary-pairs")  # else keys in another order look alike
    assert (
        len(
            {base, make_runner(block_size=8).fingerprint, make_runner(dtype="bfloat16").fingerprint}
        )
        == 3
    )


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_float32(
    make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch, dtype: str, is_native: bool
) -> None:
    """The logits of 16-bit runs differ from float32 by rounding only, whatever the machine has."""
    monkeypatch.setattr(linear, "_is_native", lambda dtype: is_native)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    logits = []
    for name in ("float32", dtype):
        driver = RunnerDriver(make_runner(dtype=name), num_blocks=64)
        _start_all(driver)
        driver.start(3, PROMPTS[2])
        driver.prefill(3)
        logits.append(driver.runner.logits)
    scale = logits[0].std()
    assert (logits[1] - logits[0]).abs().max() < 0.15 * scale


@pytest.mark.parametrize(("before", "after"), [(None, "1"), ("0", "0")])
def test_huge_pages_are_asked_for_unless_declined(
    make_runner: MakeRunner,
    monkeypatch: pytest.MonkeyPatch,
    before: str | None,
    after: str,
) -> None:
    """On a CPU torch is told to use huge pages; what the user has set stands."""
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    if before is not None:
        monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", before)
    make_runner()
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == after


def test_memory_given_is_memory_used(make_runner: MakeRunner) -> None:
    """With kv_cache_memory_bytes nothing is measured."""
    assert make_runner(kv_cache_memory_bytes=12345).determine_available_memory() == 12345


def test_memory_is_measured_after_a_trial_step(make_runner: MakeRunner) -> None:
    """The share asked for is a share of the free memory; the trial leaves no trace."""
    runner = make_runner(kv_cache_memory_bytes=None, memory_utilization=0.01)
    small = runner.determine_available_memory()
    assert 0 < small < 2**40
    driver = RunnerDriver(runner, num_blocks=64)
    _start_all(driver)
    assert not driver.errors
    more = make_runner(kv_cache_memory_bytes=None, memory_utilization=0.02)
    assert 1.5 * small < more.determine_available_memory() < 2.5 * small


def test_memory_is_measured_before_the_cache_is_made(make_runner: MakeRunner) -> None:
    """The trial step would take away what rows refer to, so it is refused."""
    runner = make_runner(kv_cache_memory_bytes=None)
    runner.initialize_from_config(KVCacheConfig(spec=runner.get_kv_cache_spec(), num_blocks=8))
    with pytest.raises(ExecutorError, match="after initialize_from_config"):
        runner.determine_available_memory()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "int4"}, "dtype='int4' is unknown: use one of float32, "),
        ({"device": "warp"}, "device='warp' is unknown"),
        ({"device": "meta"}, "device='meta' is not supported"),
        ({"attention_backend": "flash"}, "known are torch, triton"),
        ({"attention_backend": int}, "attention_backend=<class 'int'>: pass a name, or a subclass"),
        ({"block_size": 0}, "block_size=0"),
        ({"limits": Limits(max_model_len=4096)}, "max_model_len=4096 is over the 256 positions"),
        ({"limits": None}, "limits=None: pass an instance of Limits"),
        ({"limits": {"max_num_seqs": 1}}, "pass an instance of Limits"),
        ({"connector": object()}, "pass an instance of WorkerConnector"),
        ({"connector": WorkerConnector}, "pass an instance of WorkerConnector"),
        (
            {"memory_utilization": 1.5},
            r"memory_utilization=1\.5: must be more than 0 and at most 1",
        ),
        ({"memory_utilization": "half"}, "memory_utilization='half': must be a finite number"),
        ({"kv_cache_memory_bytes": -5}, "kv_cache_memory_bytes=-5: must be an integer"),
        ({"num_threads": 0}, "num_threads=0: must be an integer, at least 1"),
        ({"seed": -1}, r"seed=-1: must be an integer in 0\.\.2\*\*64-1"),
        ({"seed": 2**64}, "seed=18446744073709551616: must be"),
        ({"seed": "x"}, "seed='x': must be"),
        ({"keep_logits": 1}, "keep_logits=1: must be True or False"),
        ({"graph_capture": 5}, "graph_capture=5: pass a GraphCapture"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    make_runner: MakeRunner, settings: dict[str, Any], message: str
) -> None:
    """Each is a named error when the runner is built."""
    with pytest.raises(ConfigError, match=message):
        make_runner(**settings)


def test_a_path_that_is_none_is_refused() -> None:
    """A setting that was left out is told as such."""
    with pytest.raises(ConfigError, match="model_path=None: pass the path"):
        GPUModelRunner(None, limits=LIMITS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_refused(make_runner: MakeRunner) -> None:
    """The error says what to do instead."""
    with pytest.raises(ConfigError, match="use 'cpu'"):
        make_runner(device="cuda")


def test_a_cache_for_another_model_is_refused(make_runner: MakeRunner) -> None:
    """The configuration must be of this runner's own spec."""
    spec = make_runner(block_size=8).get_kv_cache_spec()
    with pytest.raises(ConfigError, match="but the model needs"):
        make_runner().initialize_from_config(KVCacheConfig(spec=spec, num_blocks=4))


def test_a_cache_that_does_not_fit_is_refused(make_runner: MakeRunner) -> None:
    """More memory than there is becomes a ConfigError, not torch's own."""
    runner = make_runner()
    config = KVCacheConfig(spec=runner.get_kv_cache_spec(), num_blocks=2**42)
    with pytest.raises(ConfigError, match="cannot be allocated"):
        runner.initialize_from_config(config)


def test_a_pool_larger_than_the_cache_is_refused(make_runner: MakeRunner) -> None:
    """With the first plan, before any block is named that is not there."""
    driver = RunnerDriver(make_runner(), num_blocks=8)
    driver.start(0, [1, 2, 3])
    plan = attrs.evolve(driver.plan({0: 3}), num_pool_blocks=9)
    with pytest.raises(ConfigError, match="pool has 9 blocks, but this worker's KV cache has 8"):
        driver.runner.execute_model(plan)


def test_a_pool_with_other_blocks_is_refused(make_runner: MakeRunner) -> None:
    """Its tables would be read as if they held other tokens, and the answer be wrong."""
    driver = RunnerDriver(make_runner(), num_blocks=8)
    driver.start(0, [1, 2, 3])
    size = 2 * driver.runner.get_kv_cache_spec().block_size
    plan = attrs.evolve(driver.plan({0: 3}), pool_block_size=size)
    with pytest.raises(ConfigError, match=f"this worker's block_size=.*blocks of {size} tokens"):
        driver.runner.execute_model(plan)


def test_calls_out_of_order_are_named_errors(make_runner: MakeRunner) -> None:
    """No step before the cache, no sampling without a step, each step sampled once."""
    runner = make_runner()
    with pytest.raises(ExecutorError, match="before initialize_from_config"):
        runner.execute_model(None)
    driver = RunnerDriver(runner, num_blocks=64)
    with pytest.raises(ExecutorError, match="without an execute_model"):
        runner.sample_tokens(None)
    driver.start(0, PROMPTS[0], sampling=GREEDY)
    driver.step({0: 5})
    with pytest.raises(ExecutorError, match="without an execute_model"):
        runner.sample_tokens(None)


def test_close_closes_the_connector_once(make_runner: MakeRunner) -> None:
    """Closing twice is allowed, and the memory is let go."""
    connector = _RecordingConnector()
    runner = make_runner(connector=connector)
    RunnerDriver(runner, num_blocks=64)
    runner.close()
    runner.close()
    assert connector.calls == ["close"]
    assert runner._kv_cache is None


def test_unsupported_model_is_refused_before_anything_else(tmp_path: Path) -> None:
    """The runner passes the loader's error on."""
    (tmp_path / "config.json").write_text('{"model_type": "rwkv"}')
    with pytest.raises(UnsupportedModel, match="'rwkv'"):
        GPUModelRunner(tmp_path, limits=LIMITS, device="cpu")


_WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import pdcore.runner, pdcore.runner.attention, pdcore.runner.models
from pdcore.errors import MissingExtra
for module, name in ((pdcore.runner, "GPUModelRunner"), (pdcore.runner.models, "load_model")):
    try:
        getattr(module, name)
    except MissingExtra as error:
        assert error.extra == "torch" and error.missing == "torch", error
    else:
        raise SystemExit(f"{name} came without torch")
try:
    pdcore.runner.attention.resolve_attention_backend("torch", device="cpu")
except MissingExtra:
    pass
else:
    raise SystemExit("the backend came without torch")
"""


def test_without_torch_the_extra_is_named() -> None:
    """The packages import without torch; what needs it says which extra brings it."""
    subprocess.run([sys.executable, "-c", _WITHOUT_TORCH], check=True, timeout=60)
