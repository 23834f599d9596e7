"""KV memory whose slots hold chain hashes, and the attention that checks them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pdcore.testing.chain import OMITTED, POISON
from pdcore.testing.errors import PlanError, StaleKV
from pdcore.testing.fake_rows import Span

__all__ = ["FakeKVMemory"]


class FakeKVMemory:
    """One uint64 slot for each token of each block.

    Args:
        num_blocks: how many blocks, the null block included.
        block_size: tokens in a block.
        sliding_window: how many tokens back a token sees, itself included; None means all.

    Attributes:
        slots: uint64 (num_blocks, block_size). Poison until it is written.
    """

    def __init__(
        self, *, num_blocks: int, block_size: int, sliding_window: int | None = None
    ) -> None:
        self.slots = np.full((num_blocks, block_size), POISON, dtype=np.uint64)
        self._block_size = block_size
        self._sliding_window = sliding_window
        # Who wrote to each block last, for error messages. -1 means no row ever did.
        self._last_steps = np.full(num_blocks, -1, dtype=np.int64)
        self._last_uids = np.full(num_blocks, -1, dtype=np.int64)

    def write(self, step_id: int, spans: list[Span]) -> None:
        """Store the chain hash of every scheduled token.

        Raises:
            PlanError: a token falls into the null block, or two tokens into one slot.
        """
        if not spans:
            return
        indices = [self._slot_indices(span) for span in spans]
        flat = np.concatenate(indices)
        if np.unique(flat).size != flat.size:
            raise PlanError(self._describe_clash(step_id, spans, indices))
        self.slots.reshape(-1)[flat] = np.concatenate(
            [span.row.chain.hashes[span.start : span.stop] for span in spans]
        )
        blocks = flat // self._block_size
        self._last_steps[blocks] = step_id
        self._last_uids[blocks] = np.repeat(
            [span.row.uid for span in spans], [index.size for index in indices]
        )

    def omit(self, spans: list[Span]) -> None:
        """Leave out tokens of rows that fail, whose slots hold nothing of use from now on."""
        for span in spans:
            self.slots.reshape(-1)[self._slot_indices(span)] = OMITTED

    def attend(self, step_id: int, span: Span) -> str | None:
        """Check every slot that the span's tokens see against the chain of its row.

        Returns:
            Why the row fails as well, if it sees what another one left out, or None. A plan that
            was made ahead of that result may share such blocks; one made after it may not.

        Raises:
            PlanError: the null block stands where a token looks.
            StaleKV: a slot does not hold what this row's prefix would have put there.
        """
        first = self._first_visible(span)
        first_block, stop_block = first // self._block_size, -(-span.stop // self._block_size)
        blocks = span.row.block_table[first_block:stop_block]
        if not blocks.all():
            hole = first_block + int(np.flatnonzero(blocks == 0)[0])
            raise PlanError(
                f"step {step_id}, {span.row.name} reads the null block at block table position "
                f"{hole}: the tokens it sees start at position {first}"
            )
        offset = first_block * self._block_size
        found = self.slots[blocks].reshape(-1)[first - offset : span.stop - offset]
        expected = span.row.chain.hashes[first : span.stop]
        if not np.array_equal(found, expected):
            index = int(np.flatnonzero(found != expected)[0])
            if found[index] == OMITTED:
                return f"position {first + index} of its prefix was left to a row that failed"
            raise StaleKV(self._describe_stale(step_id, span, first + index, found[index]))
        return None

    def _first_visible(self, span: Span) -> int:
        if self._sliding_window is None:
            return 0
        return max(0, span.start - self._sliding_window + 1)

    def _slot_indices(self, span: Span) -> npt.NDArray[np.int64]:
        positions = np.arange(span.start, span.stop, dtype=np.int64)
        blocks = span.row.block_table[positions // self._block_size].astype(np.int64)
        if not blocks.all():
            position = int(positions[blocks == 0][0])
            raise PlanError(f"{span.row.name} writes position {position} to the null block")
        return blocks * self._block_size + positions % self._block_size

    def _describe_clash(
        self, step_id: int, spans: list[Span], indices: list[npt.NDArray[np.int64]]
    ) -> str:
        owners: dict[int, str] = {}
        for span, index in zip(spans, indices, strict=True):
            for slot in index.tolist():
                if slot in owners:
                    return (
                        f"step {step_id}: {owners[slot]} and {span.row.name} both write slot "
                        f"{slot % self._block_size} of block {slot // self._block_size}"
                    )
                owners[slot] = span.row.name
        return f"step {step_id}: two rows write one slot"

    def _describe_stale(self, step_id: int, span: Span, position: int, value: np.uint64) -> str:
        block = int(span.row.block_table[position // self._block_size])
        what = "was never written" if value == POISON else "holds a foreign chain"
        writer, writer_step = int(self._last_uids[block]), int(self._last_steps[block])
        last = "no row ever wrote to the block"
        if writer >= 0:
            last = f"the last row to write to the block was uid {writer} in step {writer_step}"
        return (
            f"step {step_id}, {span.row.name} reads position {position} in slot "
            f"{position % self._block_size} of block {block}, which {what}; {last}"
        )
