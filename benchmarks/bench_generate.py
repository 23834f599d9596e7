"""SmolLM2-135M end to end on the CPU: tokens per second, time to first token, time per token.

pdcore's own parts in a loop (see `generate_pdcore.py`) against vLLM for CPU, whose interpreter
``PEER_PYTHON`` names, and with ``--hf`` against transformers. Every contender loads its model once.
Repeats take turns, and whoever has no turn is stopped, so that idle threads take no time from the
others. With ``--floor``: the model's matrix products alone, and how near a decode step comes.

The peers read ``--hf-model``, a Hugging Face folder; it is made from the GGUF file when absent.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from measuring import CONTENDERS, Case, Report, measure, parser, progress
from model_contenders import (
    DTYPES,
    VLLM_SETTINGS,
    TurnTaker,
    find_gguf,
    find_preloads,
    hf_folder,
    running,
)

WORKLOADS = ("32x128x64", "64x256x64", "32x512+32x64", "1x128x128")
FLOOR_ROWS = (1, 8, 32, 64, 256)


def sizes(workload: str) -> dict[str, int]:
    """Read "32x128x64": requests, prompt tokens, tokens to draw; "512+32" shares the first 512."""
    num_requests, prompt, num_tokens = workload.split("x")
    shared, _, own = prompt.rpartition("+")
    return {
        "num_requests": int(num_requests),
        "num_shared": int(shared or 0),
        "num_own": int(own),
        "num_tokens": int(num_tokens),
    }


def start_contenders(options: argparse.Namespace, dtype: str) -> Iterator[TurnTaker]:
    """pdcore, and the peers that were asked for, each with its model loaded."""
    gguf = find_gguf()
    threads = [f"--threads={options.threads}"]

    def command(python: str, script: str, model: Path, *more: str) -> list[str]:
        return [python, str(CONTENDERS / script), str(model), f"--dtype={dtype}", *more]

    ours = command(sys.executable, "generate_pdcore.py", gguf, *threads, f"--depth={options.depth}")
    yield TurnTaker("pdcore", ours)
    if options.preload and options.preload_pdcore:
        yield TurnTaker("pdcore, preloads", ours, LD_PRELOAD=options.preload)
    if options.peer_python:
        peer = command(options.peer_python, "generate_vllm.py", hf_folder(options.hf_model, gguf))
        binding = {"VLLM_CPU_OMP_THREADS_BIND": f"0-{options.threads - 1}"}
        alone = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "LD_PRELOAD": options.preload}
        yield TurnTaker("vLLM", peer, **VLLM_SETTINGS, **binding, **alone)
    if options.hf:
        folder = hf_folder(options.hf_model, gguf)
        for name, more in (("HF generate", []), ("HF continuous", ["--continuous"])):
            peer = command(sys.executable, "generate_hf.py", folder, *threads, *more)
            yield TurnTaker(name, peer)


def run_workloads(options: argparse.Namespace) -> None:
    """Measure the workloads in every dtype and print tables of seconds, first token, per token."""
    settings = {
        name: getattr(options, name) for name in ("repeats", "seed", "threads", "depth", "preload")
    }
    report = Report("bench_generate: SmolLM2-135M on the CPU", settings)
    report.print_head()
    for dtype in options.dtype:
        cases = [
            Case(
                label=f"{dtype} {name}",
                task="generate",
                settings={**sizes(name), "seed": options.seed},
            )
            for name in options.workload
        ]
        with running(start_contenders(options, dtype)) as contenders:
            for case in cases:
                measure(report, [case], contenders, options.repeats, show=progress)
                report.save(options.json)
    report.print_table("seconds", "s")
    report.print_table("cpu_seconds", "s")
    report.print_table("first", "ms")
    report.print_table("per_token", "ms")
    print_throughput(report)


def print_throughput(report: Report) -> None:
    """Output tokens per second, from the medians."""
    print("\noutput tokens per second")
    for label, columns in report.figures.items():
        workload = sizes(label.split()[1])
        num_tokens = workload["num_requests"] * workload["num_tokens"]
        cells = (
            f"{name} {num_tokens / (report.median(label, name, 'seconds') or 1):.0f}"
            for name in columns
        )
        print(f"{label:28}" + "   ".join(cells))


def run_floor(options: argparse.Namespace) -> None:
    """Print the products' time beside a decode step's, by batch size."""
    sys.path.insert(0, str(CONTENDERS))
    from generate_pdcore import measure_floor

    for dtype in options.dtype:
        floor = measure_floor(find_gguf(), dtype, options.threads)
        print(f"\n{dtype}, {options.threads} threads: milliseconds, medians of {options.repeats}")
        print(f"{'batch':>6}{'products alone':>16}{'decode step':>14}{'share':>8}")
        for num_rows in FLOOR_ROWS:
            figures = floor(num_rows=num_rows, num_context=160, repeats=max(options.repeats, 5))
            step = figures["step"]
            shown = f"{step:14.1f}{figures['products'] / step:8.0%}" if step else ""
            print(f"{num_rows:6}{figures['products']:16.1f}{shown}")


def parse() -> argparse.Namespace:
    """The command line."""
    options = parser(__doc__)
    options.add_argument("--workload", nargs="+", default=list(WORKLOADS), help="see `sizes`")
    options.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    options.add_argument("--threads", type=int, default=os.cpu_count())
    options.add_argument("--depth", type=int, default=1, help="pdcore's steps under way at once")
    options.add_argument("--hf", action="store_true", help="also transformers, in this interpreter")
    options.add_argument("--floor", action="store_true", help="the matrix products alone")
    options.add_argument(
        "--preload",
        help="libraries for vLLM's LD_PRELOAD (default: Intel's OpenMP and tcmalloc, where found)",
    )
    options.add_argument(
        "--preload-pdcore", action="store_true", help="also pdcore with those, as a column"
    )
    options.add_argument(
        "--hf-model",
        type=Path,
        default=Path(tempfile.gettempdir()) / "pdcore-smollm2",
        help="the folder that the peers read",
    )
    arguments = options.parse_args()
    if arguments.preload is None:
        arguments.preload = find_preloads(arguments.peer_python)
    return arguments


def main() -> None:
    """Run what was asked for."""
    arguments = parse()
    if arguments.floor:
        run_floor(arguments)
    else:
        run_workloads(arguments)


if __name__ == "__main__":
    main()
