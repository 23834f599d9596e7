"""Every benchmark of the control plane, one summary table, and cost against N as a picture.

Writes ``out/bench/*.json`` and ``out/bench/schedule.png``. What takes long runs only when
it is asked for: the model with ``--generate``, and KV on the move with ``--transfers``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BENCHMARKS = ("import", "schedule", "admission", "pressure", "blocks", "wire")
# Each with its own number of repeats, and a table that needs no summary.
TRANSFERS = ("transfer", "push", "overlap", "offload")

# What is compared: a label for people, the benchmark, its case, the figure, the peer.
SUMMARY = (
    *(
        (f"decode step, N={n}, mean", "schedule", f"decode, caching, N={n}", "mean", "vLLM")
        for n in (1, 16, 256, 1024, 4096)
    ),
    *(
        (f"churn step, N={n}, mean", "schedule", f"churn, caching, N={n}", "mean", "vLLM")
        for n in (256, 1024)
    ),
    ("decode step, N=256, mean", "schedule", "decode, caching, N=256", "mean", "nano-vllm"),
    ("admission, 512 cold", "admission", "512 tokens, cold", "mean", "vLLM"),
    ("admission, 512 cached", "admission", "512 tokens, cached", "mean", "vLLM"),
    ("admission, 8192 cold", "admission", "8192 tokens, cold", "mean", "vLLM"),
    ("admission, 8192 cached", "admission", "8192 tokens, cached", "mean", "vLLM"),
    ("pool of 60 %, whole run", "pressure", "pool of 60 %, whole run", "total", "vLLM"),
    ("512 blocks, plain", "blocks", "512 at a time", "both plain", "vLLM"),
    ("512 blocks, hashed", "blocks", "512 at a time", "both hashed", "vLLM"),
    ("a million blocks, build time", "blocks", "1,000,000 blocks", "build", "vLLM"),
    ("a million blocks, bytes", "blocks", "1,000,000 blocks", "num_bytes", "vLLM"),
    ("256 decodes, bytes", "wire", "256 decodes, all taking a block", "num_bytes", "vLLM"),
    ("256 decodes, both ways", "wire", "256 decodes, all taking a block", "both ways", "vLLM"),
    ("256 new prompts, both ways", "wire", "256 new prompts of 2048", "both ways", "vLLM"),
    ("memory of a request of 8k", "wire", "a request with 8192 tokens", "running", "vLLM"),
)


def main() -> None:
    """Run the benchmarks, one after the other, then sum up."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--generate", action="store_true", help="run the model's benchmark too")
    parser.add_argument(
        "--transfers", action="store_true", help="run those of KV between engines and tiers too"
    )
    parser.add_argument(
        "--summary-only", action="store_true", help="use the figures that are there"
    )
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    names = list(BENCHMARKS)
    names += ["generate"] if arguments.generate else []
    names += TRANSFERS if arguments.transfers else ()
    if not arguments.summary_only:
        for name in names:
            command = [sys.executable, str(HERE / f"bench_{name}.py")]
            if name != "import":
                command += ["--json", str(arguments.out / f"{name}.json")]
            if name not in ("import", *TRANSFERS):
                command += ["--repeats", str(arguments.repeats)]
            print(f"\n$ python benchmarks/bench_{name}.py", flush=True)
            subprocess.run(command, check=True)
    results = {path.stem: json.loads(path.read_text()) for path in arguments.out.glob("*.json")}
    print_summary(results)
    if "schedule" in results:
        draw(results["schedule"]["figures"], arguments.out / "schedule.png")
        print(f"\ncost against N: {arguments.out / 'schedule.png'}")


def print_summary(results: dict[str, Any]) -> None:
    """One line for each comparison: both figures, and the peer's over ours."""
    print(f"\n{'summary (less is better)':32}{'pdcore':>14}{'peer':>14}  {'peer / pdcore':26}peer")
    for label, name, case, figure, peer in SUMMARY:
        runs = results.get(name, {}).get("figures", {}).get(case)
        if runs is None:
            continue
        ours = [run[figure] for run in runs["pdcore"]]
        line = f"{label:32}{statistics.median(ours):>14,.1f}"
        theirs = [run[figure] for run in runs.get(peer, [])]
        if theirs:
            ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
            spread = f"{statistics.median(ratios):.2f}x ({min(ratios):.2f}-{max(ratios):.2f})"
            line += f"{statistics.median(theirs):>14,.1f}  {spread:26}{peer}"
        print(line)


def draw(figures: dict[str, Any], path: Path) -> None:
    """Microseconds a step against the number of requests, both axes logarithmic."""
    try:
        import matplotlib
    except ImportError:
        print("no picture: it needs matplotlib, pip install 'pdcore[demo]'", file=sys.stderr)
        return
    matplotlib.use("agg")
    from matplotlib import pyplot

    axes = pyplot.figure(figsize=(8, 5.5)).add_subplot()
    lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for label, runs in figures.items():
        if label.startswith("decode, caching"):
            for contender, repeats in runs.items():
                for figure in ("mean", "median"):
                    value = statistics.median(run[figure] for run in repeats)
                    point = (int(label.rpartition("=")[2]), value)
                    lines.setdefault((contender, figure), []).append(point)
    colors = {name: f"C{place}" for place, name in enumerate(dict.fromkeys(n for n, _ in lines))}
    for (contender, figure), points in lines.items():
        style = "-o" if figure == "mean" else ":"
        axes.plot(
            *zip(*sorted(points), strict=True),
            style,
            color=colors[contender],
            label=f"{contender}, {figure}",
        )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="running requests",
        ylabel="µs a step",
        title="One step of decode: schedule + update, prefix caching on",
    )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(fontsize=8)
    axes.figure.savefig(path, dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
