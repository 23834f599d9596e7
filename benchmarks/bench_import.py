"""How long ``import pdcore`` and ``import pdcore.scheduler`` take in a fresh interpreter.

Prints the median and the range over several interpreters, beside numpy alone, which is most of
it. Files are in the page cache and compiled, as they are from the second import of an installed
package on; the interpreter's own start is left out.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile

TIMED = "import time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"
CASES = ("numpy", "numpy, attrs", "pdcore", "pdcore, pdcore.scheduler")


def seconds_to_import(modules: str, bytecode: str) -> float:
    """Import in a new interpreter that keeps its bytecode in a folder; return how long it took."""
    command = [sys.executable, "-c", TIMED.format(modules)]
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    run = subprocess.run(command, capture_output=True, check=True, timeout=60, env=environment)
    return float(run.stdout)


def main() -> None:
    """Time every case and print one line each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=11, help="interpreters for each case")
    runs = parser.parse_args().runs
    print(f"Python {platform.python_version()}, {platform.machine()}, {runs} runs each\n")
    print(f"{'import':28}{'median':>10}{'min':>10}{'max':>10}")
    with tempfile.TemporaryDirectory() as bytecode:
        for modules in CASES:
            seconds_to_import(modules, bytecode)  # fills the page cache and writes the bytecode
            times = [seconds_to_import(modules, bytecode) * 1e3 for _ in range(runs)]
            middle, low, high = statistics.median(times), min(times), max(times)
            print(f"{modules:28}{middle:>7.0f} ms{low:>7.0f} ms{high:>7.0f} ms")


if __name__ == "__main__":
    main()
