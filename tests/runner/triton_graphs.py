"""Decode graphs over the Triton backend, interpreted. Run as a script under ``TRITON_INTERPRET=1``.

Compares random steps with and without graphs, and prints how often each graph ran.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from graph_emulation import RecordedGraphs
from runner_pair import RunnerPair
from tiny_models import save_tiny_model
from torch.utils._python_dispatch import _disable_current_modes

from pdcore.runner.attention import triton_backend


class RecordedKernel:
    """A kernel whose launches become part of the graph that is being captured."""

    num_launches = 0

    def __init__(self, kernel: Any, graphs: RecordedGraphs) -> None:
        self._kernel = kernel
        self._graphs = graphs

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            with _disable_current_modes():  # what the interpreter does is not part of the graph
                self._kernel[grid](*args, **kwargs)

        def run(*args: Any, **kwargs: Any) -> None:
            launch(*args, **kwargs)
            if self._graphs.recording is not None:
                RecordedKernel.num_launches += 1
                self._graphs.recording.note(launch, args, kwargs)

        return run


def main(folder: Path) -> None:
    """Run the pair; any difference is an error."""
    graphs = RecordedGraphs()
    for name in ("attend_kernel", "write_kernel"):
        kernel = RecordedKernel(getattr(triton_backend, name), graphs)
        setattr(triton_backend, name, kernel)
    pair = RunnerPair(
        save_tiny_model("mistral, window", folder),
        graphs=graphs,
        attention_backend="triton",
        cuda_graph_sizes=(3, 8),
    )
    pair.run_at_random(0, num_steps=14)
    print(
        json.dumps({"num_replays": graphs.num_replays, "num_launches": RecordedKernel.num_launches})
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
