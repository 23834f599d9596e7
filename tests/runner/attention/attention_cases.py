"""Random attention problems, and the plainest right answer to them.

Run as a script under ``TRITON_INTERPRET=1``, it compares the Triton backend with the torch one and
prints the largest difference of each case.
"""

from __future__ import annotations

import itertools
import json

import attrs
import numpy as np
import torch
from torch import Tensor

from pdcore.runner.attention import AttentionBackend, AttentionBatch, AttentionShape

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@attrs.frozen(kw_only=True, eq=False)
class Case:
    """One problem: a cache that already holds what came before, and a step over it."""

    shape: AttentionShape
    cache: Tensor
    batch: AttentionBatch
    queries: Tensor
    keys: Tensor
    values: Tensor
    expected: Tensor

    def run(self, backend: type[AttentionBackend], *, cache: Tensor | None = None) -> Tensor:
        """Run every layer; returns (num_layers, num_tokens, num_heads, head_dim)."""
        attention = backend(self.shape)
        attention.bind(self.cache.clone() if cache is None else cache)
        attention.plan(self.batch)
        keys_values = torch.stack((self.keys, self.values), dim=2)
        return torch.stack(
            [
                attention.forward(layer, self.queries[layer], keys_values[layer])
                for layer in range(self.shape.num_layers)
            ]
        )


def make_case(
    *,
    seed: int,
    sequences: list[tuple[int, int]],
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 4,
    windows: tuple[int | None, ...] = (None,),
    dtype: str = "float32",
    num_decodes: int | None = None,
) -> Case:
    """Make a case of ``sequences`` of (tokens before, tokens in this step), decodes first.

    Every slot that holds no token of a sequence is NaN, the null block and the blocks that lie
    wholly behind every window included.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(DTYPES[dtype])

    shape = AttentionShape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        device="cpu",
        windows=windows,
    )
    befores, counts = (np.array(column, np.int32) for column in zip(*sequences, strict=True))
    seq_lens = befores + counts
    num_layers, num_tokens = len(windows), int(counts.sum())
    sizes = -(-seq_lens // block_size)
    num_blocks = 2 * int(sizes.sum()) + 1
    shuffled = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    tables = np.zeros((len(sequences), int(sizes.max()) + 1), np.int32)
    cache = torch.full((num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim), torch.nan)
    cache = cache.to(DTYPES[dtype])
    queries = random(num_layers, num_tokens, num_heads, head_dim)
    keys, values = (random(num_layers, num_tokens, num_kv_heads, head_dim) for _ in range(2))
    expected = torch.empty_like(queries)
    slot_blocks, slot_offsets = [], []
    start = 0
    for index, (before, count) in enumerate(sequences):
        blocks = [shuffled.pop() for _ in range(sizes[index])]
        tables[index, : len(blocks)] = blocks
        past = random(2, num_layers, before, num_kv_heads, head_dim)
        for position in range(before):
            block, offset = blocks[position // block_size], position % block_size
            cache[block, :, :, offset] = past[:, :, position].transpose(0, 1)
        _forget_behind_windows(cache, blocks, before, block_size, windows)
        for position in range(before, before + count):
            slot_blocks.append(blocks[position // block_size])
            slot_offsets.append(position % block_size)
        tokens = slice(start, start + count)
        start += count
        for layer, window in enumerate(windows):
            expected[layer, tokens] = attend_plainly(
                queries[layer, tokens],
                torch.cat((past[0, layer], keys[layer, tokens])),
                torch.cat((past[1, layer], values[layer, tokens])),
                window,
            )
    batch = AttentionBatch(
        num_decodes=sum(count == 1 for count in counts) if num_decodes is None else num_decodes,
        query_lens=counts,
        seq_lens=seq_lens,
        cu_seqlens=torch.from_numpy(np.cumsum([0, *counts], dtype=np.int32)),
        device_seq_lens=torch.from_numpy(seq_lens),
        block_tables=torch.from_numpy(tables),
        slot_blocks=torch.tensor(slot_blocks),
        slot_offsets=torch.tensor(slot_offsets),
    )
    return Case(
        shape=shape,
        cache=cache,
        batch=batch,
        queries=queries,
        keys=keys,
        values=values,
        expected=expected,
    )


def _forget_behind_windows(
    cache: Tensor, blocks: list[int], before: int, block_size: int, windows: tuple[int | None, ...]
) -> None:
    if None in windows:
        return
    first_seen = before - max(window for window in windows if window is not None) + 1
    for block in blocks[: max(first_seen, 0) // block_size]:
        cache[block] = torch.nan


def attend_plainly(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """Attention by its definition, in float64, one query at a time."""
    group = query.shape[1] // key.shape[1]
    num_before = key.shape[0] - query.shape[0]
    result = torch.empty_like(query)
    for index, head in itertools.product(range(query.shape[0]), range(query.shape[1])):
        end = num_before + index + 1
        first = 0 if window is None else max(end - window, 0)
        seen_keys = key[first:end, head // group].double()
        scores = seen_keys @ query[index, head].double() * query.shape[-1] ** -0.5
        weights = torch.softmax(scores, dim=0)
        result[index, head] = (weights @ value[first:end, head // group].double()).to(query.dtype)
    return result


INTERPRETED_CASES = {
    "decodes of unequal lengths": {"sequences": [(0, 1), (7, 1), (40, 1)]},
    "decodes that end on a block": {"sequences": [(3, 1), (7, 1), (35, 1)]},
    "chunks": {"sequences": [(0, 5), (6, 9), (33, 40)]},
    "a mixed batch": {"sequences": [(9, 1), (2, 1), (0, 3), (13, 21)]},
    "heads in groups of three": {
        "sequences": [(9, 1), (5, 30)],
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 24,
    },
    "windows": {"sequences": [(50, 1), (3, 1), (37, 11)], "windows": (8, 8)},
    "windows on some layers": {"sequences": [(50, 1), (37, 11)], "windows": (None, 8)},
    "bfloat16": {"sequences": [(20, 1), (9, 12)], "dtype": "bfloat16"},
    "blocks of 16": {"sequences": [(20, 1), (9, 12)], "block_size": 16},
}


def compare_interpreted() -> dict[str, float]:
    """Largest difference between the Triton backend and the plain answer, by case."""
    from pdcore.runner.attention.triton_backend import TritonAttentionBackend

    differences = {}
    for seed, (name, settings) in enumerate(INTERPRETED_CASES.items()):
        case = make_case(seed=seed, **settings)
        cache = _with_gaps(case.cache)
        difference = (case.run(TritonAttentionBackend, cache=cache) - case.expected).abs().max()
        differences[name] = float(difference.nan_to_num(nan=1e9))
    return differences


def _with_gaps(cache: Tensor) -> Tensor:
    """The same cache with other strides: room between slots and between blocks."""
    num_blocks, num_layers, two, block_size, num_heads, head_dim = cache.shape
    roomy = torch.full(
        (num_blocks, num_layers + 1, two, block_size, num_heads + 1, head_dim),
        torch.nan,
        dtype=cache.dtype,
    )
    view = roomy[:, :num_layers, :, :, :num_heads]
    view.copy_(cache)
    return view


if __name__ == "__main__":
    print(json.dumps(compare_interpreted()))
