"""The order in which scattered blocks are read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.connector.nixl.blocks import merge_order, num_runs


def pairs_of(local: list[int], remote: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Two columns of block ids."""
    return np.array(local, dtype=np.int32), np.array(remote, dtype=np.int32)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=30))
def test_pairs_stay_together(pairs: list[tuple[int, int]]) -> None:
    """Sorting changes the order of pairs, never a pair."""
    local, remote = merge_order(*pairs_of([a for a, _ in pairs], [b for _, b in pairs]))
    assert sorted(zip(local.tolist(), remote.tolist(), strict=True)) == sorted(pairs)
    assert remote.tolist() == sorted(b for _, b in pairs)
    assert local.dtype == remote.dtype == np.int32


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=30))
def test_runs_are_counted_as_one_would(pairs: list[tuple[int, int]]) -> None:
    """A run ends wherever either side jumps."""
    expected = 0
    for i, (a, b) in enumerate(pairs):
        if i == 0 or (a, b) != (pairs[i - 1][0] + 1, pairs[i - 1][1] + 1):
            expected += 1
    assert num_runs(*pairs_of([a for a, _ in pairs], [b for _, b in pairs])) == expected


@pytest.mark.parametrize(
    ("local", "remote", "expected"),
    [
        ([1, 2, 3], [7, 8, 9], 1),
        ([3, 2, 1], [9, 8, 7], 1),
        ([1, 2, 3], [9, 8, 7], 3),
        ([1, 2, 5], [7, 8, 9], 2),
        ([], [], 0),
    ],
)
def test_tables_that_run_downwards_merge_too(
    local: list[int], remote: list[int], expected: int
) -> None:
    """Blocks adjacent on both sides become one piece, whichever way the table runs."""
    assert num_runs(*merge_order(*pairs_of(local, remote))) == expected
