"""A working set of three times the pool: computed again, or brought back from host memory and disk.

SmolLM2 on the CPU serves the same prompts round after round, through a pool that holds a third of
them. One engine computes them again each time. One has host memory for all behind its pool, one
has a disk for all and little host memory, one has a pool for all, which nothing can beat. Every
round of every engine gives the same tokens, or the run fails.

Then `LoadCost` is given what was measured, and then a disk that is said to be slower than
computing: what does it decline, and what does a round take?
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import attrs
import numpy as np

from measuring import Ratio, cpu_name
from model_contenders import find_gguf
from pdcore import (
    FCFS,
    KVCacheManager,
    Limits,
    LRUBlockPool,
    MonotonicClock,
    Request,
    SamplingParams,
    SchedulingPolicy,
    UnifiedScheduler,
)
from pdcore.connector.offload import OffloadConfig, OffloadConnector
from pdcore.loop import Waker, step, wait
from pdcore.runner import GPUModelRunner
from pdcore.runner.executor import InProcessExecutor
from pdcore.scheduler import LoadCost

BLOCK_SIZE = 16
COMPUTED = "computed again"
RECORD_HEADER = 256


@attrs.frozen(kw_only=True)
class Round:
    """One pass over all prompts."""

    seconds: float
    from_host: int
    from_disk: int
    computed: int
    tokens: tuple[tuple[int, ...], ...] = attrs.field(repr=False)

    def figures(self) -> dict[str, float]:
        return attrs.asdict(self, filter=attrs.filters.exclude("tokens"))


class Engine:
    """One engine with its model loaded; its scheduler can be made anew with another policy."""

    def __init__(
        self, options: argparse.Namespace, num_blocks: int, config: OffloadConfig | None = None
    ) -> None:
        self._options = options
        self._num_blocks = num_blocks
        self._limits = Limits(max_num_seqs=4, max_num_batched_tokens=512, max_model_len=2048)
        self._connector = None if config is None else OffloadConnector(config)
        self._worker = None if self._connector is None else self._connector.worker_side()
        self._executor = InProcessExecutor(
            lambda: GPUModelRunner(
                find_gguf(),
                limits=self._limits,
                device="cpu",
                dtype=options.dtype,
                block_size=BLOCK_SIZE,
                num_threads=options.threads,
                connector=self._worker,
            ),
            num_blocks=num_blocks + 1,
        )
        self._executor.start()
        self.use(FCFS())

    def use(self, policy: SchedulingPolicy, **claims: float) -> None:
        """Begin anew, nothing saved yet, with another policy and other claims about the tiers."""
        self._waker, clock = Waker(), MonotonicClock()
        half = None
        if self._connector is not None and self._worker is not None:
            config = attrs.evolve(self._connector.config, **claims)  # type: ignore[arg-type]
            half = OffloadConnector(config).scheduler_side()
            half.start(clock=clock, notify=self._waker)
            half.set_xfer_handshake_metadata([self._worker.get_handshake_metadata()])
        manager = KVCacheManager(LRUBlockPool(self._num_blocks + 1, BLOCK_SIZE))
        self.scheduler = UnifiedScheduler(
            manager, policy=policy, limits=self._limits, connector=half, clock=clock
        )

    def serve(self, prompts: list[np.ndarray]) -> Round:
        """Add all prompts at once, and run until all are done."""
        before, num_tokens = self._counts(), self._options.num_tokens
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        tokens: dict[str, list[int]] = {f"r{place}": [] for place in range(len(prompts))}
        start = time.perf_counter()
        for name, prompt in zip(tokens, prompts, strict=True):
            self.scheduler.add_request(Request(name, prompt, sampling=sampling))
        while self.scheduler.has_requests():
            wait(self.scheduler, self._waker, clock=self.scheduler.clock)
            for output in step(self.scheduler, self._executor).outputs:
                tokens[output.request_id].extend(output.new_token_ids)
        seconds = time.perf_counter() - start
        host, disk, scheduled = (b - a for a, b in zip(before, self._counts(), strict=True))
        return Round(
            seconds=seconds,
            from_host=host * BLOCK_SIZE,
            from_disk=disk * BLOCK_SIZE,
            computed=scheduled,
            tokens=tuple(map(tuple, tokens.values())),
        )

    def block_load_s(self) -> float:
        """Seconds a block of the newest loads took, moved and checked."""
        transfers = self.scheduler.stats().connector.transfers
        return sum(it.wire_s for it in transfers) / sum(it.num_blocks for it in transfers)

    @property
    def bytes_per_block(self) -> int:
        assert self._worker is not None
        return self._worker.get_handshake_metadata().bytes_per_block

    def close(self) -> None:
        self._executor.close()

    def _counts(self) -> tuple[int, int, int]:
        stats = self.scheduler.stats()
        offload = stats.connector.offload
        return (
            offload.num_loaded_from_host,
            offload.num_loaded_from_disk,
            stats.num_scheduled_tokens,
        )


class Table:
    """Rounds by engine, each beside one that was computed just before or after it."""

    def __init__(self) -> None:
        self.rounds: dict[str, list[Round]] = {}
        self._bases: dict[str, list[Round]] = {}

    def add(self, name: str, one: Round, *, base: Round) -> None:
        self.rounds.setdefault(name, []).append(one)
        self._bases.setdefault(name, []).append(base)
        if one.tokens != base.tokens:
            raise SystemExit(f"{name}: the tokens are not those that computing gives")

    def median_s(self, name: str) -> float:
        return statistics.median(one.seconds for one in self.rounds[name])

    def ratio(self, name: str) -> Ratio:
        """How many times faster than computing."""
        pairs = zip(self._bases[name], self.rounds[name], strict=True)
        each = [base.seconds / one.seconds for base, one in pairs]
        return Ratio(statistics.median(each), min(each), max(each))

    def save(self, path: Path | None) -> None:
        """Write all rounds by engine, without their tokens."""
        if path is not None:
            rounds = {name: [it.figures() for it in of_one] for name, of_one in self.rounds.items()}
            path.write_text(json.dumps(rounds, indent=1))

    def print(self) -> None:
        head = f"{'tokens equal in every round':34}{'s a round':>10}{'faster':>22}"
        print(f"\n{head}{'host':>9}{'disk':>9}{'computed':>10}   (tokens of the last round)")
        for name, rounds in self.rounds.items():
            last = rounds[-1]
            print(
                f"{name:34}{self.median_s(name):>10.3f}{self.ratio(name)!s:>22}"
                f"{last.from_host:>9,}{last.from_disk:>9,}{last.computed:>10,}"
            )


def parse() -> argparse.Namespace:
    """The options; all have defaults."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--repeats", type=int, default=3, help="rounds of each engine")
    options.add_argument("--num-prompts", type=int, default=12)
    options.add_argument("--prompt-blocks", type=int, default=6, help="blocks of each prompt")
    options.add_argument("--num-tokens", type=int, default=2, help="tokens drawn for each")
    options.add_argument("--dtype", default="float32")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--directory", type=Path, help="where the disk tier is")
    options.add_argument("--json", type=Path, help="where to write all rounds")
    return options.parse_args()


def make_engines(options: argparse.Namespace, directory: Path) -> dict[str, Engine]:
    """Whoever computes comes first; the others are compared with it."""
    working_set = options.num_prompts * options.prompt_blocks
    pool = working_set // 3
    # 30 layers, keys and values, 3 heads of 64.
    record = RECORD_HEADER + 30 * 2 * BLOCK_SIZE * 3 * 64 * (4 if options.dtype == "float32" else 2)
    room = (working_set + 4 * options.num_prompts) * record
    host = OffloadConfig(host_bytes=room)
    disk = OffloadConfig(host_bytes=room // 8, disk_bytes=room, directory=directory)
    print(
        f"working set {working_set} blocks ({working_set * record / 1e6:.0f} MB), pool {pool}; "
        f"behind it: host memory for {room // record} blocks, or disk for as many and host memory "
        f"for {room // 8 // record}"
    )
    return {
        COMPUTED: Engine(options, pool),
        "from host memory": Engine(options, pool, host),
        "from disk": Engine(options, pool, disk),
        "all in the pool": Engine(options, working_set + 4 * options.num_prompts),
    }


def weigh(table: Table, engines: dict[str, Engine], prompts: list[np.ndarray]) -> None:
    """What `LoadCost` declines of the disk, as it was measured and as something slower."""
    engine = engines["from disk"]
    token_s = table.median_s(COMPUTED) / table.rounds[COMPUTED][-1].computed
    load_s, num_bytes = engine.block_load_s(), engine.bytes_per_block
    breaks_even = num_bytes / (BLOCK_SIZE * token_s)
    print(
        f"a block: {load_s * 1e3:.2f} ms from disk ({num_bytes / load_s / 1e6:,.0f} MB/s), "
        f"{BLOCK_SIZE * token_s * 1e3:.1f} ms to compute; loads pay above "
        f"{breaks_even / 1e6:.1f} MB/s"
    )
    for label, rate in (("as measured", num_bytes / load_s), ("said slow", breaks_even / 2)):
        engine.use(LoadCost(prefill_s_per_token=token_s), disk_bytes_per_s=rate)
        engine.serve(prompts)
        for _ in range(2):
            base = engines[COMPUTED].serve(prompts)
            table.add(f"LoadCost, disk {label}", engine.serve(prompts), base=base)


def main() -> None:
    """Measure, then print one table."""
    options = parse()
    names = ("repeats", "num_prompts", "prompt_blocks", "num_tokens", "dtype", "threads", "seed")
    settings = ", ".join(f"{name}={getattr(options, name)}" for name in names)
    print(f"offload: SmolLM2-135M; {cpu_name()}, {os.cpu_count()} cores; {settings}")
    generator = np.random.default_rng(options.seed)
    # One token more than the blocks, since the last one is always computed.
    num_tokens = options.prompt_blocks * BLOCK_SIZE + 1
    prompts = [
        generator.integers(1_000, 49_000, num_tokens).astype(np.int32)
        for _ in range(options.num_prompts)
    ]
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        engines = make_engines(options, Path(directory))
        table = Table()
        for engine in engines.values():
            engine.serve(prompts)
        for _ in range(options.repeats):
            base = engines[COMPUTED].serve(prompts)
            table.add(COMPUTED, base, base=base)
            for name, engine in list(engines.items())[1:]:
                table.add(name, engine.serve(prompts), base=base)
        weigh(table, engines, prompts)
        table.print()
        table.save(options.json)
        for engine in engines.values():
            engine.close()


if __name__ == "__main__":
    main()
