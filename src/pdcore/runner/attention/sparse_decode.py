"""Decodes on a CPU as two sparse products, which read keys and values where they lie.

Each query head is a row, and each KV head of each slot is a column. Scores are the product of
queries and keys, formed only where a row sees a column (a sampled dense-dense product); results are
the sums of those columns' values by weight. So nothing has to be gathered first.
"""

from __future__ import annotations

import warnings

import attrs
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["SparseDecodes", "silence_sparse_notice"]


@attrs.frozen(kw_only=True, eq=False)
class SparseDecodes:
    """What the decodes of a group see.

    Args:
        bias: float32 CSR (n * num_heads, num_columns): 0 where a row sees a column, and -inf where
            its entry is padding. All rows have the same number of entries.
        columns: int64, the columns of all entries, row by row.
        starts: int64 (n * num_heads,), where each row's entries begin.
    """

    bias: Tensor
    columns: Tensor
    starts: Tensor

    @classmethod
    def plan(
        cls,
        slots: Tensor,
        is_unseen: npt.NDArray[np.bool_],
        *,
        num_heads: int,
        num_kv_heads: int,
        num_columns: int,
    ) -> SparseDecodes:
        """Lay out a group.

        Args:
            slots: int64 (n, width), the slots of each sequence.
            is_unseen: bool (n, width), which of them it must not see; it sees one at least.
            num_heads, num_kv_heads: of the model.
            num_columns: how many rows keys and values will have.
        """
        slots = _without_unseen(slots, is_unseen)
        num_rows, width = slots.shape[0] * num_heads, slots.shape[1]
        kv_heads = torch.arange(num_heads) // (num_heads // num_kv_heads)
        columns = (slots[:, None] * num_kv_heads + kv_heads[:, None]).flatten()
        starts = torch.arange(0, columns.numel() + 1, width)
        bias = torch.zeros(is_unseen.shape).masked_fill_(torch.from_numpy(is_unseen), -torch.inf)
        entries = bias.repeat_interleave(num_heads, dim=0).flatten()
        size = (num_rows, num_columns)
        return cls(
            bias=torch.sparse_csr_tensor(starts, columns, entries, size, check_invariants=False),
            columns=columns,
            starts=starts[:-1],
        )

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, *, scale: float, shared: Tensor | None
    ) -> Tensor:
        """Attend to each sequence's own slots and to those that all share, in one softmax.

        Args:
            query: float32 (n, num_heads, head_dim), contiguous.
            keys, values: float32 (num_columns, head_dim), contiguous; KV heads of a slot adjoin.
            scale: what products are multiplied by.
            shared: float32 (2, p, num_kv_heads, head_dim), keys and values of p shared slots.

        Returns:
            (n, num_heads, head_dim).
        """
        count, num_heads, head_dim = query.shape
        rows = query.view(-1, head_dim)
        sampled = torch.sparse.sampled_addmm(self.bias, rows, keys.t(), alpha=scale)
        scores = sampled.values().view(count, num_heads, -1)
        if shared is None:
            return self._sum(torch.softmax(scores, dim=-1), values).view(query.shape)
        shared_keys, shared_values = shared.transpose(1, 2)
        shared_scores = _by_kv_head(query, shared_keys.transpose(1, 2)).mul_(scale)
        weights = torch.softmax(torch.cat((shared_scores, scores), dim=-1), dim=-1)
        num_shared = shared_scores.shape[-1]
        seen = self._sum(weights[..., num_shared:], values).view(query.shape)
        return seen.add_(_by_kv_head(weights[..., :num_shared], shared_values))

    def _sum(self, weights: Tensor, values: Tensor) -> Tensor:
        summed: Tensor = torch.embedding_bag(
            values, self.columns, self.starts, mode=0, per_sample_weights=weights.flatten()
        )[0]
        return summed


def silence_sparse_notice() -> None:
    """Provoke, unheard, torch's one warning that sparse CSR tensors are a beta feature."""
    nothing = torch.zeros(0, dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor(torch.zeros(1, dtype=torch.int64), nothing, nothing, (0, 1))


def _without_unseen(slots: Tensor, is_unseen: npt.NDArray[np.bool_]) -> Tensor:
    """Put each row's last seen slot for those it must not see, which may hold NaN."""
    if not is_unseen.any():
        return slots
    last = is_unseen.shape[1] - 1 - is_unseen[:, ::-1].argmin(axis=1)
    return torch.where(
        torch.from_numpy(is_unseen), slots.gather(1, torch.from_numpy(last)[:, None]), slots
    )


def _by_kv_head(rows: Tensor, matrices: Tensor) -> Tensor:
    """Multiply (n, num_heads, a) by its KV head's (num_kv_heads, a, b): (n, num_heads, b)."""
    count, num_heads, size = rows.shape
    num_kv_heads = matrices.shape[0]
    grouped = rows.view(count, num_kv_heads, -1, size).transpose(0, 1)
    product = torch.bmm(grouped.reshape(num_kv_heads, -1, size), matrices)
    by_row = product.view(num_kv_heads, count, num_heads // num_kv_heads, -1).transpose(0, 1)
    return by_row.reshape(count, num_heads, -1)
