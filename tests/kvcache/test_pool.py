"""The reference pool passes the suite that comes with the library, events included."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from pdcore import LRUBlockPool
from pdcore.errors import BlockMisuse
from pdcore.testing import block_pool_machine

TestLRUBlockPool = block_pool_machine(
    partial(LRUBlockPool, enable_events=True), with_events=True
).TestCase


@pytest.mark.parametrize("n", [-1, 2.5, np.float64(2), "2", None])
def test_a_number_of_blocks_that_is_none_is_refused(n: Any) -> None:
    """The pool is unchanged."""
    pool = LRUBlockPool(np.int64(9), np.int64(4))
    with pytest.raises(BlockMisuse, match="how many blocks"):
        pool.allocate(n)
    pool.check()
    assert pool.num_free_blocks == 8
