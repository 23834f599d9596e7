"""Prefix keys: equal for equal prefixes of one domain, and for nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcore.errors import ConfigError
from pdcore.kvcache import KVCacheManager, LRUBlockPool, PrefixHasher, TokenSequence

SECRET = b"the same for all of them"

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
    hasher = PrefixHasher(2, secret=SECRET)
    first, second = keys(hasher, one, salt, lora), keys(hasher, other, other_salt, other_lora)
    assert len(first) == len(one) // 2
    same_domain = (salt, lora) == (other_salt, other_lora)
    for place, (a, b) in enumerate(zip(first, second, strict=False)):
        end = 2 * (place + 1)
        assert (a == b) == (same_domain and one[:end] == other[:end])


@given(
    st.lists(st.integers(0, 2**31 - 1), min_size=0, max_size=40),
    st.integers(1, 4),
    st.data(),
)
def test_keys_are_the_same_however_they_are_computed(
    prompt: list[int], block_size: int, data: st.DataObject
) -> None:
    """In one run, in two, or one by one beside other sequences: and as the formula says."""
    hasher = PrefixHasher(block_size, secret=SECRET)
    array, root = np.array(prompt, np.int32), hasher.root(None, None)
    num_blocks = len(prompt) // block_size
    whole = hasher.chain(root, array, start=0)
    assert whole == formula(hasher, array, root)
    cut = data.draw(st.integers(0, num_blocks))
    first = hasher.chain(root, array[: cut * block_size], start=0)
    rest = hasher.chain((first or [root])[-1], array[cut * block_size :], start=cut)
    assert first + rest == whole
    if num_blocks:
        blocks = array[: num_blocks * block_size].reshape(num_blocks, block_size)
        positions = np.arange(num_blocks, dtype=np.int32)
        assert hasher.each([root, *whole[:-1]], blocks, positions) == whole


def formula(hasher: PrefixHasher, tokens: np.ndarray, root: bytes) -> list[bytes]:
    """The keys in exact integers, as the docstring of `PrefixHasher` has them."""
    multipliers = hasher._multipliers.tolist()
    offsets, block_size = hasher._offset.tolist()[0], len(multipliers)
    sums = np.frombuffer(root, np.uint64).tolist()
    keys = []
    for position in range(tokens.size // block_size):
        block = tokens[position * block_size : (position + 1) * block_size].tolist()
        for lane in range(4):
            digest = offsets[lane] + sum(
                row[lane] * token for row, token in zip(multipliers, block, strict=True)
            )
            weight = int(hasher._weights[position, lane])
            sums[lane] = (sums[lane] + weight * (digest % 2**64 >> 32)) % 2**64
        keys.append(np.array(sums, np.uint64).tobytes())
    return keys


@given(st.lists(st.tuples(tokens, names, names), max_size=5), st.integers(1, 4))
def test_naming_many_sequences_at_once_gives_each_its_own_keys(
    requests: list[tuple[list[int], str | None, str | None]], block_size: int
) -> None:
    """Beside others of any length and domain, a sequence has the keys that it has alone."""
    manager = KVCacheManager(LRUBlockPool(8, block_size))
    hasher = manager.hasher
    sequences = [
        TokenSequence(np.array(prompt, np.int32), cache_salt=salt, lora=lora)
        for prompt, salt, lora in requests
    ]
    manager.name_blocks(sequences)
    assert [sequence.keys for sequence in sequences] == [
        hasher.chain(hasher.root(salt, lora), np.array(prompt, np.int32), start=0)
        for prompt, salt, lora in requests
    ]


def test_a_long_sequence_beside_short_ones_changes_no_name() -> None:
    """Where padding would cost too much, they are named one by one."""
    hasher = PrefixHasher(4, secret=SECRET)
    runs = [np.arange(n, dtype=np.int32) for n in (4 * 200, 9, 3, 4)]
    roots = [hasher.root(salt, None) for salt in (None, "a", "b", None)]
    alone = [hasher.chain(root, run, start=0) for root, run in zip(roots, runs, strict=True)]
    assert hasher.chains(roots, runs) == alone
    assert [len(keys) for keys in alone] == [200, 2, 0, 1]


def test_a_hasher_that_overrides_chain_names_all_blocks() -> None:
    """Naming many at once asks the overridden method, too."""

    class Plain(PrefixHasher):
        def chain(self, parent: bytes, tokens: npt.NDArray[np.int32], *, start: int) -> list[bytes]:
            return [b"%d" % start] * (tokens.size // 2)

    manager = KVCacheManager(LRUBlockPool(8, 2), hasher=Plain(2))
    sequences = [TokenSequence(np.arange(4, dtype=np.int32)) for _ in range(2)]
    manager.name_blocks(sequences)
    assert [sequence.keys for sequence in sequences] == [[b"0", b"0"]] * 2


def test_a_key_changes_with_every_bit_of_every_token_before_it() -> None:
    """Flipping one bit anywhere changes all four lanes of all keys from there on, and no other."""
    hasher = PrefixHasher(4, secret=SECRET)
    root, tokens = hasher.root(None, None), np.arange(32, dtype=np.int32)
    keys = hasher.chain(root, tokens, start=0)
    for place in range(32):
        for bit in range(31):
            changed = tokens.copy()
            changed[place] ^= 1 << bit
            others = hasher.chain(root, changed, start=0)
            before = place // 4
            assert others[:before] == keys[:before]
            for key, other in zip(keys[before:], others[before:], strict=True):
                lanes = np.frombuffer(key, np.uint64) != np.frombuffer(other, np.uint64)
                assert lanes.all()


def test_weights_do_not_depend_on_how_far_a_hasher_has_been_before() -> None:
    """Engines with one secret name late blocks alike, whichever of them saw the longer prompt."""
    one, other = PrefixHasher(1, secret=SECRET), PrefixHasher(1, secret=SECRET)
    tokens = np.arange(3000, dtype=np.int32)
    whole = one.chain(one.root(None, None), tokens, start=0)
    other.chain(other.root(None, None), tokens[:5], start=0)
    assert other.chain(whole[2499], tokens[2500:], start=2500) == whole[2500:]


def test_keys_of_blocks_full_of_zeros_differ_by_position() -> None:
    """A prefix of zeros and a longer one are different prefixes."""
    hasher = PrefixHasher(4)
    keys = hasher.chain(hasher.root(None, None), np.zeros(400, np.int32), start=0)
    assert len({*keys, hasher.root(None, None)}) == 101


def test_keys_depend_on_the_secret() -> None:
    """Nobody without the secret can name a block; processes with one secret name it alike."""
    prompt = [1, 2, 3, 4]
    assert keys(PrefixHasher(2, secret=SECRET), prompt, None, None) == keys(
        PrefixHasher(2, secret=SECRET), prompt, None, None
    )
    assert keys(PrefixHasher(2), prompt, None, None) != keys(PrefixHasher(2), prompt, None, None)


@pytest.mark.parametrize("secret", ["a string", b"", b"15 bytes, short"])
def test_a_secret_that_can_be_guessed_is_refused(secret: Any) -> None:
    """Whoever has it can make prompts whose keys are those of somebody else's."""
    with pytest.raises(ConfigError, match="the hasher's secret"):
        PrefixHasher(2, secret=secret)


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


def test_blocks_of_different_sizes_never_share_a_key() -> None:
    """Not even when the larger one holds the smaller one's tokens and zeros."""
    small, large = PrefixHasher(2, secret=SECRET), PrefixHasher(4, secret=SECRET)
    tokens = np.array([5, 6, 0, 0], np.int32)
    one = small.chain(small.root(None, None), tokens[:2], start=0)
    assert set(one).isdisjoint(large.chain(large.root(None, None), tokens, start=0))
