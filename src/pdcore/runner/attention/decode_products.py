"""The products of a batch of decodes with keys and values that lie slot by slot.

Shapes: n sequences, h KV heads, g query heads for each, s slots, d elements of a head. A batched
product wants one stride from matrix to matrix, which slots that hold all heads side by side do not
have over (h, n); so it runs over n for each head, or over the heads of the only sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["attend_with_shared", "mix_rows", "score_rows"]


def score_rows(query: Tensor, keys: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Score every query against its own sequence.

    Args:
        query: (h, n, g, d), contiguous.
        keys: (n, s, h, d).
        bias: (n, 1, s), added to the scaled products.
        scale: what the products are multiplied by.

    Returns:
        (h, n, g, s).
    """
    num_heads, count, group, _ = query.shape
    scores = query.new_empty((num_heads, count, group, keys.shape[1]))
    if count == 1:
        transposed = keys[0].permute(1, 2, 0)
        torch.baddbmm(bias, query[:, 0], transposed, alpha=scale, out=scores[:, 0])
        return scores
    for head, transposed in enumerate(keys.permute(2, 0, 3, 1).unbind()):
        torch.baddbmm(bias, query[head], transposed, alpha=scale, out=scores[head])
    return scores


def mix_rows(weights: Tensor, values: Tensor) -> Tensor:
    """Sum each sequence's values by weight: (h, n, g, s) and (n, s, h, d) to (h, n, g, d)."""
    num_heads, count, group, _ = weights.shape
    if count == 1:
        return torch.bmm(weights[:, 0], values[0].transpose(0, 1)).unsqueeze(1)
    seen = weights.new_empty((num_heads, count, group, values.shape[-1]))
    for head, value in enumerate(values.permute(2, 0, 1, 3).unbind()):
        torch.bmm(weights[head], value, out=seen[head])
    return seen


def attend_with_shared(
    query: Tensor, shared: Tensor, scores: Tensor, values: Tensor, scale: float
) -> Tensor:
    """Attend to slots that all sequences share and to each one's own, in one softmax.

    Args:
        query: (h, n, g, d), contiguous.
        shared: (2, p, h, d), keys and values of the shared slots.
        scores: (h, n, g, s), of each one's own slots.
        values: (n, s, h, d), of those.
        scale: what products are multiplied by.

    Returns:
        (h, n, g, d).
    """
    num_heads, count, group, head_dim = query.shape
    keys, shared_values = shared.transpose(1, 2)
    shared_scores = torch.bmm(query.view(num_heads, -1, head_dim), keys.transpose(1, 2)).mul_(scale)
    num_shared = keys.shape[1]
    by_row = shared_scores.view(num_heads, count, group, num_shared)
    weights = torch.softmax(torch.cat((by_row, scores), dim=-1), dim=-1)
    seen = mix_rows(weights[..., num_shared:], values)
    flat = seen.view(num_heads, -1, head_dim)
    flat.baddbmm_(weights[..., :num_shared].reshape(num_heads, -1, num_shared), shared_values)
    return seen
