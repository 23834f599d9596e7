"""Recording what a function enqueues on the device, to run it again without the function."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

__all__ = ["CUDAGraphCapture", "GraphCapture"]


class GraphCapture(Protocol):
    """Makes graphs. One replay follows another: they may share the memory of what lies between."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record what ``run`` enqueues, and return what enqueues the same again.

        A replay reads and writes the memory that ``run`` read and wrote, and every number that
        ``run`` had on the host is as it was then. ``run`` is called several times and must not wait
        for the device. Memory that it did not allocate itself has to outlive the graph.
        """
        ...


class CUDAGraphCapture:
    """CUDA graphs that share one memory pool. Capture the largest first: the others fit into it.

    Args:
        device: a CUDA device. Replays go to its current stream.
    """

    _one_at_a_time = threading.Lock()  # CUDA allows a process one capture at a time

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """See `GraphCapture.capture`. Takes about as long as ``run`` does three times."""
        graph: Any = torch.cuda.CUDAGraph()
        with self._one_at_a_time, torch.cuda.device(self._device):
            # What happens once, compiling kernels or making room for libraries, may not happen
            # while a graph is recorded; and it happens for each stream.
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                run()
                run()
            torch.cuda.current_stream().wait_stream(self._stream)
            # Threads of connectors may go on: only this thread's calls are looked at.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                run()
        replay: Callable[[], None] = graph.replay
        return replay
