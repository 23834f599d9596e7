"""Decode steps as captured graphs: launching one costs the host as much as launching a kernel.

A graph has one batch size, so a step is padded to the next size there is. The rows that fill it up
are nobody's: they write to the null block, and nobody reads what becomes of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import partial

import attrs
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdcore.checks import check_count
from pdcore.errors import ConfigError
from pdcore.runner.batch import BatchState
from pdcore.runner.graph_capture import GraphCapture
from pdcore.runner.staging import copy_into, send
from pdcore.runner.step import StepInputs, StepLayout

__all__ = ["ComputeLogits", "DecodeGraphs", "choose_graph_sizes"]

ComputeLogits = Callable[[StepInputs, Tensor], None]
"""``compute(inputs, logits)``: run the model over a step and write the logits of every token."""

_FINEST_STEP = 8


def choose_graph_sizes(sizes: tuple[int, ...] | None, max_num_seqs: int) -> tuple[int, ...]:
    """The batch sizes to capture, ascending.

    Args:
        sizes: a choice, in any order; empty for none. None takes 1, 2, 4, 8, then steps of 8 up to
            64, of 16 up to 128, of 32 up to 256, and so on up to ``max_num_seqs``.
        max_num_seqs: the most rows a step may have.

    Raises:
        ConfigError: a size is not a whole number from 1 to ``max_num_seqs``.
    """
    if sizes is None:
        return _default_sizes(max_num_seqs)
    if not isinstance(sizes, tuple | list):
        raise ConfigError(
            f"cuda_graph_sizes={sizes!r} must be batch sizes, such as (1, 8, 32); () captures none"
        )
    for size in sizes:
        check_count("cuda_graph_sizes", size)
        if size > max_num_seqs:
            raise ConfigError(
                f"cuda_graph_sizes={sizes!r} has {size}, but a step has at most "
                f"max_num_seqs={max_num_seqs} rows. Leave it out."
            )
    return tuple(sorted(set(sizes)))


def _default_sizes(max_num_seqs: int) -> tuple[int, ...]:
    sizes, size = [], 1
    while size < max_num_seqs:
        sizes.append(size)
        size += max(_FINEST_STEP, 1 << (size.bit_length() - 3)) if size >= _FINEST_STEP else size
    return (*sizes, max_num_seqs)


@attrs.frozen(kw_only=True, eq=False)
class _Graph:
    """A captured step: int64 (2, size) of rows and positions, and what runs it over them."""

    inputs: Tensor
    replay: Callable[[], None]


class DecodeGraphs:
    """Steps of nothing but decodes, from embedding to logits, captured once for each batch size.

    A graph reads two short columns, rows and positions, which a step brings to the device in one
    copy. Tokens and block tables it takes from where the worker keeps them.

    Args:
        state: the worker's rows; its buffers must stay where they are.
        compute: what to capture, over `BatchState.decode_inputs`.
        sizes: the batch sizes, ascending, at least one.
        vocab_size: of the logits.
        device: where all of it is.
    """

    def __init__(
        self,
        *,
        state: BatchState,
        compute: ComputeLogits,
        sizes: tuple[int, ...],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._state = state
        self._compute = compute
        self._sizes = sizes
        self._device = device
        # One for all graphs: of each step only the last one's logits are wanted.
        self._logits = torch.empty((sizes[-1], vocab_size), dtype=torch.float32, device=device)
        self._graphs: dict[int, _Graph] = {}

    def run_largest(self) -> None:
        """Run the largest size once, without a graph: it takes the memory that a graph will."""
        self._run(self._padding(self._sizes[-1]))

    def capture(self, graph_capture: GraphCapture) -> None:
        """Capture every size, the largest first.

        Raises:
            ConfigError: something in the step cannot be captured, or does not fit into memory.
        """
        for size in reversed(self._sizes):
            inputs = self._padding(size)
            try:
                replay = graph_capture.capture(partial(self._run, inputs))
            except RuntimeError as error:
                raise ConfigError(
                    f"a decode step of {size} rows could not be captured ({error}). Give the KV "
                    "cache less memory if there was none left, choose another attention backend, "
                    "or set cuda_graph_sizes=() to run without graphs."
                ) from error
            self._graphs[size] = _Graph(inputs=inputs, replay=replay)

    def fits(self, layout: StepLayout) -> bool:
        """Whether a step can be run here: decodes that draw alone, and not too many of them."""
        return layout.is_all_draws and layout.num_rows <= self._sizes[-1]

    def run(self, layout: StepLayout) -> Tensor:
        """Run a step that `fits`. It does not wait for the device.

        Returns:
            float32 (k, vocab_size), the logits of ``layout.sample_rows``; they may be overwritten,
            and are by the next call.
        """
        graph = self._graphs[self._sizes[bisect_left(self._sizes, layout.num_rows)]]
        copy_into(graph.inputs, self._padded(layout, graph.inputs.shape[1]))
        self._state.feed(layout)
        graph.replay()
        places = layout.sample_places
        if np.array_equal(places, np.arange(places.size)):
            return self._logits[: places.size]
        return self._logits.index_select(0, send(places, self._device))

    def _run(self, inputs: Tensor) -> None:
        rows, positions = inputs.unbind()
        step = self._state.decode_inputs(rows, positions)
        self._compute(step, self._logits[: inputs.shape[1]])

    def _padding(self, size: int) -> Tensor:
        inputs = torch.zeros((2, size), dtype=torch.int64, device=self._device)
        inputs[0] = self._state.padding_row
        return inputs

    def _padded(self, layout: StepLayout, size: int) -> npt.NDArray[np.int64]:
        columns = np.zeros((2, size), np.int64)
        columns[0] = self._state.padding_row
        columns[:, : layout.num_rows] = layout.rows, layout.num_computed
        return columns
