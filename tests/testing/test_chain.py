"""The chain hash of the fakes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pdcore.testing.chain import Chain, chain_seed

TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40)


def hashes(tokens: list[int], *, salt: str | None = None, lora: str | None = None) -> list[int]:
    """The chain hash of each token."""
    seed = chain_seed(cache_salt=salt, lora=lora)
    return [int(h) for h in Chain(seed, np.array(tokens, dtype=np.int32)).hashes]


@given(TOKENS, st.data())
def test_growing_a_chain_gives_the_hashes_of_the_whole(tokens: list[int], data: st.DataObject):
    """A chain that is extended in pieces has the hashes of one made at once."""
    cut = data.draw(st.integers(0, len(tokens)))
    chain = Chain(chain_seed(), np.array(tokens[:cut], dtype=np.int32))
    for token in tokens[cut:]:
        chain.append(token)
    assert chain.hashes.tolist() == hashes(tokens)
    assert chain.token_ids.tolist() == tokens


@given(TOKENS, st.data())
def test_a_hash_depends_on_every_token_before_it(tokens: list[int], data: st.DataObject):
    """Changing one token changes its hash and all later ones, and no earlier one."""
    place = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens[:place], tokens[place] ^ 1, *tokens[place + 1 :]]
    before, after = hashes(tokens), hashes(changed)
    assert before[:place] == after[:place]
    assert all(a != b for a, b in zip(before[place:], after[place:], strict=True))


def test_a_hash_depends_on_the_order_of_tokens():
    """Two tokens in the other order give another hash."""
    assert hashes([5, 6])[1] != hashes([6, 5])[1]


def test_domains_never_share_hashes():
    """Salt and adapter are told apart, from each other as well."""
    domains = [
        hashes([1]),
        hashes([1], salt="x"),
        hashes([1], lora="x"),
        hashes([1], salt="x", lora="x"),
    ]
    assert len({domain[0] for domain in domains}) == 4


def test_every_hash_of_a_long_prompt_is_its_own():
    """100,000 equal tokens have 100,000 different hashes."""
    assert len(set(hashes([7] * 100_000))) == 100_000
