"""Drawing tokens for a whole batch on the device.

A draw uses one uniform number that is a function of (seed, position) alone, so it does not depend
on the row, on the other rows of the batch, on the device or on what was drawn before.
"""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["SamplingBatch", "allow_only", "derive_seed", "sample", "uniform_draws"]

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FLOAT32 = torch.finfo(torch.float32)


@attrs.frozen(kw_only=True, eq=False)
class SamplingBatch:
    """How the rows of one batch of logits draw.

    Args:
        random: int64 (r,), the rows that are not greedy; None when all are.
        num_random: how many there are.
        draws: float64 (r,), a uniform number in [0, 1) for each.
        temperature, top_p, min_p: float32 (r,).
        top_k: int64 (r,), 0 for no limit.
        num_ordered: how many of the largest logits top-k and top-p must see in order; 0 when no row
            uses them. Known without asking the device.
        has_min_p: whether any row uses min-p.
    """

    random: Tensor | None
    num_random: int
    draws: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor
    num_ordered: int
    has_min_p: bool

    @classmethod
    def all_greedy(cls, device: torch.device) -> SamplingBatch:
        """The batch in which nobody draws at random."""
        nothing = torch.zeros(0, device=device)
        return cls(
            random=None,
            num_random=0,
            draws=nothing.double(),
            temperature=nothing,
            top_p=nothing,
            min_p=nothing,
            top_k=nothing.long(),
            num_ordered=0,
            has_min_p=False,
        )


def sample(logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
    """Draw one token for each row.

    Greedy rows take the first of the largest logits. The others are filtered by temperature,
    top-k, top-p and min-p, in this order, and drawn by inversion of the distribution function.
    Tokens tied with the last one that top-k or top-p keeps are kept too.

    Args:
        logits: float32 (n, vocab_size); not changed.
        batch: how the rows draw.

    Returns:
        Tokens, int64 (n,), and whether each row's logits allow no draw: NaN, +inf, or -inf
        throughout. The token of such a row means nothing.

    Cost: one pass for greedy rows; random rows add a sort only when one of them needs it.
    """
    peaks, tokens = _peaks(logits)
    is_faulty = ~torch.isfinite(peaks)
    if batch.num_random == 0:
        return tokens, is_faulty
    if batch.random is None:
        return _draw(logits, batch), is_faulty
    drawn = _draw(logits.index_select(0, batch.random), batch)
    return tokens.index_copy_(0, batch.random, drawn), is_faulty


def allow_only(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Set the logits of forbidden tokens to -inf, in place.

    Args:
        logits: float32 (n, vocab_size).
        rows: int64 (g,), the rows that are constrained.
        bits: int32 (g, words); bit ``t % 32`` of word ``t // 32`` allows token ``t``. Tokens beyond
            the last word are forbidden: embedding tables are often padded past the tokenizer.
    """
    vocab_size = logits.shape[-1]
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    is_allowed = ((bits[:, :, None] >> shifts) & 1).flatten(1).bool()[:, :vocab_size]
    padding = vocab_size - is_allowed.shape[1]
    if padding:
        is_allowed = torch.nn.functional.pad(is_allowed, (0, padding), value=False)
    logits[rows] = logits[rows].masked_fill_(~is_allowed, -torch.inf)


def uniform_draws(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position): a counter-based generator without state.

    Two rounds of the SplitMix64 finaliser (Steele, Lea & Flood, 2014).
    """
    stream = _mix(seeds + _GOLDEN_GAMMA)
    bits = _mix(stream + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN_GAMMA)
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52


def derive_seed(seed: int, uid: int) -> int:
    """A seed for a request that came without one; the same each time it gets a row."""
    uids = np.array([uid], np.uint64)  # arrays wrap round without a warning; scalars do not
    return int(_mix(np.array([seed], np.uint64) + uids * _GOLDEN_GAMMA)[0])


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _peaks(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row, and the first place where it is; NaN wins, at any place."""
    if logits.is_cuda:
        peaks, tokens = logits.max(dim=-1)
        return peaks, tokens
    # torch looks for a place one element at a time; it finds the value, and numpy finds a True,
    # many at a time.
    peaks = logits.amax(dim=-1)
    is_peak = logits.eq(peaks[:, None]).numpy()
    return peaks, torch.from_numpy(is_peak.argmax(axis=1))


def _draw(logits: Tensor, batch: SamplingBatch) -> Tensor:
    # Relative to the peak, so that no temperature can overflow; a float64 temperature may be out of
    # float32's range on either side.
    temperature = batch.temperature.clamp(_FLOAT32.tiny, _FLOAT32.max)[:, None]
    scaled = (logits - logits.amax(-1, keepdim=True)).div_(temperature)
    if batch.num_ordered:
        _truncate(scaled, batch)
    if batch.has_min_p:
        scaled.masked_fill_(scaled < batch.min_p.log()[:, None], -torch.inf)
    # In float64 the running sum of a large vocabulary keeps every small probability apart.
    cumulative = torch.softmax(scaled, dim=-1).cumsum(-1, dtype=torch.float64)
    targets = batch.draws[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, targets, right=True)[:, 0]
    return drawn.clamp_(max=logits.shape[-1] - 1)


def _truncate(scaled: Tensor, batch: SamplingBatch) -> None:
    """Apply top-k, then top-p, in place, by the smallest value that each row keeps."""
    num_ordered = min(batch.num_ordered, scaled.shape[-1])
    is_whole = num_ordered == scaled.shape[-1]
    ordered = (
        scaled.sort(dim=-1, descending=True).values
        if is_whole
        else scaled.topk(num_ordered, dim=-1).values
    )
    ranks = torch.arange(num_ordered, device=scaled.device)
    limit = torch.where(batch.top_k > 0, batch.top_k, num_ordered)[:, None]
    ordered.masked_fill_(ranks >= limit, -torch.inf)
    share = torch.softmax(ordered, dim=-1)
    is_kept = share.cumsum(-1, dtype=torch.float64) - share < batch.top_p[:, None]
    # A sum that rounds up to 1 must not cut the tail of a row that keeps everything.
    is_kept |= (batch.top_p >= 1)[:, None]
    num_kept = (is_kept & (ranks < limit)).sum(-1, keepdim=True).clamp_(min=1)
    smallest = ordered.gather(-1, num_kept - 1)
    is_limited = ((batch.top_k > 0) | (batch.top_p < 1))[:, None]
    scaled.masked_fill_((scaled < smallest) & is_limited, -torch.inf)
