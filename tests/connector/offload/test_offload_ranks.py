"""Several tensor parallel ranks, each with KV memory, host memory and a file of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random

import attrs
import numpy as np
import pytest

pytest.importorskip("nixl")

from offload_simulation import SECRET, make_config
from pdcore import (
    KVCacheManager,
    Limits,
    LRUBlockPool,
    MonotonicClock,
    Request,
    SamplingParams,
    UnifiedScheduler,
)
from pdcore.connector import OffloadCounts
from pdcore.connector.offload import OffloadConnector
from pdcore.connector.offload.meta import LoadOrder
from pdcore.connector.offload.records import HEADER_BYTES
from pdcore.errors import ConfigError
from pdcore.kvcache import KVCacheConfig, PrefixHasher
from pdcore.messages import ModelRunnerOutput, RequestOutput, SchedulerOutput, TransferReport
from pdcore.runner.executor import TransferReportMerger
from pdcore.testing import FakeKVRunner

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(240)]

BLOCK_SIZE, NUM_BLOCKS, NUM_RANKS = 4, 24, 2
RECORD_BYTES = HEADER_BYTES + 8 * BLOCK_SIZE
PROMPTS = [np.random.default_rng(seed).integers(1, 9_000, 41) for seed in range(8)]


class RankedEngine:
    """Serves prompts one at a time, from a pool that holds two of them.

    Each rank computes all of the model, in KV memory of its own, and checks every slot that it
    reads; so whatever is missing or foreign on any rank is an error.
    """

    def __init__(self, directory: Path, *, num_host_blocks: int, num_disk_blocks: int) -> None:
        config = make_config(
            BLOCK_SIZE,
            num_host_blocks=num_host_blocks,
            num_disk_blocks=num_disk_blocks,
            directory=directory,
            persistent=num_disk_blocks > 0,
        )
        connector, clock = OffloadConnector(config), MonotonicClock()
        self.half = connector.scheduler_side()
        self.workers = [connector.worker_side(rank) for rank in range(NUM_RANKS)]
        self.runners = [FakeKVRunner(block_size=BLOCK_SIZE, connector=it) for it in self.workers]
        for runner in self.runners:
            spec = runner.get_kv_cache_spec()
            runner.initialize_from_config(KVCacheConfig(spec=spec, num_blocks=NUM_BLOCKS))
        hasher = PrefixHasher(BLOCK_SIZE, secret=SECRET)
        self.scheduler = UnifiedScheduler(
            KVCacheManager(LRUBlockPool(NUM_BLOCKS, BLOCK_SIZE), hasher=hasher),
            limits=Limits(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64),
            connector=self.half,
            clock=clock,
        )
        self.half.start(clock=clock, notify=lambda: None)
        self.half.set_xfer_handshake_metadata([it.get_handshake_metadata() for it in self.workers])
        self._merger = TransferReportMerger(NUM_RANKS)

    def serve(self, prompt: np.ndarray) -> RequestOutput:
        """Run a prompt to its end, see the tokens of a solo run, and return its end."""
        request = Request("r", prompt, sampling=SamplingParams(max_tokens=5))
        self.scheduler.add_request(request)
        tokens: list[int] = []
        ends: list[RequestOutput] = []
        while self.scheduler.has_requests():
            for event in self.step():
                tokens += event.new_token_ids
                ends += [event] if event.finish_reason is not None else []
            self.half.check()
        assert tokens == self.runners[0].solo_tokens(request)
        (end,) = ends
        return end

    def step(self) -> tuple[RequestOutput, ...]:
        """One step; what it told."""
        output = self.scheduler.schedule()
        return self.scheduler.update_from_output(output, self._run(output)).outputs

    def _run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        for runner in self.runners:
            runner.execute_model(output)
        results = [runner.sample_tokens(None) for runner in self.runners]
        report = self._merger.merge([result.transfer_report for result in results])
        return attrs.evolve(results[0], transfer_report=report)

    @property
    def counts(self) -> OffloadCounts:
        return self.scheduler.stats().connector.offload

    def close(self) -> None:
        for runner in self.runners:
            runner.close()
        self.half.close()


Start = Callable[..., RankedEngine]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts engines, one after the other, with the same directory."""
    with ExitStack() as stack:

        def make(*, num_host_blocks: int = 160, num_disk_blocks: int = 160) -> RankedEngine:
            engine = RankedEngine(
                tmp_path, num_host_blocks=num_host_blocks, num_disk_blocks=num_disk_blocks
            )
            stack.callback(engine.close)
            return engine

        yield make


def file_of(directory: Path, rank: int) -> Path:
    (path,) = directory.glob(f"*-rank{rank}.kv")
    return path


def damage(path: Path, random: Random, *, share: float) -> None:
    """Flip a bit in some of a file's records."""
    data = bytearray(path.read_bytes())
    for start in range(0, len(data), RECORD_BYTES):
        if random.random() < share:
            data[start + random.randrange(RECORD_BYTES)] ^= 1 << random.randrange(8)
    with path.open("r+b") as file:
        file.write(data)


def test_blocks_come_back_on_every_rank(start: Start) -> None:
    """What the pool had no room for is loaded on both ranks."""
    engine = start(num_disk_blocks=0)
    for _ in range(2):
        loaded = [engine.serve(prompt).num_external_tokens for prompt in PROMPTS]
    assert loaded == len(PROMPTS) * [40]
    assert engine.counts.num_lost == 0


def test_what_host_memory_has_no_room_for_comes_back_from_disk(start: Start) -> None:
    """All but the blocks whose slot of host memory was needed before they were written; which these
    are may differ between the ranks."""
    engine = start(num_host_blocks=12)
    for _ in range(3):
        loaded = [engine.serve(prompt).num_external_tokens for prompt in PROMPTS]
    assert sum(loaded) > 0
    assert engine.counts.num_loaded_from_disk > 0


@pytest.mark.parametrize("slow", range(NUM_RANKS))
def test_a_load_is_over_when_the_last_rank_has_it(
    start: Start, monkeypatch: pytest.MonkeyPatch, slow: int
) -> None:
    """Steps go by between the ranks' reports, and nobody reads the blocks in them."""
    engine = start(num_disk_blocks=0)
    for prompt in PROMPTS:
        engine.serve(prompt)
    may_copy, steps_since = threading.Event(), []
    mover = engine.workers[slow]._parts.mover
    copy_back, merge = mover._copy_back, engine._merger.merge

    def copy_late(order: LoadOrder) -> tuple[int, str | None]:
        assert may_copy.wait(60)
        return copy_back(order)

    def count_steps(reports: list[TransferReport]) -> TransferReport:
        if steps_since or reports[1 - slow].finished_recving:
            steps_since.append(reports[slow])
        if len(steps_since) == 5:
            may_copy.set()
        return merge(reports)

    monkeypatch.setattr(mover, "_copy_back", copy_late)
    monkeypatch.setattr(engine._merger, "merge", count_steps)
    assert engine.serve(PROMPTS[0]).num_external_tokens == 40
    assert not any(steps_since[:5])


@pytest.mark.parametrize("num_ranks_that_heard", range(NUM_RANKS + 1))
def test_a_load_and_its_cancellation_may_both_be_lost(
    start: Start, num_ranks_that_heard: int
) -> None:
    """Each with a step that failed before all ranks heard of it: all of them end the load."""
    engine = start(num_disk_blocks=0)
    for prompt in PROMPTS:
        engine.serve(prompt)
    scheduler = engine.scheduler
    scheduler.add_request(Request("r", PROMPTS[0]))
    for num_heard in (num_ranks_that_heard, 0, 0):
        output = scheduler.schedule()
        scheduler.abort_requests(["r"])
        for runner in engine.runners[:num_heard]:
            runner.execute_model(output)
        scheduler.abandon(output, dispatched=True)
    assert scheduler.stats().num_quarantined_blocks == 10
    for _ in range(20_000):
        engine.step()
        if not scheduler.has_requests():
            break
        time.sleep(0.001)
    assert scheduler.stats().num_quarantined_blocks == 0
    engine.half.check()


@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_a_load_that_fails_on_one_rank_fails(start: Start, tmp_path: Path, rank: int) -> None:
    """What comes before the first bad record of any rank is used, the rest computed on all; then
    it is saved anew."""
    engine = start()
    for prompt in PROMPTS:
        engine.serve(prompt)
    engine.close()
    damage(file_of(tmp_path, rank), Random(1), share=0.2)
    after = start()
    for prompt in PROMPTS:
        after.serve(prompt)
    assert after.counts.num_lost > 0
    assert after.counts.num_loaded_from_disk > 0
    assert after.scheduler.stats().num_failed_loads > 0
    num_lost = after.counts.num_lost
    for prompt in PROMPTS:
        assert after.serve(prompt).num_external_tokens == 40
    assert after.counts.num_lost == num_lost


def test_the_next_engine_finds_what_all_ranks_have(start: Start, tmp_path: Path) -> None:
    """All of it after an orderly end; of what one rank lost, nothing, on any rank."""
    engine = start()
    for prompt in PROMPTS:
        engine.serve(prompt)
    engine.close()
    after = start()
    assert [after.serve(prompt).num_external_tokens for prompt in PROMPTS] == len(PROMPTS) * [40]
    after.close()
    file_of(tmp_path, 1).unlink()
    last = start()
    assert last.counts.num_on_disk == 0
    assert [last.serve(prompt).num_external_tokens for prompt in PROMPTS] == len(PROMPTS) * [0]
    assert last.counts.num_lost == 0


@pytest.mark.parametrize("seed", range(3))
def test_random_lives_of_ranks(start: Start, tmp_path: Path, seed: int) -> None:
    """Engines that follow each other, files that are damaged on either rank while they are used or
    between: tokens are those of solo runs, on every rank."""
    random = Random(seed)
    num_loaded = 0
    for _ in range(3):
        engine = start(num_host_blocks=random.choice([4, 30]), num_disk_blocks=60)
        for _ in range(20):
            engine.serve(random.choice(PROMPTS)[: random.randint(5, 41)])
            if random.random() < 0.2:
                damage(file_of(tmp_path, random.randrange(NUM_RANKS)), random, share=0.1)
        num_loaded += engine.counts.num_loaded_from_disk
        engine.close()
    assert num_loaded > 0


def test_a_rank_that_is_missing_is_refused(start: Start) -> None:
    """Blocks are saved and loaded on all ranks, so all must say what they have."""
    engine = start()
    here = engine.workers[0].get_handshake_metadata()
    for metadata in ([here, None], []):
        with pytest.raises(ConfigError, match="sent no handshake metadata"):
            engine.half.set_xfer_handshake_metadata(metadata)
