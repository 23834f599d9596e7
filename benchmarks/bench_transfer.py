"""KV from one process to another on this host: the connector beside NIXL by itself.

Blocks of SmolLM2's shape (30 layers, 16 tokens, 3 KV heads of 64) lie scattered over the pools of a
prefill and a decode process. The same blocks are moved, turn by turn and in changing order,

* by pdcore: from the moment the worker hears of the load to its last byte,
* by raw NIXL: the same blocks as one descriptor list, prepared before, polled without a pause,
* by raw NIXL from a layout by layers, which other engines use: one descriptor for each layer's keys
  and values in each block,
* by numpy's memcpy, within one process and in one piece.

Then what a request costs besides its bytes, and what engines cost that have nothing to do.
"""

from __future__ import annotations

import argparse
import base64
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

HERE = Path(__file__).parent
sys.path.append(str(HERE / "contenders"))

from kv_engine import KVEngine, KVShape  # noqa: E402
from kv_loopback import loopback_request  # noqa: E402
from raw_nixl import RawAgent  # noqa: E402

from measuring import Contender, Figures, Report, progress  # noqa: E402

DTYPES = {"fp32": 4, "bf16": 2}
PARTS = ("queue", "wire", "accept", "promotion", "protocol", "request", "cpu")
_RUN = 8

Ways = dict[str, Callable[[], Figures]]


class Pair:
    """The decode side in this process, the prefill side in another one, and all ways to move.

    Args:
        shape: of the blocks.
        num_blocks: of each pool.
    """

    def __init__(self, shape: KVShape, num_blocks: int) -> None:
        self.shape, self.num_blocks = shape, num_blocks
        self.peer = Contender("peer", [sys.executable, str(HERE / "contenders" / "kv_peer.py")])
        self.peer.ask("start", num_blocks=num_blocks, bytes_per_block=shape.bytes_per_block)
        self.engine = KVEngine(num_blocks, shape.bytes_per_block)
        self._whole, self._layered = self._raw(1), self._raw(shape.num_pieces)
        self._source = np.ones((num_blocks, shape.bytes_per_block), np.uint8)
        self._target = np.ones_like(self._source)

    def ways(self, local: npt.NDArray[np.int32], remote: npt.NDArray[np.int32]) -> Ways:
        """Each way to move some blocks, by its column; each returns figures with ``ms``."""
        return {
            "pdcore": lambda: self.load(local, remote),
            "raw NIXL": lambda: self._read_raw(self._whole, local, remote),
            "by layers": lambda: self._read_raw(self._layered, local, remote),
            "memcpy": lambda: self._copy(local.size),
        }

    def load(self, local: npt.NDArray[np.int32], remote: npt.NDArray[np.int32]) -> Figures:
        """Hand blocks over and load them with pdcore."""
        ticket = self.peer.ask("ticket", block_ids=remote.tolist())
        return self.engine.read(ticket, local)

    def close(self) -> None:
        """End both sides."""
        self._whole.close()
        self._layered.close()
        self.engine.close()
        self.peer.close()

    def _raw(self, num_regions: int) -> RawAgent:
        buffer = self.engine.buffer
        agent = RawAgent(
            f"D{num_regions}", buffer, num_regions=num_regions, num_blocks=self.num_blocks
        )
        peer = self.peer.ask("raw", num_regions=num_regions)
        agent.connect(base64.b64decode(peer["metadata"]), peer["address"])
        return agent

    def _read_raw(
        self, agent: RawAgent, local: npt.NDArray[np.int32], remote: npt.NDArray[np.int32]
    ) -> Figures:
        self.peer.ask("serve_raw", is_on=True)
        took_ms = agent.read(local, remote)
        self.peer.ask("serve_raw", is_on=False)
        return {"ms": took_ms}

    def _copy(self, num_blocks: int) -> Figures:
        began = time.perf_counter()
        np.copyto(self._target[:num_blocks], self._source[:num_blocks])
        return {"ms": 1e3 * (time.perf_counter() - began)}


def scattered(rng: np.random.Generator, num_blocks: int, pool: int) -> npt.NDArray[np.int32]:
    """Blocks from anywhere in a pool, in any order."""
    return (1 + rng.permutation(pool - 1)[:num_blocks]).astype(np.int32)


def in_runs(rng: np.random.Generator, num_blocks: int, pool: int) -> npt.NDArray[np.int32]:
    """Runs of eight that go downwards, as a pool gives that had its blocks back a while ago."""
    starts = 1 + _RUN * rng.permutation((pool - 1) // _RUN)[: -(-num_blocks // _RUN)]
    runs = starts[:, None] + np.arange(_RUN)[::-1]
    return runs.reshape(-1)[:num_blocks].astype(np.int32)


PATTERNS = {"scattered": scattered, "runs of 8": in_runs}


def move(
    report: Report, pair: Pair, label: str, megabytes: int, pattern: str, repeats: int
) -> None:
    """Move a number of bytes ``repeats`` times each way; the first turn is not counted."""
    rng = np.random.default_rng(report.settings["seed"])
    num_blocks = pair.shape.num_blocks_for(megabytes)
    for repeat in range(-1, repeats):
        progress(f"{label}, {repeat + 1} of {repeats}")
        pick = PATTERNS[pattern]
        local, remote = (pick(rng, num_blocks, pair.num_blocks) for _ in range(2))
        ways = pair.ways(local, remote)
        # Who comes later finds some of the blocks in the processor's cache, so nobody may follow
        # the same one again and again.
        turns = [list(ways)[place] for place in rng.permutation(len(ways))]
        moved = {column: ways[column]() for column in turns}
        for column in ways if repeat >= 0 else ():  # the first turn is not counted
            figures = moved[column]
            figures["GB/s"] = num_blocks * pair.shape.bytes_per_block / figures["ms"] / 1e6
            report.add(label, column, figures)


def measure_protocol(report: Report, pair: Pair, repeats: int) -> None:
    """One request of one block, again and again: what is left is the protocol."""
    one = np.array([1], np.int32)
    loopback = loopback_request()
    for repeat in range(-5, repeats):
        figures = {"NIXL": pair.load(one, one), "loopback": loopback()}
        for column, each in figures.items():
            if repeat >= 0:
                report.add("one block", column, each)


def rest(report: Report, pair: Pair, repeats: int, seconds: float = 2.0) -> None:
    """The share of a core that each engine uses with nothing to do, and while it holds a lease."""
    for _ in range(repeats):
        report.add("idle decode engine", "share", {"%": 100 * pair.engine.rest(seconds)})
        share = pair.peer.ask("rest", seconds=seconds)["share"]
        report.add("idle prefill engine", "share", {"%": 100 * share})
        pair.peer.ask("ticket", block_ids=[1])
        share = pair.peer.ask("rest", seconds=seconds)["share"]
        report.add("prefill engine with a lease", "share", {"%": 100 * share})


def print_moves(report: Report) -> None:
    """Times, speeds, and pdcore's share of raw NIXL's speed."""
    report.print_table("ms", "ms")
    labels = list(report.figures)
    columns = ("pdcore", "raw NIXL", "by layers", "memcpy")
    print("\nGB/s" + " " * 25 + "".join(f"{column:>12}" for column in columns))
    for label in labels:
        cells = [report.median(label, column, "GB/s") or 0.0 for column in columns]
        print(f"{label:29}" + "".join(f"{cell:12.1f}" for cell in cells))
    print(
        "\nbeside the bytes, ms" + " " * 9 + "".join(f"{part:>12}" for part in (*PARTS, "pieces"))
    )
    for label in labels:
        cells = [report.median(label, "pdcore", part) or 0.0 for part in (*PARTS, "pieces")]
        print(f"{label:29}" + "".join(f"{cell:12.2f}" for cell in cells))


def print_rest(protocol: Report, idle: Report) -> None:
    """What a request costs besides its bytes, and what idle engines cost."""
    print("\none request of one block, ms: median (lowest)")
    for column, runs in protocol.figures["one block"].items():
        names = [part for part in PARTS if part in runs[0]]
        cells = []
        for part in names:
            each = [run[part] for run in runs]
            cells.append(f"{part} {statistics.median(each):.2f} ({min(each):.2f})")
        print(f"{column:10}" + ", ".join(cells))
    print("\n% of a core: median (highest)")
    for label, columns in idle.figures.items():
        each = [run["%"] for run in columns["share"]]
        print(f"{label:29}{statistics.median(each):.2f} ({max(each):.2f})")


def main() -> None:
    """Measure everything and print it."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--repeats", type=int, default=12, help="interleaved repeats of each case")
    options.add_argument("--megabytes", type=int, nargs="+", default=[64, 256])
    options.add_argument("--json", type=Path, help="where to write all figures")
    options.add_argument("--seed", type=int, default=1)
    arguments = options.parse_args()
    settings = {"repeats": arguments.repeats, "seed": arguments.seed}
    report = Report("bench_transfer: KV between two processes", settings)
    protocol, idle = Report("protocol", settings), Report("idle", settings)
    report.print_head()
    for name, itemsize in DTYPES.items():
        shape = KVShape(itemsize=itemsize)
        pool = 2 * shape.num_blocks_for(max(arguments.megabytes))
        pair = Pair(shape, pool)
        try:
            for megabytes in arguments.megabytes:
                for pattern in PATTERNS:
                    label = f"{name}, {megabytes} MB, {pattern}"
                    move(report, pair, label, megabytes, pattern, arguments.repeats)
            if itemsize == 4:
                measure_protocol(protocol, pair, 10 * arguments.repeats)
                rest(idle, pair, 3)
        finally:
            progress("")
            pair.close()
    print_moves(report)
    print_rest(protocol, idle)
    report.figures |= {**protocol.figures, **idle.figures}
    report.save(arguments.json)


if __name__ == "__main__":
    main()
