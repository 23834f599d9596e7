"""Decode graphs against the same steps run eagerly, on graphs emulated on the CPU."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from graph_emulation import ForbidWaiting, MaskedBackend, RecordedGraphs
from runner_driver import RunnerDriver
from runner_pair import LIMITS, RunnerPair, make_runner

from pdcore.connector.base import KVCaches, WorkerConnector
from pdcore.connector.multi.worker_side import MultiWorkerConnector
from pdcore.errors import ConfigError
from pdcore.messages import TransferReport
from pdcore.request import SamplingParams
from pdcore.runner import decode_graphs
from pdcore.runner.attention.base import AttentionBatch, AttentionSupport
from pdcore.runner.decode_graphs import choose_graph_sizes

HERE = Path(__file__).parent


def make_pair(model: Path, backend: Any = MaskedBackend, **settings: Any) -> RunnerPair:
    return RunnerPair(model, attention_backend=backend, **settings)


@pytest.mark.parametrize("sizes", [None, (3, 6), (8,)])
@pytest.mark.parametrize("seed", range(3))
def test_graphs_change_nothing(tiny_llama: Path, sizes: Any, seed: int) -> None:
    """Rows come and go, share prefixes, grow, reuse blocks: tokens, logits and KV stay the same."""
    pair = make_pair(tiny_llama, cuda_graph_sizes=sizes)
    pair.run_at_random(seed, num_steps=60)
    assert all(pair.graphs.num_replays)
    assert pair.num_eager_decodes > 0 or sizes != (3, 6)  # those of more than six rows


def test_graphs_keep_to_the_window(tmp_path: Path) -> None:
    """With a sliding window too."""
    from tiny_models import save_tiny_model

    pair = make_pair(save_tiny_model("mistral, window", tmp_path))
    pair.run_at_random(5, num_steps=60)
    assert all(pair.graphs.num_replays)


class HostLengths(MaskedBackend):
    """Wrong: believes what the host was told when the graph was captured."""

    def lengths(self, batch: AttentionBatch) -> torch.Tensor:
        return torch.cat([torch.full((1,), length) for length in batch.seq_lens.tolist()])


class FreedPlan(MaskedBackend):
    """Wrong: copies from host memory that it lets go."""

    def lengths(self, batch: AttentionBatch) -> torch.Tensor:
        ones = torch.from_numpy(np.ones(batch.num_decodes, np.int64))
        return batch.device_seq_lens * ones


class Waiting(MaskedBackend):
    """Wrong: asks the device for a length."""

    def lengths(self, batch: AttentionBatch) -> torch.Tensor:
        longest = int(batch.device_seq_lens.max())
        return batch.device_seq_lens.clamp(max=longest)


def leave_out_positions(target: torch.Tensor, array: np.ndarray) -> None:
    """Wrong: an input that stays what it was when the graph was captured."""
    target[0] = torch.from_numpy(array)[0]


def test_a_host_scalar_in_a_graph_is_noticed(tiny_llama: Path) -> None:
    """The comparison fails for a backend that bakes a length in."""
    with pytest.raises(AssertionError):
        make_pair(tiny_llama, HostLengths).run_at_random(0, num_steps=60)


def test_an_input_that_is_not_copied_is_noticed(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison fails when positions do not reach the graph."""
    monkeypatch.setattr(decode_graphs, "copy_into", leave_out_positions)
    with pytest.raises(AssertionError):
        make_pair(tiny_llama).run_at_random(0, num_steps=60)


def test_padding_that_writes_into_a_block_is_noticed(tiny_llama: Path) -> None:
    """The comparison fails when padding is not kept to the null block."""
    pair = make_pair(tiny_llama)
    state = pair.driver.runner._state
    state.block_table[state.padding_row] = 1
    with pytest.raises(AssertionError):
        pair.run_at_random(0, num_steps=60)


def test_memory_that_a_plan_lets_go_is_noticed(tiny_llama: Path) -> None:
    """A graph over memory that nobody keeps fails when it is replayed."""
    pair = make_pair(tiny_llama, FreedPlan)
    with pytest.raises(RuntimeError, match="had been freed"):
        pair.run_at_random(0, num_steps=60)


def test_a_backend_that_waits_cannot_be_captured(tiny_llama: Path) -> None:
    """The error names the size, the cause and the ways out."""
    with pytest.raises(ConfigError, match=r"of 8 rows could not be captured .*cuda_graph_sizes=\("):
        make_pair(tiny_llama, Waiting)


def test_triton_decodes_can_be_captured(tmp_path: Path) -> None:
    """The Triton backend keeps its promise: its launches, replayed, give what eager ones do."""
    pytest.importorskip("triton")
    found = subprocess.run(
        [sys.executable, str(HERE / "triton_graphs.py"), str(tmp_path)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert found.returncode == 0, found.stderr
    report = json.loads(found.stdout)
    assert min(report["num_replays"]) > 0
    assert report["num_launches"] > 0


def test_the_host_is_told_the_longest_lengths(tiny_llama: Path) -> None:
    """A backend that sizes something by the host's lengths has room for any step of the graph."""
    state = make_pair(tiny_llama).driver.runner._state
    step = state.decode_inputs(torch.tensor([3, state.padding_row]), torch.tensor([20, 0]))
    assert step.attention.seq_lens.tolist() == [LIMITS.max_model_len] * 2
    assert step.attention.device_seq_lens.tolist() == [21, 1]
    assert step.attention.block_tables.shape == (2, LIMITS.max_model_len // 4)
    assert step.attention.slot_blocks[1] == 0


def start_rows(driver: RunnerDriver, count: int, **settings: Any) -> None:
    for row in range(count):
        driver.start(row, list(range(3 + row, 12 + row)), **settings)
        driver.prefill(row)


@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8)])
def test_the_smallest_graph_that_fits_runs(tiny_llama: Path, num_rows: int, size: int) -> None:
    """A step is padded to the next size and no further."""
    pair = make_pair(tiny_llama)
    start_rows(pair.driver, num_rows)
    before = list(pair.graphs.num_replays)
    pair.driver.decode(1)
    ran = np.subtract(pair.graphs.num_replays, before)
    assert dict(zip((8, 4, 2, 1), ran.tolist(), strict=True)) == {
        **dict.fromkeys((8, 4, 2, 1), 0),
        size: 1,
    }


def test_a_chunk_in_a_step_runs_it_eagerly(tiny_llama: Path) -> None:
    """Graphs are for decodes alone; the last token of a prompt is one."""
    pair = make_pair(tiny_llama)
    start_rows(pair.driver, 2)
    pair.driver.start(2, list(range(9)))
    before = sum(pair.graphs.num_replays)
    pair.driver.step({0: 1, 1: 1, 2: 8})
    assert before == sum(pair.graphs.num_replays)
    pair.driver.step({0: 1, 2: 1})
    assert before + 1 == sum(pair.graphs.num_replays)


def test_logits_that_were_kept_stay_as_they_are(tiny_llama: Path) -> None:
    """The next step does not write into what `logits` was."""
    pair = make_pair(tiny_llama)
    start_rows(pair.driver, 3)
    pair.driver.decode(1)
    kept = pair.driver.runner.logits
    copy = kept.clone()
    pair.driver.decode(1)
    assert torch.equal(kept, copy)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("sizes", [(), (4,)])
def test_a_steady_step_waits_once(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, temperature: float, sizes: tuple[int, ...]
) -> None:
    """Nothing in a decode step asks the device for a value, but what reads the tokens."""
    from pdcore.runner import drawing

    reads = []
    original = drawing.read

    def read(tensor: torch.Tensor) -> np.ndarray:
        reads.append(tensor.shape)
        return original(tensor)

    monkeypatch.setattr(drawing, "read", read)
    pair = make_pair(tiny_llama, cuda_graph_sizes=sizes)
    sampling = SamplingParams(temperature=temperature, top_k=20, top_p=0.9, min_p=0.01, seed=1)
    start_rows(pair.driver, 3, sampling=sampling)
    reads.clear()
    with ForbidWaiting():
        pair.driver.decode(9)  # blocks of four: some fill up
    assert reads == [(6,)] * 9


@pytest.mark.parametrize("where", ["backend", "settings"])
def test_without_a_capable_backend_or_sizes_nothing_is_captured(
    tiny_llama: Path, where: str
) -> None:
    """A backend that says nothing runs eagerly, and so does everything with no sizes."""

    class Silent(MaskedBackend):
        support = AttentionSupport(contiguous_only=True)

    settings = {"cuda_graph_sizes": ()} if where == "settings" else {}
    pair = make_pair(tiny_llama, Silent if where == "backend" else MaskedBackend, **settings)
    pair.run_at_random(0, num_steps=20)
    assert pair.graphs.num_replays == []


class PlainConnector(WorkerConnector):
    """Loads and saves nothing."""

    def register_kv_caches(self, caches: KVCaches) -> None: ...

    def start_load_kv(self, meta: Any) -> None: ...

    def get_finished(self) -> TransferReport:
        return TransferReport()


class SavingConnector(PlainConnector):
    """Counts the layers that were saved."""

    num_calls = 0

    def save_kv_layer(self, layer: int) -> None:
        self.num_calls += 1


class LoadingConnector(PlainConnector):
    """Counts the layers that were waited for."""

    num_calls = 0

    def wait_for_layer_load(self, layer: int) -> None:
        self.num_calls += 1


@pytest.mark.parametrize(
    ("make", "is_captured"),
    [
        (PlainConnector, True),
        (SavingConnector, False),
        (LoadingConnector, False),
        (lambda: MultiWorkerConnector({"a": PlainConnector(), "b": PlainConnector()}), True),
        (lambda: MultiWorkerConnector({"a": SavingConnector(), "b": PlainConnector()}), False),
    ],
)
def test_connectors_with_calls_between_layers_run_eagerly(
    tiny_llama: Path, make: Callable[[], WorkerConnector], is_captured: bool
) -> None:
    """A connector that saves layer by layer gets its calls; others do not cost the graphs."""
    graphs, connector = RecordedGraphs(), make()
    runner = make_runner(
        tiny_llama, attention_backend=MaskedBackend, graph_capture=graphs, connector=connector
    )
    driver = RunnerDriver(runner, num_blocks=64)
    start_rows(driver, 2)
    driver.decode(3)
    assert is_captured == (sum(graphs.num_replays) == 3)
    if isinstance(connector, SavingConnector | LoadingConnector):
        assert connector.num_calls == 2 * (2 + 3)
    runner.close()


def test_memory_is_measured_with_graphs(tiny_llama: Path) -> None:
    """The trial step leaves no trace on the graphs that are captured after it."""
    pair = make_pair(tiny_llama, kv_cache_memory_bytes=None, measure=True)
    pair.run_at_random(1, num_steps=20)
    assert sum(pair.graphs.num_replays) > 0


@pytest.mark.parametrize("max_num_seqs", [1, 2, 5, 8, 9, 64, 100, 256, 1000])
def test_default_sizes_reach_every_step(max_num_seqs: int) -> None:
    """They ascend to max_num_seqs, grow by a quarter or by eight at most, and stay few."""
    sizes = choose_graph_sizes(None, max_num_seqs)
    assert sizes[-1] == max_num_seqs
    assert sizes == tuple(sorted(set(sizes)))
    for size, following in itertools.pairwise(sizes):
        assert following <= 2 * size if size < 8 else following - size <= max(8, size / 4)
    assert len(sizes) <= 31
    assert choose_graph_sizes(None, 24) == (1, 2, 4, 8, 16, 24)


def test_sizes_are_taken_in_any_order() -> None:
    """Twice the same is once; none is none."""
    assert choose_graph_sizes((4, 1, 4), 8) == (1, 4)
    assert choose_graph_sizes((), 8) == ()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0,), r"cuda_graph_sizes=0: must be an integer"),
        ((2.5,), r"cuda_graph_sizes=2\.5: must be an integer"),
        ((True,), r"cuda_graph_sizes=True: must be an integer"),
        ((4, 9), r"has 9, but a step has at most max_num_seqs=8"),
        (8, r"cuda_graph_sizes=8 must be batch sizes"),
        ("8", r"cuda_graph_sizes='8' must be batch sizes"),
    ],
)
def test_sizes_that_cannot_be_are_refused(tiny_llama: Path, sizes: Any, message: str) -> None:
    """On a CPU too, where nothing would be captured."""
    assert LIMITS.max_num_seqs == 8
    with pytest.raises(ConfigError, match=message):
        make_runner(tiny_llama, cuda_graph_sizes=sizes)
