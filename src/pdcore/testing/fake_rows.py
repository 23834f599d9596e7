"""What a worker knows of its rows, and the checks that every plan must pass."""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt

from pdcore.messages import NewRequestData, SchedulerOutput
from pdcore.testing.chain import Chain, chain_seed
from pdcore.testing.errors import PlanError

__all__ = ["FakeRow", "FakeRows", "Span"]

Int32Array = npt.NDArray[np.int32]


@attrs.define(eq=False)
class FakeRow:
    """One row's tenant: its tokens with their chain hashes, and its block table."""

    row: int
    epoch: int
    uid: int
    request_id: str
    chain: Chain
    num_computed_tokens: int
    block_table: Int32Array
    """int32; entries past ``num_table_blocks`` are spare room."""
    num_table_blocks: int

    @classmethod
    def start(cls, new: NewRequestData) -> FakeRow:
        seed = chain_seed(cache_salt=new.cache_salt, lora=new.lora)
        return cls(
            row=new.row,
            epoch=new.epoch,
            uid=new.uid,
            request_id=new.request_id,
            chain=Chain(seed, new.token_ids),
            num_computed_tokens=new.num_computed_tokens,
            block_table=new.block_ids.astype(np.int32),
            num_table_blocks=new.block_ids.size,
        )

    @property
    def name(self) -> str:
        return f"request {self.request_id!r} (uid {self.uid}, row {self.row}, epoch {self.epoch})"

    def set_block(self, position: int, block_id: int) -> None:
        """Change one table entry; the table grows as needed, and gaps are the null block."""
        if position >= self.block_table.size:
            room = np.zeros(max(8, 2 * position + 2), dtype=np.int32)
            room[: self.num_table_blocks] = self.block_table[: self.num_table_blocks]
            self.block_table = room
        self.block_table[position] = block_id
        self.num_table_blocks = max(self.num_table_blocks, position + 1)


@attrs.frozen(eq=False)
class Span:
    """The tokens of one row that a step computes: positions ``start`` to ``stop - 1``."""

    row: FakeRow
    start: int
    stop: int
    samples: bool


class FakeRows:
    """Every row's tenant. Trusts nothing in a plan that it can check for itself.

    Args:
        num_blocks: size of the KV memory; block ids must lie below it.
        block_size: tokens in a block.
    """

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._rows: dict[int, FakeRow] = {}
        self._last_tenancies: dict[int, tuple[int, int]] = {}
        self._last_step = -1

    def apply(self, output: SchedulerOutput) -> None:
        """Apply a plan's changes: rows given up, rows started or told afresh, block tables.

        Raises:
            PlanError: the plan was applied before, or does not fit what is known of a row.
        """
        if output.step_id <= self._last_step:
            raise PlanError(
                f"step {output.step_id} comes after step {self._last_step}: each plan runs once, "
                "in the order in which plans were made"
            )
        self._last_step = output.step_id
        for row in output.finished_rows.tolist():
            # Told twice when a plan that may have reached the worker was abandoned.
            self._rows.pop(row, None)
        for new in output.scheduled_new_reqs:
            self._start(new)
        changes = zip(
            output.block_rows.tolist(),
            output.block_positions.tolist(),
            output.block_ids.tolist(),
            strict=True,
        )
        for row, position, block_id in changes:
            self._set_block(row, position, block_id)

    def spans(self, output: SchedulerOutput) -> list[Span]:
        """What the plan computes, in its order.

        Raises:
            PlanError: the plan contradicts itself or what is known of a row.
        """
        columns = (
            output.rows,
            output.epochs,
            output.num_computed_tokens,
            output.num_scheduled_tokens,
            output.samples,
        )
        sizes = {column.shape for column in columns}
        if len(sizes) != 1:
            raise PlanError(f"the columns of step {output.step_id} have shapes {sizes}")
        if np.unique(output.rows).size != output.rows.size:
            raise PlanError(f"step {output.step_id} names a row twice: {output.rows.tolist()}")
        lines = zip(*(column.tolist() for column in columns), strict=True)
        return [self._span(output.step_id, *line) for line in lines]

    def _start(self, new: NewRequestData) -> None:
        tenant = self._rows.get(new.row)
        row = FakeRow.start(new)
        if tenant is not None and tenant.uid != new.uid:
            raise PlanError(f"row {new.row} is given to {row.name} and still has {tenant.name}")
        # A request told afresh may keep its epoch; one that gets another's row may not.
        last_epoch, last_uid = self._last_tenancies.get(new.row, (-1, -1))
        least = last_epoch + (last_uid != new.uid)
        if new.epoch < least:
            raise PlanError(f"{row.name} starts with an old epoch: expected at least {least}")
        covered = row.num_table_blocks * self._block_size
        if not 0 <= new.num_computed_tokens <= min(covered, len(row.chain)):
            raise PlanError(
                f"{row.name} starts with num_computed_tokens={new.num_computed_tokens}, with "
                f"{len(row.chain)} tokens and room for {covered} in its blocks"
            )
        self._check_block_ids(row, new.block_ids)
        self._last_tenancies[new.row] = (new.epoch, new.uid)
        self._rows[new.row] = row

    def _set_block(self, row: int, position: int, block_id: int) -> None:
        tenant = self._rows.get(row)
        if tenant is None:
            raise PlanError(f"the block table of row {row} changes, but nobody has that row")
        if position < 0:
            raise PlanError(f"{tenant.name}: block table position {position} is negative")
        self._check_block_ids(tenant, np.array([block_id]))
        tenant.set_block(position, block_id)

    def _check_block_ids(self, row: FakeRow, block_ids: npt.NDArray[np.integer]) -> None:
        bad = block_ids[(block_ids < 0) | (block_ids >= self._num_blocks)]
        if bad.size:
            raise PlanError(
                f"{row.name}: blocks {bad.tolist()} are outside 0..{self._num_blocks - 1}"
            )

    def _span(
        self, step_id: int, row: int, epoch: int, start: int, num_scheduled: int, samples: bool
    ) -> Span:
        tenant = self._rows.get(row)
        if tenant is None:
            raise PlanError(f"step {step_id} runs row {row}, which nobody has")
        stop, num_known = start + num_scheduled, len(tenant.chain)
        room = tenant.num_table_blocks * self._block_size
        fault = ""
        if epoch != tenant.epoch:
            fault = f"the plan means epoch {epoch}"
        elif num_scheduled < 1:
            fault = f"num_scheduled_tokens={num_scheduled}"
        elif start != tenant.num_computed_tokens:
            fault = (
                f"the plan says num_computed_tokens={start}, the worker computed "
                f"{tenant.num_computed_tokens}"
            )
        elif stop > num_known:
            fault = f"the plan ends at position {stop - 1} and only {num_known} tokens are known"
        elif samples != (stop == num_known):
            fault = f"the plan says samples={samples}, with {stop} of {num_known} tokens computed"
        elif stop > room:
            fault = f"the plan ends at position {stop - 1} and the blocks have room for {room}"
        if fault:
            raise PlanError(f"step {step_id}, {tenant.name}: {fault}")
        return Span(tenant, start, stop, samples)
