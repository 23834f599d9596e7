"""Loads beside decode: what they cost it, and what holds an engine up when they do not fit.

A decode engine over a real scheduler reads 64 MB of KV for each remote prompt from another process
over NIXL, and checks what arrives. Its model is a stand-in that takes a fixed time for a step:
either a device of its own (the processor sleeps meanwhile), or the processor itself, which reads
64 MB of weights in every step and competes with the copy for memory.

First: four requests decode all the time; for half a second loads come in, for half a second none,
and so on. The decode of the four may fall by no more than the share of time that copies take.
Then: the same list of remote requests through a pool that is large or small, a slow or a fast
model; and which of compute, bandwidth and pool was what bound. Draws it all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
import numpy as np

HERE = Path(__file__).parent
sys.path.append(str(HERE / "contenders"))

from kv_engine import KVShape, prompt_of  # noqa: E402
from overlap_picture import draw  # noqa: E402
from paced_engine import Device, PacedEngine, Tick  # noqa: E402

from measuring import Contender, cpu_name, progress  # noqa: E402
from pdcore.request import Request, SamplingParams  # noqa: E402

MEGABYTES = 64
WINDOW_S, SETTLE_S, INTERVAL_S = 0.5, 0.05, 0.06
LOCAL_TOKENS = 3000
SHAPE = KVShape(itemsize=4)
NUM_BLOCKS = SHAPE.num_blocks_for(MEGABYTES)
Span = tuple[float, float]


class Prefill:
    """The other process: it hands over as many prompts as are asked for, all in the same blocks."""

    def __init__(self) -> None:
        script = str(HERE / "contenders" / "kv_peer.py")
        self._peer = Contender("peer", [sys.executable, script])
        self._peer.ask("start", num_blocks=2 * NUM_BLOCKS, bytes_per_block=SHAPE.bytes_per_block)
        self._block_ids = np.random.default_rng(1).permutation(2 * NUM_BLOCKS - 1) + 1
        self._num_requests = 0

    def request(self, num_tokens: int) -> Request:
        """A request whose prompt is there, and that decodes some tokens."""
        self._num_requests += 1
        block_ids = self._block_ids[:NUM_BLOCKS].tolist()
        ticket = self._peer.ask("ticket", block_ids=block_ids, first=self._num_requests)
        return Request(
            f"remote{self._num_requests}",
            prompt_of(NUM_BLOCKS, self._num_requests),
            sampling=SamplingParams(max_tokens=num_tokens, ignore_eos=True),
            kv_transfer_params=ticket,
        )

    def close(self) -> None:
        """End the process."""
        self._peer.close()


@attrs.frozen(kw_only=True)
class Decode:
    """Decode with and without loads beside it.

    Args:
        label: of the device.
        quiet, loaded: tokens per second in each window.
        copy_share: share of the loaded windows in which a copy ran.
        windows: when loads came in.
        ticks: every turn of the loop.
        reads: when each copy ran.
    """

    label: str
    quiet: list[float]
    loaded: list[float]
    copy_share: float
    windows: list[Span]
    ticks: list[Tick]
    reads: list[Span]

    @property
    def loss(self) -> float:
        """The share of its tokens that decode lost while loads came in."""
        pairs = zip(self.quiet, self.loaded, strict=True)
        return statistics.median(1 - loaded / quiet for quiet, loaded in pairs)


def decode_beside_loads(prefill: Prefill, label: str, device: Device, num_windows: int) -> Decode:
    """Four requests decode; every other window, a load comes in every 60 ms."""
    engine = PacedEngine(device, num_blocks=14 * NUM_BLOCKS, max_num_seqs=16)
    num_loads = int(num_windows * WINDOW_S / INTERVAL_S) + 1
    remote = [prefill.request(1) for _ in range(num_loads + 1)]
    try:
        for i in range(4):
            engine.add(_local(i))
        engine.add(remote.pop())  # builds the agent, which takes long, before anything is measured
        while len(engine.waiting) > 4:
            engine.turn(watched="local")
        quiet, loaded, windows = [], [], []
        for _ in range(num_windows):
            quiet.append(_window(engine, []))
            began = time.monotonic()
            loaded.append(_window(engine, remote))
            windows.append((began, began + WINDOW_S))
            while len(engine.waiting) > 4:
                engine.turn(watched="local")
            _turn_for(engine, SETTLE_S)
        reads = [(start, end) for start, end, _ in engine.reads()]
        inside = _overlap_s(reads, windows) / (WINDOW_S * num_windows)
        return Decode(
            label=label,
            quiet=quiet,
            loaded=loaded,
            copy_share=inside,
            windows=windows,
            ticks=engine.ticks,
            reads=reads,
        )
    finally:
        engine.close()


def _local(number: int) -> Request:
    return Request(
        f"local{number}",
        [-number - 1 + 2**30, 1],
        sampling=SamplingParams(max_tokens=LOCAL_TOKENS, ignore_eos=True),
    )


def _window(engine: PacedEngine, remote: list[Request]) -> float:
    """Run for half a second, with loads from ``remote``; return watched tokens per second."""
    began, first = time.monotonic(), len(engine.ticks)
    next_at = began
    while (now := time.monotonic()) < began + WINDOW_S:
        if remote and now >= next_at:
            engine.add(remote.pop())
            next_at += INTERVAL_S
        engine.turn(watched="local")
    num_tokens = sum(tick.num_tokens for tick in engine.ticks[first:])
    return num_tokens / (time.monotonic() - began)


def _turn_for(engine: PacedEngine, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        engine.turn(watched="local")


@attrs.frozen(kw_only=True)
class Case:
    """A way to serve the same list of remote requests.

    Args:
        label: for people.
        num_pool_requests: for how many of them at once the pool has room.
        step_s: what the model takes for a step.
        num_tokens: how many each request decodes.
        max_num_seqs: how many decode at once.
    """

    label: str
    num_pool_requests: float
    step_s: float
    num_tokens: int
    max_num_seqs: int


CASES = (
    Case(label="large pool", num_pool_requests=14, step_s=4e-3, num_tokens=16, max_num_seqs=2),
    Case(label="small pool", num_pool_requests=1.2, step_s=4e-3, num_tokens=16, max_num_seqs=2),
    Case(
        label="large pool, fast model",
        num_pool_requests=14,
        step_s=5e-4,
        num_tokens=2,
        max_num_seqs=8,
    ),
)


@attrs.frozen(kw_only=True)
class Served:
    """How a case went: shares of the time, and what they were measured from."""

    case: Case
    began: float
    seconds: float
    num_tokens: int
    num_bytes: int
    busy: list[Span]
    reads: list[Span]
    short: list[Span]
    ticks: list[Tick]

    @property
    def shares(self) -> dict[str, float]:
        """Of the time: the model ran, a copy ran, a request waited because the pool was full."""
        parts = {"compute": self.busy, "bandwidth": self.reads, "pool": self.short}
        return {name: _length_s(spans) / self.seconds for name, spans in parts.items()}

    @property
    def overlap(self) -> float:
        """The share of the copying that ran while the model did."""
        return _overlap_s(self.reads, self.busy) / _length_s(self.reads)

    @property
    def binds(self) -> str:
        """What one would have to have more of, for it to go faster."""
        shares = self.shares
        name = max(shares, key=lambda each: shares[each])
        return name if shares[name] > 0.5 else "nothing for long"


def serve(prefill: Prefill, case: Case, num_requests: int) -> Served:
    """Serve a list of remote requests that are all there at the beginning."""
    num_blocks = int(case.num_pool_requests * NUM_BLOCKS) + 2
    device = Device(step_s=case.step_s)
    engine = PacedEngine(device, num_blocks=num_blocks, max_num_seqs=case.max_num_seqs)
    try:
        engine.add(prefill.request(1))
        while engine.waiting:
            engine.turn()
        requests = [prefill.request(case.num_tokens) for _ in range(num_requests)]
        engine.ticks.clear()
        began = time.monotonic()
        for request in requests:
            engine.add(request)
        while engine.waiting:
            engine.turn()
        seconds = time.monotonic() - began
        reads = [read for read in engine.reads() if read[0] >= began]
        return Served(
            case=case,
            began=began,
            seconds=seconds,
            num_tokens=sum(tick.num_tokens for tick in engine.ticks),
            num_bytes=sum(num_bytes for _, _, num_bytes in reads),
            busy=[span for span in engine.runner.busy if span[0] >= began],
            reads=[(start, end) for start, end, _ in reads],
            short=[(t.began, t.ended) for t in engine.ticks if t.is_short_of_blocks],
            ticks=engine.ticks,
        )
    finally:
        engine.close()


def _length_s(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)


def _overlap_s(these: Iterable[Span], those: list[Span]) -> float:
    """Seconds that are in both; the spans of each side are disjoint."""
    return sum(max(0.0, min(b, d) - max(a, c)) for a, b in these for c, d in those)


def print_decode(decodes: Iterable[Decode]) -> None:
    """What loads cost decode, beside what the copies take."""
    print(f"\ndecode of four requests beside loads of {MEGABYTES} MB every {1e3 * INTERVAL_S:g} ms")
    heads = ("quiet, tok/s", "loaded, tok/s", "lost", "copies take")
    print(" " * 30 + "".join(f"{head:>16}" for head in heads))
    for each in decodes:
        cells = (
            f"{statistics.median(each.quiet):.0f}",
            f"{statistics.median(each.loaded):.0f}",
            f"{100 * each.loss:.1f} %",
            f"{100 * each.copy_share:.1f} %",
        )
        print(f"{each.label:30}" + "".join(f"{cell:>16}" for cell in cells))


def print_served(served: Iterable[Served]) -> None:
    """Speed and shares of each case."""
    print("\nthe same remote requests, three ways")
    heads = ("tok/s", "GB/s", "compute", "bandwidth", "pool", "copies beside", "binds")
    print(" " * 30 + "".join(f"{head:>14}" for head in heads))
    for each in served:
        shares = [f"{100 * share:.0f} %" for share in each.shares.values()]
        cells = (
            f"{each.num_tokens / each.seconds:.0f}",
            f"{each.num_bytes / each.seconds / 1e9:.2f}",
            *shares,
            f"{100 * each.overlap:.0f} %",
            each.binds,
        )
        print(f"{each.case.label:30}" + "".join(f"{cell:>14}" for cell in cells))


def as_data(decodes: Iterable[Decode], served: Iterable[Served]) -> dict[str, Any]:
    """The figures, for a file."""
    return {
        "decode": {
            each.label: {
                "quiet": each.quiet,
                "loaded": each.loaded,
                "loss": each.loss,
                "copy_share": each.copy_share,
            }
            for each in decodes
        },
        "served": {
            each.case.label: {
                "seconds": each.seconds,
                "num_tokens": each.num_tokens,
                "num_bytes": each.num_bytes,
                "shares": each.shares,
                "overlap": each.overlap,
                "binds": each.binds,
            }
            for each in served
        },
    }


def main() -> None:
    """Measure, print and draw."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--windows", type=int, default=8, help="with loads, and as many without")
    options.add_argument("--requests", type=int, default=12, help="in the list that is served")
    options.add_argument("--json", type=Path, help="where to write the figures")
    options.add_argument("--png", type=Path, default=Path("out/bench/overlap.png"))
    arguments = options.parse_args()
    print(f"bench_overlap: loads beside decode\n{cpu_name()}")
    devices = {
        "a device of its own": Device(step_s=5e-3),
        "the processor itself": Device(weights=np.ones(16 << 20, np.float32)),
    }
    prefill = Prefill()
    try:
        decodes = []
        for label, device in devices.items():
            progress(label)
            decodes.append(decode_beside_loads(prefill, label, device, arguments.windows))
        served = []
        for case in CASES:
            progress(case.label)
            served.append(serve(prefill, case, arguments.requests))
    finally:
        progress("")
        prefill.close()
    print_decode(decodes)
    print_served(served)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(as_data(decodes, served), indent=1))
    arguments.png.parent.mkdir(parents=True, exist_ok=True)
    draw(arguments.png, decodes, served)
    print(f"\npicture: {arguments.png}")


if __name__ == "__main__":
    main()
