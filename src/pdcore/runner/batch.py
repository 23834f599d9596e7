"""What a worker knows about every row, kept on the device between steps.

A decode step sends the plan's few numbers and the block-table changes. The input token of a decode
is the runner's own last drawn token, which never left the device, so a plan can be executed
before the host knows the tokens of the one before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdcore.messages import NewRequestData, RowError, SchedulerOutput
from pdcore.runner.attention.base import AttentionBatch
from pdcore.runner.row_blocks import RowBlocks
from pdcore.runner.sampler import SamplingBatch, derive_seed, uniform_draws
from pdcore.runner.staging import send
from pdcore.runner.step import StepInputs, StepLayout

__all__ = ["BatchState"]

Int32Array = npt.NDArray[np.int32]
_NO_EPOCH = -1


class BatchState:
    """Per-row state of one worker. All buffers are allocated once.

    Args:
        max_num_seqs: number of rows.
        max_model_len: tokens of one row, at most.
        block_size: tokens in a block.
        sliding_window: how many tokens back every layer sees, itself included; None means all.
        vocab_size: ids at or above it make their row fail.
        device: where the model runs.
        seed: what the seeds of requests without one are derived from.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        sliding_window: int | None,
        vocab_size: int,
        device: torch.device,
        seed: int,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._device = device
        self._seed = seed
        self._known_tokens: list[Int32Array | None] = [None] * max_num_seqs
        self._faults: dict[int, str] = {}
        self._epochs = np.full(max_num_seqs, _NO_EPOCH, np.int32)
        self._num_known = np.zeros(max_num_seqs, np.int32)
        self._num_tokens = np.zeros(max_num_seqs, np.int32)
        self._seeds = np.zeros(max_num_seqs, np.uint64)
        self._is_random = np.zeros(max_num_seqs, np.bool_)
        self._num_ordered = np.zeros(max_num_seqs, np.int64)
        self._has_min_p = np.zeros(max_num_seqs, np.bool_)
        self._blocks = RowBlocks(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_size=block_size,
            sliding_window=sliding_window,
        )

        # One row more than there are: nobody's, whose table names the null block alone.
        self.padding_row = max_num_seqs
        num_rows = max_num_seqs + 1
        self.max_num_blocks = self._blocks.width
        self.block_table = torch.zeros(
            (num_rows, self.max_num_blocks), dtype=torch.int32, device=device
        )
        self.last_token = torch.zeros(num_rows, dtype=torch.int64, device=device)
        # temperature, top-p and min-p share a matrix, so that starting rows is one copy.
        self._filters = torch.zeros((max_num_seqs, 3), dtype=torch.float32, device=device)
        self._top_k = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._all_greedy = SamplingBatch.all_greedy(device)

    def apply(self, output: SchedulerOutput, *, num_blocks: int) -> None:
        """Take in a plan's changes: rows given up, then rows started, then block tables.

        Args:
            output: the plan, whose columns fit.
            num_blocks: how many blocks the KV cache has; rows that are told of others fail.
        """
        self._drop(output.finished_rows)
        if output.scheduled_new_reqs:
            self._start(output.scheduled_new_reqs, num_blocks)
        if output.block_rows.size:
            faults = self._blocks.change(
                output.block_rows, output.block_positions, output.block_ids, num_blocks
            )
            if faults:
                self._faults = faults | self._faults
            rows, positions, blocks = self._send(
                output.block_rows, output.block_positions, output.block_ids
            )
            self.block_table[rows, positions] = blocks.to(torch.int32)

    def lay_out(self, output: SchedulerOutput) -> StepLayout:
        """Lay out a plan's tokens, once for each plan, after `apply`.

        Rows that cannot run become errors.
        """
        errors, is_healthy = self._find_errors(output)
        sampled = is_healthy & output.samples
        place = self._order(output, is_healthy)
        rows, num_scheduled = output.rows[place], output.num_scheduled_tokens[place]
        num_computed = output.num_computed_tokens[place]
        last_token = np.zeros(output.rows.size, np.int64)
        last_token[place] = np.cumsum(num_scheduled, dtype=np.int64) - 1
        end = output.num_computed_tokens + output.num_scheduled_tokens
        return StepLayout(
            rows=rows,
            num_computed=num_computed,
            num_scheduled=num_scheduled,
            num_decodes=int((num_scheduled == 1).sum()),
            num_device_fed=int((num_computed >= self._num_known[rows]).sum()),
            sample_places=last_token[sampled],
            sample_rows=output.rows[sampled],
            sample_epochs=output.epochs[sampled],
            draw_positions=end[sampled].astype(np.int64),
            errors=errors,
        )

    def inputs(self, layout: StepLayout) -> StepInputs:
        """Bring a step to the device."""
        counts = layout.num_scheduled
        cu_seqlens = np.zeros(counts.size + 1, np.int32)
        np.cumsum(counts, out=cu_seqlens[1:])
        position = np.repeat(layout.num_computed - cu_seqlens[:-1], counts)
        position += np.arange(position.size, dtype=np.int32)
        rows, token_rows, positions, places = self._send(
            layout.rows, np.repeat(layout.rows, counts), position, layout.sample_places
        )
        return StepInputs(
            token_ids=self._token_ids(layout, rows),
            positions=positions,
            attention=self._attention(layout, rows, token_rows, positions, cu_seqlens),
            sample_tokens=places,
        )

    def decode_inputs(self, rows: Tensor, positions: Tensor) -> StepInputs:
        """A step of one token for each row, made of what is on the device alone.

        It enqueues the same work whatever the two tensors hold, so it may be captured in a graph.
        `padding_row` at position 0 fills places that no row needs. The lengths that the host is
        told are the longest that may come.

        Args:
            rows, positions: int64 (n,) on the device. Inputs are the rows' `last_token`.
        """
        count = rows.shape[0]
        tables = self.block_table.index_select(0, rows)
        columns = positions // self._block_size
        longest = tables.shape[1] * self._block_size
        return StepInputs(
            token_ids=self.last_token.index_select(0, rows),
            positions=positions,
            attention=AttentionBatch(
                num_decodes=count,
                query_lens=np.ones(count, np.int32),
                seq_lens=np.full(count, longest, np.int32),
                cu_seqlens=torch.arange(count + 1, dtype=torch.int32, device=self._device),
                device_seq_lens=(positions + 1).to(torch.int32),
                block_tables=tables,
                slot_blocks=tables.gather(1, columns[:, None])[:, 0].to(torch.int64),
                slot_offsets=positions - columns * self._block_size,
            ),
            sample_tokens=None,
        )

    def feed(self, layout: StepLayout) -> None:
        """Make the tokens of decodes that the host knows their rows' `last_token`.

        So a prompt's last token is read from where drawn ones are. Nobody misses what was there: a
        row that still has tokens on the host is not fed by a draw before its next one.
        """
        first = layout.num_device_fed
        if first == layout.num_rows:
            return
        rows, tokens = self._send(layout.rows[first:], self._known(layout))
        self.last_token.index_copy_(0, rows, tokens)

    def sampling(self, step: StepLayout) -> SamplingBatch:
        """How the step's sampling rows draw, in the order of ``step.sample_rows``."""
        rows = step.sample_rows
        random = np.flatnonzero(self._is_random[rows])
        if not random.size:
            return self._all_greedy
        random_rows = rows[random]
        draws = uniform_draws(self._seeds[random_rows], step.draw_positions[random])
        (device_rows,) = self._send(random_rows)
        filters = self._filters.index_select(0, device_rows)
        return SamplingBatch(
            random=None if random.size == rows.size else self._send(random)[0],
            num_random=int(random.size),
            draws=send(draws, self._device),
            temperature=filters[:, 0],
            top_p=filters[:, 1],
            min_p=filters[:, 2],
            top_k=self._top_k.index_select(0, device_rows),
            num_ordered=int(self._num_ordered[random_rows].max(initial=0)),
            has_min_p=bool(self._has_min_p[random_rows].any()),
        )

    def remember(self, rows: Int32Array, token_ids: Tensor) -> None:
        """Keep the tokens just drawn as the next inputs of their rows. They stay on the device."""
        self._num_tokens[rows] += 1
        self.last_token.index_copy_(0, self._send(rows)[0], token_ids)

    def epochs(self, rows: Int32Array) -> Int32Array:
        """Which tenancy each row is in."""
        return self._epochs[rows]

    def _drop(self, rows: Int32Array) -> None:
        self._epochs[rows] = _NO_EPOCH
        for row in rows.tolist():
            self._known_tokens[row] = None
            self._faults.pop(row, None)

    def _start(self, requests: Sequence[NewRequestData], num_blocks: int) -> None:
        rows = np.array([request.row for request in requests], np.int32)
        tables = np.zeros((rows.size, self.block_table.shape[1]), np.int32)
        for index, request in enumerate(requests):
            fault = self._blocks.start(request, num_blocks) or self._fault_of(request)
            self._faults.pop(request.row, None)
            if fault is not None:
                self._faults[request.row] = fault
            else:
                tables[index, : request.block_ids.size] = request.block_ids
            self._known_tokens[request.row] = request.token_ids
        self._start_host_columns(rows, requests)
        (device_rows,) = self._send(rows)
        self.block_table[device_rows] = send(tables, self._device)
        sampling = [request.sampling for request in requests]
        filters = np.array([(s.temperature, s.top_p, s.min_p) for s in sampling])
        with np.errstate(over="ignore"):  # a temperature may be beyond float32
            self._filters[device_rows] = send(filters.astype(np.float32), self._device)
        self._top_k[device_rows] = self._send(np.array([s.top_k for s in sampling], np.int64))[0]

    def _start_host_columns(self, rows: Int32Array, requests: Sequence[NewRequestData]) -> None:
        sampling = [request.sampling for request in requests]
        self._epochs[rows] = [request.epoch for request in requests]
        self._num_known[rows] = [request.token_ids.size for request in requests]
        self._num_tokens[rows] = self._num_known[rows]
        self._is_random[rows] = [s.temperature > 0 for s in sampling]
        self._num_ordered[rows] = [
            s.top_k or (self._vocab_size if s.top_p < 1 else 0) for s in sampling
        ]
        self._has_min_p[rows] = [s.min_p > 0 for s in sampling]
        self._seeds[rows] = [
            derive_seed(self._seed, request.uid) if s.seed is None else s.seed
            for request, s in zip(requests, sampling, strict=True)
        ]

    def _fault_of(self, request: NewRequestData) -> str | None:
        ids = request.token_ids
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocab_size:
            return (
                f"token ids span {ids.min()}..{ids.max()}, but the model's vocabulary is "
                f"0..{self._vocab_size - 1}"
            )
        return None

    def _find_errors(
        self, output: SchedulerOutput
    ) -> tuple[tuple[RowError, ...], npt.NDArray[np.bool_]]:
        rows, first = output.rows, output.num_computed_tokens
        end = first + output.num_scheduled_tokens
        num_tokens = self._num_tokens[rows]
        is_known = self._epochs[rows] == output.epochs
        # Tokens that were drawn exist only on the device, and only the last of them is kept.
        is_fed = (end <= self._num_known[rows]) | ((first == num_tokens - 1) & (end == num_tokens))
        # Without a sign, what is negative, or was too large, is beyond all that a row has.
        stop = end.view(np.uint32)
        is_healthy = is_known & is_fed & (first.view(np.uint32) < stop)
        is_healthy &= stop <= self._blocks.num_slots[rows].view(np.uint32)
        for row in self._faults:
            is_healthy &= rows != row
        if is_healthy.all():
            return (), is_healthy
        errors = tuple(
            RowError(row=row, epoch=epoch, cause=self._cause(row, epoch, begin, stop))
            for row, epoch, begin, stop in zip(
                *(column[~is_healthy].tolist() for column in (rows, output.epochs, first, end)),
                strict=True,
            )
        )
        return errors, is_healthy

    def _cause(self, row: int, epoch: int, first: int, end: int) -> str:
        if self._epochs[row] != epoch:
            return f"row {row} was not started for epoch {epoch} on this worker"
        if row in self._faults:
            return self._faults[row]
        if end > self._max_model_len:
            return f"tokens up to {end} were scheduled, over the model length {self._max_model_len}"
        if first < 0 or end <= first:
            return f"{end - first} tokens from position {first} were scheduled: expected 1, from 0"
        if end > self._blocks.num_slots[row]:
            return (
                f"tokens up to {end} were scheduled, but the row has blocks for "
                f"{self._blocks.num_slots[row]}"
            )
        return (
            f"tokens {first}..{end - 1} were scheduled, but the worker knows "
            f"{self._num_known[row]} and has drawn up to {self._num_tokens[row]}"
        )

    def _order(
        self, output: SchedulerOutput, is_healthy: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.intp]:
        """The places in the plan of the rows that run, in the order in which they do."""
        place = np.flatnonzero(is_healthy)
        is_known = output.num_computed_tokens[place] < self._num_known[output.rows[place]]
        if not is_known.any():
            return place
        is_chunk = output.num_scheduled_tokens[place] != 1
        return place[np.argsort(is_known * np.int8(1) + is_chunk, kind="stable")]

    def _token_ids(self, layout: StepLayout, rows: Tensor) -> Tensor:
        device_fed = self.last_token.index_select(0, rows[: layout.num_device_fed])
        if layout.num_device_fed == layout.num_rows:
            return device_fed
        return torch.cat((device_fed, self._send(self._known(layout))[0]))

    def _known(self, layout: StepLayout) -> Int32Array:
        """The tokens of rows that the device does not feed."""
        host_fed = slice(layout.num_device_fed, None)
        pieces = []
        for row, first, count in zip(
            layout.rows[host_fed].tolist(),
            layout.num_computed[host_fed].tolist(),
            layout.num_scheduled[host_fed].tolist(),
            strict=True,
        ):
            known = self._known_tokens[row]
            assert known is not None  # a row without tokens was sorted out as an error
            pieces.append(known[first : first + count])
        return np.concatenate(pieces)

    def _attention(
        self,
        layout: StepLayout,
        rows: Tensor,
        token_rows: Tensor,
        positions: Tensor,
        cu_seqlens: Int32Array,
    ) -> AttentionBatch:
        seq_lens = layout.num_computed + layout.num_scheduled
        width = -(-int(seq_lens.max(initial=0)) // self._block_size)
        columns = positions // self._block_size
        return AttentionBatch(
            num_decodes=layout.num_decodes,
            query_lens=layout.num_scheduled,
            seq_lens=seq_lens,
            cu_seqlens=send(cu_seqlens, self._device),
            device_seq_lens=send(seq_lens, self._device),
            block_tables=self.block_table[:, :width].index_select(0, rows),
            slot_blocks=self.block_table[token_rows, columns].to(torch.int64),
            slot_offsets=positions - columns * self._block_size,
        )

    def _send(self, *arrays: npt.NDArray[np.integer]) -> tuple[Tensor, ...]:
        """Bring integer arrays to the device as int64, in one copy."""
        on_device = send(np.concatenate(arrays, dtype=np.int64), self._device)
        return torch.split(on_device, [array.size for array in arrays])
