"""What a hand-over adds to the time to first token: KV that is read, and KV that was sent ahead.

A prefill process computes a prompt in steps, on a device of its own (the processor sleeps in them).
After its last step a decode process takes the KV over. In pull mode it reads all of it then; in
push mode the prefill process has sent the blocks of each step during the next one, and only the
last step's blocks are still under way. Both check what arrived.

On one host NIXL copies at memory speed, and the decode process must copy from staging memory once
more, so there is little to gain; over a network (here TCP on the loopback device) there is.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path.append(str(HERE / "contenders"))

from kv_engine import KVEngine, KVShape, prompt_of  # noqa: E402

from measuring import Contender, Report, progress  # noqa: E402
from pdcore.request import Request  # noqa: E402

SHAPE = KVShape(itemsize=4)


class Pair:
    """The decode side in this process, the prefill side in another one."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._num_prompts = 0
        num_bytes = SHAPE.bytes_per_block
        self._peer = Contender("peer", [sys.executable, str(HERE / "contenders" / "kv_peer.py")])
        self._peer.ask("start", num_blocks=2 * num_blocks, bytes_per_block=num_bytes)
        self._engine = KVEngine(
            2 * num_blocks, num_bytes, push_staging_bytes=num_blocks * num_bytes
        )
        self._rng = np.random.default_rng(1)

    def take_over(self, *, num_steps: int, step_s: float, pushes: bool) -> dict[str, float]:
        """Milliseconds from the end of a prefill to the moment at which its KV may be used."""
        self._num_prompts += 1
        first = self._num_prompts
        push_to: dict[str, Any] | None = None
        if pushes:
            prompt = Request("any", prompt_of(self._num_blocks, first))
            push_to = self._engine.scheduler.expect_push(prompt)
            assert push_to is not None
        done = self._peer.ask(
            "prefill",
            block_ids=self._scattered(),
            first=first,
            num_steps=num_steps,
            step_s=step_s,
            push_to=push_to,
        )
        figures = self._engine.read(
            done["ticket"], np.array(self._scattered(), np.int32), first=first
        )
        added_s = time.monotonic() - done["ended_at"]
        used = self._engine.scheduler.stats().landings.num_used
        return {"ms": 1e3 * added_s, "num_bytes": figures["num_bytes"], "num_used": used}

    def close(self) -> None:
        self._engine.close()
        self._peer.close()

    def _scattered(self) -> list[int]:
        ids: list[int] = (self._rng.permutation(2 * self._num_blocks - 1) + 1).tolist()
        return ids[: self._num_blocks]


def main() -> None:
    """Measure both ways, turn by turn, and print the table."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--repeats", type=int, default=9)
    options.add_argument("--megabytes", type=int, nargs="+", default=[64, 256])
    options.add_argument("--steps", type=int, default=8, help="steps of the prefill")
    options.add_argument("--step-ms", type=float, default=60.0)
    options.add_argument("--transport", choices=["any", "tcp"], default="any")
    options.add_argument("--json", type=Path, help="where to write all figures")
    arguments = options.parse_args()
    if arguments.transport == "tcp":
        os.environ["UCX_TLS"] = "tcp"
    settings = {name: getattr(arguments, name) for name in ("repeats", "steps", "step_ms")}
    report = Report(f"bench_push over {arguments.transport}", settings)
    report.print_head()
    step = {"num_steps": arguments.steps, "step_s": arguments.step_ms / 1e3}
    for megabytes in arguments.megabytes:
        pair = Pair(SHAPE.num_blocks_for(megabytes))
        try:
            for repeat in range(arguments.repeats + 1):
                progress(f"{megabytes} MB, {repeat} of {arguments.repeats}")
                for column, pushes in (("pull", False), ("push", True)):
                    figures = pair.take_over(**step, pushes=pushes)
                    if repeat:  # the first one builds agents
                        report.add(f"{megabytes} MB", column, figures)
        finally:
            progress("")
            pair.close()
    print("\nms from the prefill's end to usable KV: median (lowest-highest)")
    for label, columns in report.figures.items():
        cells = []
        for column, runs in columns.items():
            each = [run["ms"] for run in runs]
            cells.append(
                f"{column} {statistics.median(each):.1f} ({min(each):.1f}-{max(each):.1f})"
            )
        print(f"{label:10}" + ", ".join(cells))
    report.save(arguments.json)


if __name__ == "__main__":
    main()
