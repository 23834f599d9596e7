"""Drawing tokens: the right sets, the right odds, the same draw whatever else is in the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdcore.messages import NewRequestData, SchedulerOutput
from pdcore.request import SamplingParams
from pdcore.runner.batch import BatchState
from pdcore.runner.sampler import SamplingBatch, allow_only, derive_seed, sample, uniform_draws

VOCAB_SIZE = 12


def _batch(
    rows: list[SamplingParams], draws: np.ndarray, *, at_least_ordered: int = 0
) -> SamplingBatch:
    """The batch for ``rows``, of which the random ones use ``draws`` in order.

    ``at_least_ordered`` stands for company whose filters need more logits in order.
    """
    random = [index for index, row in enumerate(rows) if row.temperature > 0]
    chosen = [rows[index] for index in random]
    needed = [row.top_k or (VOCAB_SIZE if row.top_p < 1 else 0) for row in chosen]
    return SamplingBatch(
        random=torch.tensor(random, dtype=torch.int64) if len(random) < len(rows) else None,
        num_random=len(random),
        draws=torch.from_numpy(draws[: len(random)]),
        temperature=torch.tensor([row.temperature for row in chosen], dtype=torch.float32),
        top_p=torch.tensor([row.top_p for row in chosen]),
        min_p=torch.tensor([row.min_p for row in chosen]),
        top_k=torch.tensor([row.top_k for row in chosen], dtype=torch.int64),
        num_ordered=max([at_least_ordered, *needed]),
        has_min_p=any(row.min_p > 0 for row in chosen),
    )


def _kept(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The probabilities after all filters, straight from their definitions, in float64."""
    scaled = logits.astype(np.float64) / params.temperature
    odds = np.exp(scaled - scaled.max())
    order = np.argsort(-odds, kind="stable")
    kept = order[: params.top_k] if params.top_k else order
    if params.top_p < 1:
        before = np.cumsum(odds[kept] / odds[kept].sum()) - odds[kept] / odds[kept].sum()
        kept = kept[before < params.top_p]
    kept = kept[odds[kept] >= params.min_p * odds.max()]
    result = np.zeros_like(odds)
    result[kept] = odds[kept]
    return result / result.sum()


def _draw_many(logits: Tensor, params: SamplingParams, count: int) -> np.ndarray:
    """How often each token comes, over ``count`` positions of one seed."""
    draws = uniform_draws(np.full(count, 7, np.uint64), np.arange(count))
    tokens, _ = sample(logits.expand(count, -1), _batch([params] * count, draws))
    return np.bincount(tokens.numpy(), minlength=VOCAB_SIZE)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=3.0),
        SamplingParams(top_k=4),
        SamplingParams(top_p=0.7),
        SamplingParams(min_p=0.2),
        SamplingParams(temperature=1.7, top_k=7, top_p=0.9, min_p=0.1),
    ],
    ids=str,
)
def test_tokens_come_as_often_as_the_filtered_distribution_says(params: SamplingParams) -> None:
    """A chi-square test over 20,000 draws of one seed against exact probabilities."""
    logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(3)) * 1.5
    expected = _kept(logits.numpy(), params) * 20_000
    counts = _draw_many(logits, params, 20_000)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    degrees = possible.sum() - 1
    # About the 99.9 % quantile; the draws are fixed, so this never flickers.
    assert chi_square < degrees + 3.1 * np.sqrt(2 * degrees) + 3


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    temperature=st.floats(0.2, 5),
    top_k=st.integers(0, VOCAB_SIZE + 3),
    top_p=st.floats(0.05, 1),
    min_p=st.floats(0, 1),
    at_least_ordered=st.sampled_from([0, VOCAB_SIZE]),
)
def test_filters_keep_the_sets_that_their_definitions_say(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, at_least_ordered: int
) -> None:
    """Draws that sweep the whole of [0, 1) meet every kept token and no other."""
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    count = 4096
    draws = (np.arange(count) + 0.5) / count
    tokens, _ = sample(
        logits.expand(count, -1), _batch([params] * count, draws, at_least_ordered=at_least_ordered)
    )
    expected = _kept(logits.numpy(), params)
    frequency = np.bincount(tokens.numpy(), minlength=VOCAB_SIZE) / count
    # A token at the very edge may fall either way in float32; it then changes every share.
    edge = _kept(
        logits.numpy(),
        SamplingParams(
            temperature=temperature, top_k=top_k, top_p=min(1, top_p * 1.0001), min_p=min_p * 0.9999
        ),
    )
    assert min(np.abs(frequency - expected).max(), np.abs(frequency - edge).max()) < 2 / count


def test_greedy_takes_the_first_of_the_largest() -> None:
    """Ties go to the lowest token id, in any batch."""
    logits = torch.tensor([[0.0, 5.0, 5.0], [1.0, 1.0, 1.0]])
    tokens, is_faulty = sample(logits, _batch([SamplingParams(temperature=0)] * 2, np.zeros(0)))
    assert tokens.tolist() == [1, 0]
    assert not is_faulty.any()


def test_top_k_of_one_is_greedy() -> None:
    """Whatever the draw, top_k=1 takes the largest logit."""
    logits = torch.randn(50, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    draws = uniform_draws(np.arange(50, dtype=np.uint64), np.zeros(50, np.int64))
    tokens, _ = sample(logits, _batch([SamplingParams(top_k=1, temperature=2)] * 50, draws))
    assert logits.argmax(-1).tolist() == tokens.tolist()


def test_a_draw_does_not_depend_on_row_or_company() -> None:
    """A row draws the same token alone, in any order, and among rows with other settings."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(9, VOCAB_SIZE, generator=generator)
    kinds = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.9, top_k=5),
        SamplingParams(temperature=1.1, top_p=0.8),
        SamplingParams(min_p=0.1),
        SamplingParams(),
    ]
    rows = [kinds[index % len(kinds)] for index in range(9)]
    draws = uniform_draws(np.arange(9, dtype=np.uint64), np.arange(9))

    def run(order: list[int]) -> dict[int, int]:
        chosen = [rows[index] for index in order]
        used = draws[[index for index in order if rows[index].temperature > 0]]
        tokens, _ = sample(logits[order], _batch(chosen, used))
        return dict(zip(order, tokens.tolist(), strict=True))

    together = run(list(range(9)))
    assert together == run(list(range(9))[::-1])
    assert together == {key: token for index in range(9) for key, token in run([index]).items()}


def test_uniform_draws_depend_on_seed_and_position_alone() -> None:
    """The same pair gives the same number; neighbours in either give unrelated ones."""
    seeds = np.repeat(np.arange(64, dtype=np.uint64), 64)
    positions = np.tile(np.arange(64), 64)
    draws = uniform_draws(seeds, positions)
    assert draws[70] == uniform_draws(seeds[70:71], positions[70:71])[0]
    assert np.unique(draws).size == draws.size
    assert ((draws >= 0) & (draws < 1)).all()
    grid = draws.reshape(64, 64)
    assert abs(draws.mean() - 0.5) < 0.02
    for shifted in (np.roll(grid, 1, axis=0), np.roll(grid, 1, axis=1)):
        assert abs(np.corrcoef(grid.ravel(), shifted.ravel())[0, 1]) < 0.06


def test_uniform_draws_are_pinned() -> None:
    """These numbers may never change: a stored seed must go on giving the same text."""
    draws = uniform_draws(np.array([0, 1, 2**63 - 1], np.uint64), np.array([0, 5, 4095]))
    assert [round(float(draw), 4) for draw in draws] == [0.6524, 0.7744, 0.5269]


def test_derived_seeds_differ_by_uid_and_by_runner() -> None:
    """A request without a seed keeps its own, which no other request of any runner shares."""
    assert derive_seed(5, 1) == derive_seed(5, 1)
    assert len({derive_seed(seed, uid) for seed in range(20) for uid in range(20)}) == 400


@pytest.mark.parametrize("temperature", [0.0, 1e-320, 1e-30, 1.0, 1e30, 1e300])
def test_extreme_temperatures_draw_possible_tokens(temperature: float) -> None:
    """No temperature divides by zero, overflows, or revives a forbidden token."""
    logits = torch.tensor([[-torch.inf, 80.0, -90.0, -torch.inf]])
    for draw in (0.0, 0.5, 1 - 2.0**-52):
        batch = _batch([SamplingParams(temperature=temperature)], np.array([draw]))
        tokens, is_faulty = sample(logits, batch)
        assert not is_faulty[0]
        assert int(tokens[0]) in (1, 2)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_faulty_row_harms_no_other(bad: float, temperature: float) -> None:
    """NaN or inf in one row marks that row alone; the others draw as without it."""
    logits = torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
    rows = [SamplingParams(temperature=temperature, top_p=0.9)] * 3
    batch = _batch(rows, np.array([0.2, 0.5, 0.8]))
    expected, _ = sample(logits, batch)
    broken = logits.clone()
    broken[1, 4] = bad
    tokens, is_faulty = sample(broken, batch)
    assert is_faulty.tolist() == [False, True, False]
    assert [expected[0], expected[2]] == [tokens[0], tokens[2]]
    assert 0 <= int(tokens[1]) < VOCAB_SIZE


@given(
    allowed=st.sets(st.integers(0, 69), min_size=1),
    row=st.integers(0, 2),
    num_words=st.integers(2, 4),
)
@settings(max_examples=40, deadline=None)
def test_bitmask_leaves_only_its_tokens(allowed: set[int], row: int, num_words: int) -> None:
    """Tokens without a bit, those past the last word included, become impossible in that row."""
    bits = np.zeros((1, num_words), np.uint32)
    for token in allowed:
        if token < 32 * num_words:
            bits[0, token // 32] |= np.uint32(1) << np.uint32(token % 32)
    logits = torch.zeros(3, 70)
    allow_only(logits, torch.tensor([row]), torch.from_numpy(bits.view(np.int32)))
    expected = {token for token in allowed if token < 32 * num_words}
    assert expected == set(torch.isfinite(logits[row]).nonzero()[:, 0].tolist())
    others = [other for other in range(3) if other != row]
    assert torch.isfinite(logits[others]).all()


def test_a_row_without_a_seed_draws_alike_after_preemption() -> None:
    """The seed that the runner picks depends on the request, not on its row or epoch."""
    state = _state()
    first = _sampling_of(state, row=0, epoch=1, uid=9).draws
    again = _sampling_of(state, row=3, epoch=5, uid=9).draws
    other = _sampling_of(state, row=2, epoch=6, uid=10).draws
    assert first == again != other


@pytest.mark.parametrize("temperature", [1e300, 1e-300])
def test_a_temperature_beyond_float32_reaches_the_device(temperature: float) -> None:
    """It becomes infinite or zero there, without a warning; the draw clamps it."""
    batch = _sampling_of(_state(), row=1, epoch=1, uid=3, temperature=temperature)
    assert batch.temperature.tolist() == [np.inf if temperature > 1 else 0.0]


def _state() -> BatchState:
    return BatchState(
        max_num_seqs=4,
        max_model_len=64,
        block_size=4,
        sliding_window=None,
        vocab_size=VOCAB_SIZE,
        device=torch.device("cpu"),
        seed=11,
    )


def _sampling_of(
    state: BatchState, *, row: int, epoch: int, uid: int, temperature: float = 1.0
) -> SamplingBatch:
    """How a two-token prompt draws its first token."""
    none = np.zeros(0, np.int32)
    request = NewRequestData(
        row=row,
        epoch=epoch,
        uid=uid,
        request_id="r",
        token_ids=np.array([1, 2], np.int32),
        num_prompt_tokens=2,
        num_computed_tokens=0,
        block_ids=np.array([1], np.int32),
        sampling=SamplingParams(temperature=temperature),
    )
    output = SchedulerOutput(
        step_id=epoch,
        rows=np.array([row], np.int32),
        epochs=np.array([epoch], np.int32),
        num_scheduled_tokens=np.array([2], np.int32),
        num_computed_tokens=np.array([0], np.int32),
        samples=np.array([True]),
        scheduled_new_reqs=(request,),
        block_rows=none,
        block_positions=none,
        block_ids=none,
        finished_rows=none,
    )
    state.apply(output, num_blocks=2)
    return state.sampling(state.lay_out(output))
