"""KV rearranged between ranks and block sizes, against arrays that were laid out whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nixl_shapes import HEAD_DIM, NUM_HEADS, NUM_LAYERS, a_layout, a_prompt, laid_out

from pdcore.connector.layout import KVLayout
from pdcore.connector.nixl.reshaping import chunks_of, copy_chunks, head_slices
from pdcore.connector.nixl.staging import StagingArea, as_heads
from pdcore.errors import ConfigError


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """Two shapes, a load, and tables of both sides, with holes here and there."""
    small = draw(st.integers(1, 4))
    sizes = draw(st.permutations([small, small * draw(st.integers(1, 4))]))
    tp_sizes = draw(
        st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (4, 2), (2, 4), (1, 4), (4, 1)])
    )
    remote_size, local_size = sizes
    start = local_size * draw(st.integers(0, 5))
    end = start + draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_remote, num_local = -(-end // remote_size), -(-end // local_size)
    remote_ids = rng.permutation(np.arange(1, num_remote + 4, dtype=np.int32))[:num_remote]
    local_ids = rng.permutation(np.arange(1, num_local + 4, dtype=np.int32))[:num_local]
    if draw(st.booleans()):
        remote_ids[: draw(st.integers(0, num_remote))] = 0
    if draw(st.booleans()):
        local_ids[: draw(st.integers(0, num_local))] = 0
    return {
        "block_sizes": (remote_size, local_size),
        "tp_sizes": tp_sizes,
        "span": (start, end),
        "ids": (remote_ids, local_ids),
        "max_num_blocks": draw(st.integers(1, 8)),
    }


def moved(
    remotes: list[KVLayout],
    local: KVLayout,
    sources: list[npt.NDArray[Any]],
    cache: npt.NDArray[Any],
    *,
    span: tuple[int, int],
    ids: tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]],
    max_num_blocks: int,
) -> None:
    """Stage and copy what one rank needs, piece by piece, as a reader does."""
    start, end = span
    remote_ids, local_ids = ids
    chunks = chunks_of(
        start=start,
        end=end,
        remote_block_size=remotes[0].block_size,
        local_block_size=local.block_size,
        remote_block_ids=remote_ids[start // remotes[0].block_size :],
        local_block_ids=local_ids[start // local.block_size :],
    )
    slots = np.arange(max_num_blocks, dtype=np.int64)[::-1]
    for piece in chunks.pieces(max_num_blocks):
        for heads in head_slices(remotes[0], local):
            area = StagingArea(remotes[heads.rank], num_slots=max_num_blocks)
            used = slots[: piece.remote_block_ids.size]
            blocks = as_heads(sources[heads.rank], remotes[heads.rank])
            area.heads[used] = blocks[piece.remote_block_ids]
            copy_chunks(piece, heads, staged=area.heads, slots=slots, cache=as_heads(cache, local))


@settings(deadline=None, max_examples=60)
@given(cases())
def test_every_wanted_token_arrives_and_nothing_else_changes(case: dict[str, Any]) -> None:
    """For any two dividing shapes, start, tail, holes and piece size, each rank gets its heads."""
    (remote_size, local_size), (remote_tp, local_tp) = case["block_sizes"], case["tp_sizes"]
    (start, end), (remote_ids, local_ids) = case["span"], case["ids"]
    remotes = [a_layout(remote_size, rank, remote_tp) for rank in range(remote_tp)]
    full_blocks = a_prompt(-(-end // remote_size) * remote_size)
    sources = [laid_out(full_blocks, layout, remote_ids) for layout in remotes]
    prompt = full_blocks[:end]
    positions = np.arange(end)
    is_wanted = (positions >= start) & (remote_ids[positions // remote_size] != 0)
    wanted = np.where(is_wanted[:, None, None, None, None], prompt, 0.0)
    for rank in range(local_tp):
        local = a_layout(local_size, rank, local_tp)
        cache = np.zeros_like(laid_out(prompt, local, local_ids))
        moved(
            remotes,
            local,
            sources,
            cache,
            span=case["span"],
            ids=case["ids"],
            max_num_blocks=case["max_num_blocks"],
        )
        expected = laid_out(wanted, local, local_ids)
        expected[0] = 0.0
        np.testing.assert_array_equal(cache, expected)


def test_only_needed_blocks_are_read() -> None:
    """A load that starts in the middle of a peer's block reads from that block on, once each."""
    chunks = chunks_of(
        start=8,
        end=25,
        remote_block_size=16,
        local_block_size=4,
        remote_block_ids=np.array([9, 3], dtype=np.int32),
        local_block_ids=np.array([1, 2, 3, 4, 5], dtype=np.int32),
    )
    assert chunks.remote_block_ids.tolist() == [9, 3]
    assert chunks.source_chunks.tolist() == [2, 3, 0, 1, 2]
    assert chunks.targets.tolist() == [1, 2, 3, 4, 5]
    assert (chunks.size, chunks.num_tail_tokens) == (4, 1)


def test_ranks_that_have_a_head_are_asked() -> None:
    """Rank 1 of 2 needs ranks 2 and 3 of 4, and the second half of the only rank of 1."""
    local = a_layout(4, 1, 2)
    ranks = [(s.rank, s.remote_start, s.local_start) for s in head_slices(a_layout(4, 0, 4), local)]
    assert ranks == [(2, 0, 0), (3, 0, 1)]
    (only,) = head_slices(a_layout(4, 0, 1), local)
    assert (only.rank, only.remote_start, only.num_heads) == (0, 2, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_is_viewed_without_a_copy(dtype: torch.dtype) -> None:
    """What is written through the view is in the tensor."""
    tensor = torch.zeros((3, NUM_LAYERS, 2, 4, NUM_HEADS, HEAD_DIM), dtype=dtype)
    layout = KVLayout(
        model="m",
        dtype="any",
        element_size=tensor.element_size(),
        num_layers=NUM_LAYERS,
        block_size=4,
        num_kv_heads=NUM_HEADS,
        head_dim=HEAD_DIM,
    )
    view = as_heads(tensor, layout)
    view[2, 1, 0, 3, 1] = as_heads(torch.ones_like(tensor), layout)[0, 0, 0, 0, 0]
    assert tensor[2, 1, 0, 3, 1].eq(1).all()
    assert tensor.sum().item() == HEAD_DIM


def test_a_layout_without_ranks_or_layers_is_refused() -> None:
    """Counts start at one, ranks at zero."""
    with pytest.raises(ConfigError, match="block_size=0"):
        a_layout(0, 0, 1)
    with pytest.raises(ConfigError, match="tp_rank=2"):
        a_layout(4, 2, 2)
