"""`References`: counts by block, with the null block outside all counting."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.errors import BlockMisuse
from pdcore.kvcache.references import References

NUM_BLOCKS = 6
MENTIONS = st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=8)


@given(st.lists(st.tuples(st.sampled_from(["add", "drop"]), MENTIONS), max_size=12))
def test_counts_are_those_of_a_counter(calls: list[tuple[str, list[int]]]) -> None:
    """Each mention counts; a call that drops too much changes nothing; block 0 never counts."""
    references, expected = References(NUM_BLOCKS), Counter[int]()
    for method, blocks in calls:
        at, mentions = np.array(blocks, np.intp), Counter(block for block in blocks if block)
        if method == "add":
            references.add(at)
            expected += mentions
        elif all(expected[block] >= number for block, number in mentions.items()):
            loose = references.drop(at)
            expected.subtract(mentions)
            ends = [place for place, block in enumerate(blocks) if block not in blocks[place + 1 :]]
            assert np.flatnonzero(loose).tolist() == [
                place for place in ends if blocks[place] and not expected[blocks[place]]
            ]
        else:
            with pytest.raises(BlockMisuse):
                references.drop(at)
        assert references.is_consistent()
        counts = references.counts[1:].tolist()
        assert counts == [expected[block] for block in range(1, NUM_BLOCKS)]
