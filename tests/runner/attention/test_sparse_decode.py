"""Decodes as sparse products: what they read, and what they leave alone."""

from __future__ import annotations

import numpy as np
import torch

from pdcore.runner.attention.sparse_decode import SparseDecodes


def test_slots_are_read_where_they_lie_and_no_others() -> None:
    """Scattered slots in a sea of NaN, with padding before and behind, give plain attention."""
    generator = torch.Generator().manual_seed(0)
    num_heads, num_kv_heads, head_dim, num_slots = 6, 2, 8, 40
    keys_values = torch.full((2, num_slots, num_kv_heads, head_dim), torch.nan)
    slots = torch.tensor([[31, 4, 17, 9], [2, 22, 30, 6]])
    is_unseen = np.array([[True, False, False, False], [False, False, True, True]])
    seen = [[4, 17, 9], [2, 22]]
    for slot in (4, 17, 9, 2, 22):
        keys_values[:, slot] = torch.randn(2, num_kv_heads, head_dim, generator=generator)
    query = torch.randn(2, num_heads, head_dim, generator=generator)
    decodes = SparseDecodes.plan(
        slots,
        is_unseen,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        num_columns=num_slots * num_kv_heads,
    )
    keys, values = keys_values.flatten(1, 2)
    attended = decodes.attend(query, keys, values, scale=0.3, shared=None)
    for row, own in enumerate(seen):
        for head in range(num_heads):
            key, value = keys_values[:, own, head // 3].double()
            weights = torch.softmax(key @ query[row, head].double() * 0.3, dim=0)
            torch.testing.assert_close(attended[row, head].double(), weights @ value)
