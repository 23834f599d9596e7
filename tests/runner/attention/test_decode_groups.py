"""How a step's decodes are grouped: each exactly once, reading its own slots and no others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_cases import make_case
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcore.runner.attention import AttentionBatch, torch_backend
from pdcore.runner.attention.decode_groups import group_decodes
from pdcore.runner.attention.torch_backend import TorchAttentionBackend

NO_LIMIT = 10**9


def _batch(seq_lens: list[int], tables: np.ndarray) -> AttentionBatch:
    count = len(seq_lens)
    lengths = np.array(seq_lens, np.int32)
    return AttentionBatch(
        num_decodes=count,
        query_lens=np.ones(count, np.int32),
        seq_lens=lengths,
        cu_seqlens=torch.arange(count + 1, dtype=torch.int32),
        device_seq_lens=torch.from_numpy(lengths),
        block_tables=torch.from_numpy(tables.astype(np.int32)),
        slot_blocks=torch.zeros(count, dtype=torch.int64),
        slot_offsets=torch.zeros(count, dtype=torch.int64),
    )


def _tables(seq_lens: list[int], block_size: int, num_shared: int = 0) -> np.ndarray:
    width = -(-max(seq_lens) // block_size)
    tables = np.arange(1, len(seq_lens) * width + 1).reshape(len(seq_lens), width)
    tables[:, :num_shared] = 100_000 + np.arange(width)[:num_shared]
    return tables


@settings(max_examples=100, deadline=None)
@given(
    seq_lens=st.lists(st.integers(1, 900), min_size=1, max_size=12),
    num_shared=st.integers(0, 12),
    window=st.sampled_from([None, 1, 7, 100]),
    max_slots=st.sampled_from([1, 800, NO_LIMIT]),
)
def test_every_row_sees_its_slots_once(
    seq_lens: list[int], num_shared: int, window: int | None, max_slots: int
) -> None:
    """Shared and own slots together are the last ``window`` of each row, whatever the grouping."""
    block_size = 8
    batch = _batch(seq_lens, _tables(seq_lens, block_size, num_shared))
    groups = group_decodes(batch, window, block_size=block_size, max_slots=max_slots)
    rows = np.concatenate([group.rows for group in groups])
    assert list(range(len(seq_lens))) == sorted(rows.tolist())
    for group in groups:
        assert np.all(np.diff(group.rows) > 0)
        for row, columns, is_unseen in zip(
            group.rows, group.own_columns, group.is_unseen, strict=True
        ):
            positions = columns[:, None] * block_size + np.arange(block_size)
            own = positions.flatten()[~is_unseen].tolist()
            shared = list(range(group.num_shared_blocks * block_size))
            first = 0 if window is None else max(seq_lens[row] - window, 0)
            assert list(range(first, seq_lens[row])) == shared + own
        assert group.rows.size == 1 or group.own_columns.shape[1] <= -(-max_slots // block_size) + 1


def test_padding_does_not_outgrow_its_bound() -> None:
    """One long row among short ones does not make all of them long."""
    seq_lens = [16] * 30 + [4096] + [16] * 30
    batch = _batch(seq_lens, _tables(seq_lens, 16))
    groups = group_decodes(batch, None, block_size=16, max_slots=NO_LIMIT)
    assert [[30], [*range(30), *range(31, 61)]] == [group.rows.tolist() for group in groups]
    alike = _batch([100, 101, 99], _tables([100, 101, 99], 16))
    assert len(group_decodes(alike, None, block_size=16, max_slots=NO_LIMIT)) == 1


def test_common_blocks_are_found_and_leave_each_row_its_newest_token() -> None:
    """Blocks in common at the start are shared, except one that holds a row's newest token."""
    tables = _tables([200, 300, 145], 16, num_shared=9)
    (group,) = group_decodes(
        _batch([200, 300, 145], tables), None, block_size=16, max_slots=NO_LIMIT
    )
    assert group.num_shared_blocks == 9
    (group,) = group_decodes(
        _batch([200, 300, 144], tables), None, block_size=16, max_slots=NO_LIMIT
    )
    assert group.num_shared_blocks == 8
    tables[2, 5] = 7
    (group,) = group_decodes(
        _batch([200, 300, 145], tables), None, block_size=16, max_slots=NO_LIMIT
    )
    assert group.num_shared_blocks == 5


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    own=st.lists(st.integers(1, 60), min_size=2, max_size=5),
    group=st.sampled_from([1, 3]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_a_shared_prefix_changes_no_result(
    seed: int, own: list[int], group: int, dtype: str
) -> None:
    """Rows whose tables begin with the same blocks get what each would get by itself."""
    num_shared, block_size = 5, 16
    case = make_case(
        seed=seed,
        sequences=[(num_shared * block_size + tokens, 1) for tokens in own],
        num_heads=2 * group,
        num_kv_heads=2,
        block_size=block_size,
        dtype=dtype,
    )
    # The same keys and values for all in the first blocks, once in blocks of their own ...
    tables, cache = case.batch.block_tables, case.cache
    for row in range(1, len(own)):
        cache[tables[row, :num_shared].long()] = cache[tables[0, :num_shared].long()]
    apart = case.run(TorchAttentionBackend)
    # ... and once in the same ones.
    tables[:, :num_shared] = tables[0, :num_shared].clone()
    together = case.run(TorchAttentionBackend)
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    torch.testing.assert_close(together, apart, rtol=0, atol=tolerance)


@pytest.mark.parametrize("max_entries", [1 << 22, 2500])
def test_many_groups_and_chunks_in_one_step(
    max_entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups that are no neighbours, and chunks behind them, each get their own results."""
    monkeypatch.setattr(torch_backend, "_MAX_SPARSE_ENTRIES", max_entries)
    sequences = [(600, 1), (3, 1), (590, 1), (5, 1), (300, 1), (0, 9), (20, 6)]
    case = make_case(seed=5, sequences=sequences, block_size=4)
    with torch.inference_mode():
        torch.testing.assert_close(
            case.run(TorchAttentionBackend), case.expected, rtol=0, atol=2e-5
        )


def test_wide_queries_over_a_narrow_cache() -> None:
    """On a CPU queries may be float32 over a cache of bfloat16; so is the result."""
    case = make_case(seed=2, sequences=[(70, 1), (9, 1), (0, 12), (30, 5)], dtype="bfloat16")
    attention = TorchAttentionBackend(case.shape)
    attention.bind(case.cache.clone())
    attention.plan(case.batch)
    keys_values = torch.stack((case.keys[0], case.values[0]), dim=1).float()
    seen = attention.forward(0, case.queries[0].float(), keys_values)
    assert seen.dtype == torch.float32
    torch.testing.assert_close(seen, case.expected[0].float(), rtol=0, atol=2e-2)
