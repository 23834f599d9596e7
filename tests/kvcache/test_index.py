"""The map from keys to blocks, against lists."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from pdcore.kvcache.index import PrefixIndex

KEYS = [b"a", b"b", b"c"]


@given(st.randoms(use_true_random=False))
def test_it_is_a_list_of_blocks_for_each_key_whatever_is_undone(random: Random) -> None:
    """Blocks come and go in any order, and changes are taken back, the last one first."""
    index = PrefixIndex()
    expected: dict[bytes, list[int]] = {key: [] for key in KEYS}
    undo: list[tuple[Callable[[], None], dict[bytes, list[int]]]] = []
    next_block = 1
    for _ in range(random.randint(1, 30)):
        before = {key: list(blocks) for key, blocks in expected.items()}
        present = [(key, block) for key in KEYS for block in expected[key]]
        kind = random.choice(("add", "add", "remove", "undo"))
        if kind == "undo" and undo:
            take_back, expected = undo.pop()
            take_back()
        elif kind == "remove" and present:
            gone = random.sample(present, random.randint(1, len(present)))
            keys, blocks = [key for key, _ in gone], [block for _, block in gone]
            removed = index.remove(keys, blocks)
            for key, block in gone:
                expected[key].remove(block)
            undo.append((lambda k=keys, r=removed: index.restore(k, r), before))  # type: ignore[misc]
        else:
            keys = random.choices(KEYS, k=random.randint(1, 4))
            blocks = list(range(next_block, next_block + len(keys)))
            next_block += len(keys)
            index.add(keys, blocks)
            for key, block in zip(keys, blocks, strict=True):
                expected[key].append(block)
            undo.append((lambda k=keys, b=blocks: index.remove(k[::-1], b[::-1]), before))  # type: ignore[misc]
        assert {key: list(index.blocks(key)) for key in KEYS} == expected
        assert dict(index.items()) == {key: tuple(it) for key, it in expected.items() if it}
        known = [expected[key][0] for key in KEYS if expected[key]]
        found = [block for key in KEYS for block in index.lookup([key])]
        assert found == known


def test_a_key_of_many_blocks_is_not_copied_to_add_find_or_remove_one() -> None:
    """A prompt that comes again ten thousand times costs what it did the second time."""
    index = PrefixIndex()
    for block in range(1, 10_001):
        index.add([b"key"], [block])
    tracemalloc.start()
    try:
        for block in range(10_001, 10_005):
            index.add([b"key"], [block])
            assert index.lookup([b"key"]) == [block - 10_000]
            index.remove([b"key"], [block - 10_000])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8_000, f"{peak} bytes"
