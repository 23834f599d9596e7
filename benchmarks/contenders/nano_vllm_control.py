"""nano-vllm's scheduler, unchanged, for the benchmarks; its source's folder is in $NANO_VLLM.

It does far less: no abort, no mixing of prefill and decode, results of all or none. Only steady
decode is asked of it. Its package is entered beside its top module, which needs a GPU.
"""

from __future__ import annotations

import os
import random
import sys
import time
import types
from pathlib import Path

from serving import StepTimes, serve

BLOCK_SIZE = 16
VOCABULARY = 32_000

package = types.ModuleType("nanovllm")
package.__path__ = [str(Path(os.environ["NANO_VLLM"]) / "nanovllm")]
sys.modules["nanovllm"] = package

from nanovllm.engine.scheduler import Scheduler  # noqa: E402
from nanovllm.engine.sequence import Sequence  # noqa: E402
from nanovllm.sampling_params import SamplingParams  # noqa: E402

Sequence.block_size = BLOCK_SIZE


def decode(
    *, n: int, caching: bool, prompt: int, spread: int, steps: int, seed: int
) -> dict[str, float]:
    """Steady decode; prefix caching cannot be switched off, so it has one figure for both."""
    total = prompt + spread + steps + 32
    config = types.SimpleNamespace(
        max_num_seqs=n,
        max_num_batched_tokens=max(n * (prompt + spread), 8192),
        eos=-1,
        kvcache_block_size=BLOCK_SIZE,
        num_kvcache_blocks=n * (total // BLOCK_SIZE + 2) + 1,
    )
    scheduler = Scheduler(config)
    rng = random.Random(seed)
    for index in range(n):
        tokens = [rng.randrange(VOCABULARY) for _ in range(prompt + index % spread)]
        sampling = SamplingParams(temperature=1.0, max_tokens=steps + 32, ignore_eos=True)
        scheduler.add(Sequence(tokens, sampling))
    times = StepTimes()
    clock = time.perf_counter_ns
    for step in range(BLOCK_SIZE + 1 + steps):
        begin = clock()
        sequences, is_prefill = scheduler.schedule()
        planned = clock()
        tokens = [(sequence.seq_id + step) % VOCABULARY for sequence in sequences]
        resume = clock()
        scheduler.postprocess(sequences, tokens, is_prefill)
        for sequence in sequences:
            take(sequence.seq_id, sequence.last_token, sequence.is_finished)
        if step > BLOCK_SIZE:
            times.add(begin, clock() - (resume - planned))
    return times.report()


def take(seq_id: int, token: int, is_finished: bool) -> None:
    """Where an application would go on with a token."""


if __name__ == "__main__":
    serve({"decode": decode})
