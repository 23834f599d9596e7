"""Prefix keys: equal for equal prefixes of one domain, and for nothing else."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pdcore.kvcache import KVCacheManager, LRUBlockPool, PrefixHasher, TokenSequence

names = st.none() | st.text(max_size=3)
tokens = st.lists(st.integers(0, 2), min_size=1, max_size=12)


def keys(
    hasher: PrefixHasher, prompt: list[int], salt: str | None, lora: str | None
) -> list[bytes]:
    manager = KVCacheManager(LRUBlockPool(8, 2), hasher=hasher)
    sequence = TokenSequence(np.array(prompt, np.int32), cache_salt=salt, lora=lora)
    manager.get_computed_blocks(sequence)
    return sequence.keys


@given(tokens, tokens, names, names, names, names)
def test_keys_are_equal_exactly_where_prefix_and_domain_are(
    one: list[int],
    other: list[int],
    salt: str | None,
    lora: str | None,
    other_salt: str | None,
    other_lora: str | None,
) -> None:
    """Two sequences share the keys of their common blocks, if salt and adapter are the same."""
    hasher = PrefixHasher(2, secret=b"s")
    first, second = keys(hasher, one, salt, lora), keys(hasher, other, other_salt, other_lora)
    assert len(first) == len(one) // 2
    same_domain = (salt, lora) == (other_salt, other_lora)
    for place, (a, b) in enumerate(zip(first, second, strict=False)):
        end = 2 * (place + 1)
        assert (a == b) == (same_domain and one[:end] == other[:end])


def test_keys_depend_on_the_secret() -> None:
    """Nobody without the secret can name a block; processes with one secret name it alike."""
    prompt = [1, 2, 3, 4]
    assert keys(PrefixHasher(2, secret=b"a"), prompt, None, None) == keys(
        PrefixHasher(2, secret=b"a"), prompt, None, None
    )
    assert keys(PrefixHasher(2), prompt, None, None) != keys(PrefixHasher(2), prompt, None, None)


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), max_size=8), tokens)
def test_a_sequence_grows_like_a_list_and_never_writes_to_the_prompt(
    runs: list[list[int]], prompt: list[int]
) -> None:
    """Slices are copies, keys of later blocks follow, and the prompt's array stays as it was."""
    array = np.array(prompt, np.int32)
    array.flags.writeable = False
    sequence, model = TokenSequence(array), list(prompt)
    for run in runs:
        early = sequence.slice(0, 1)
        sequence.append(np.array(run, np.int32))
        model += run
        assert sequence.slice(0, len(sequence)).tolist() == model
        assert early.tolist() == model[:1]
    assert array.tolist() == prompt
