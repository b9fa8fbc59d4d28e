"""Sampling: exact kept sets, tokens that follow from seed and position alone, honest noise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cbfn.sample import SamplingNeeds, _mix, gumbel_noise, kept, largest, parts_of, sample

ALL = SamplingNeeds(noise=True, filters=True)
NOISE = SamplingNeeds(noise=True)
M32 = 2**32 - 1


def column(value: Any, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns one value for each row."""
    values = value if isinstance(value, (list, tuple)) else [value] * rows
    return torch.tensor(values, dtype=dtype)


def draw(
    logits: torch.Tensor,
    temperature: Any = 1.0,
    top_k: Any = 0,
    top_p: Any = 1.0,
    min_p: Any = 0.0,
    seeds: Any = 0,
    positions: Any = 0,
    needs: SamplingNeeds = ALL,
) -> list[int]:
    """Returns the sampled tokens; every argument may be one value or one for each row."""
    rows = len(logits)
    tokens = sample(
        logits,
        column(temperature, rows, torch.float32),
        column(top_k, rows, torch.int32),
        column(top_p, rows, torch.float32),
        column(min_p, rows, torch.float32),
        column(seeds, rows, torch.int64),
        column(positions, rows, torch.int32),
        needs,
    )
    return tokens.tolist()


def kept_slowly(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[set[int], float]:
    """Returns the kept set of one row in exact steps, and how near a threshold was.

    Of equal logits the earlier comes first, as in a stable sort.
    """
    scaled = [(logit - max(logits)) / temperature for logit in logits]
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    if top_k > 0:
        order = order[:top_k]
    weights = {i: math.exp(scaled[i]) for i in order}
    total = math.fsum(weights.values())
    result, mass, nearest = set(), 0.0, 1.0
    for rank, i in enumerate(order):
        share, least = weights[i] / total, min_p * weights[order[0]] / total
        if rank > 0 and top_p < 1.0:
            nearest = min(nearest, abs(mass - top_p))
        if rank > 0 and share != least:
            nearest = min(nearest, abs(share - least))
        if rank == 0 or ((mass < top_p or top_p >= 1.0) and share >= least):
            result.add(i)
        mass += share
    return result, nearest


rows = st.fixed_dictionaries(
    {
        # a coarse grid: ties are the rule
        "logits": st.lists(st.integers(-6, 6).map(lambda n: n / 2), min_size=7, max_size=7),
        "temperature": st.sampled_from([0.25, 0.7, 1.0, 2.0]),
        "top_k": st.integers(0, 9),
        "top_p": st.one_of(st.just(1.0), st.floats(0.01, 1.0)),
        "min_p": st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
    }
)


@settings(max_examples=200, deadline=None)
@given(st.lists(rows, min_size=1, max_size=5))
def test_kept_sets_equal_a_slow_reference(batch: list[dict[str, Any]]) -> None:
    logits = torch.tensor([row["logits"] for row in batch])
    temperature = torch.tensor([row["temperature"] for row in batch])
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature[:, None]
    mask = kept(
        scaled,
        torch.tensor([row["top_k"] for row in batch], dtype=torch.int32),
        torch.tensor([row["top_p"] for row in batch]),
        torch.tensor([row["min_p"] for row in batch]),
    )
    for row, kept_row in zip(batch, mask.tolist(), strict=True):
        expected, nearest = kept_slowly(**row)
        if nearest > 1e-5:  # closer than that, rounding may decide
            assert {i for i, keep in enumerate(kept_row) if keep} == expected


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"top_k": 1}, {1}),  # of two equal ones the first
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 3}, {0, 1, 3}),
        ({"top_k": 100}, {0, 1, 2, 3, 4}),
        ({"top_p": 1e-9}, {1}),
        ({"top_p": 0.5}, {1, 3}),
        ({"min_p": 1.0}, {1, 3}),
        ({"min_p": 0.2}, {0, 1, 2, 3}),
        ({"top_k": 3, "min_p": 0.2}, {0, 1, 3}),
        ({"top_k": 3, "top_p": 0.85}, {1, 3}),  # top-p counts what top-k left as the whole
        ({"top_k": 3, "top_p": 0.88}, {0, 1, 3}),
        ({"top_k": 2, "top_p": 0.4}, {1}),
    ],
)
def test_filters_keep_exactly(filters: dict[str, Any], expected: set[int]) -> None:
    # shares 0.12, 0.4, 0.12, 0.4, 0.01: equal logits are kept in order of their index
    logits = torch.tensor([[0.12, 0.4, 0.12, 0.4, 0.01]]).log()
    many = 2000
    drawn = draw(logits.expand(many, -1), seeds=list(range(many)), **filters)
    assert set(drawn) == expected


def test_filters_that_are_off_keep_every_token() -> None:
    """Also those of a share below the rounding of the sum of all others."""
    scaled = torch.linspace(0.0, -200.0, 5000)[None]
    off = torch.zeros(1, dtype=torch.int32), torch.ones(1), torch.zeros(1)
    assert kept(scaled, *off).all()
    one = torch.tensor([5000], dtype=torch.int32), torch.ones(1), torch.zeros(1)
    assert kept(scaled, *one).all()


def test_greedy_takes_the_first_of_the_likeliest() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [5.0, -1.0, 5.0, 5.0]])
    for needs in (SamplingNeeds(), NOISE, ALL):
        assert draw(logits, temperature=0.0, seeds=[3, 4], needs=needs) == [1, 0]


def test_any_temperature_in_one_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 50) * 5
    best = int(logits.argmax())
    temperatures = [0.0, 1e-4, 1e-30, 1e-38, 1.0, 100.0]
    for seed in range(50):
        tokens = draw(
            logits.expand(6, -1), temperature=temperatures, seeds=seed, positions=list(range(6))
        )
        assert tokens[:4] == [best] * 4
    hot = draw(logits.expand(500, -1), temperature=100.0, seeds=list(range(500)))
    assert len(set(hot)) > 40  # nearly uniform over 50


def test_tiny_temperature_draws_among_equal_maxima_only() -> None:
    logits = torch.tensor([[1.0, 7.0, 6.999, 7.0]]).expand(400, -1)
    drawn = draw(logits, temperature=1e-30, seeds=list(range(400)))
    assert 100 < drawn.count(1) < 300
    assert set(drawn) == {1, 3}


def test_logits_of_minus_infinity_are_never_drawn() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf"), -3.0]]).expand(2000, -1)
    for needs in (NOISE, ALL):
        drawn = draw(logits, temperature=5.0, seeds=list(range(2000)), needs=needs)
        assert set(drawn) == {1, 3}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_nan_does_not_depend_on_what_others_need(temperature: float) -> None:
    rows = torch.tensor([[1.0, 2.0, math.nan, 3.0, 0.0], [1.0, 2.0, 0.0, 3.0, 0.0]])
    tokens = [draw(rows, temperature, needs=needs) for needs in (NOISE, ALL)]
    assert tokens[0] == tokens[1]


def test_drawn_tokens_pass_the_filters_at_any_temperature() -> None:
    """Also where a temperature makes logits equal, so that the first passes, not the best."""
    row = torch.tensor([[1.0, -3.0, 0.0, -5.0, 1.0000001]]).expand(50, -1)
    assert draw(row, temperature=2e38, top_k=1, seeds=list(range(50))) == [4] * 50
    equal = torch.tensor([[0.0, -1e-40, 1e-40]]).expand(50, -1)
    assert draw(equal, temperature=2e38, top_k=1, seeds=list(range(50))) == [0] * 50


def test_half_precision_logits_sample_as_their_float_values() -> None:
    torch.manual_seed(1)
    logits = (torch.randn(8, 64) * 3).to(torch.bfloat16)
    seeds = list(range(8))
    assert draw(logits, 0.8, 10, 0.9, 0.01, seeds) == draw(
        logits.float(), 0.8, 10, 0.9, 0.01, seeds
    )


def test_token_depends_on_seed_and_position_alone() -> None:
    torch.manual_seed(2)
    logits = torch.randn(24, 40) * 2
    wanted: dict[str, list[Any]] = {
        "temperature": [(0.0, 0.5, 1.0, 3.0)[i % 4] for i in range(24)],
        "top_k": [(0, 5, 40, 3)[i % 4] for i in range(24)],
        "top_p": [(1.0, 0.9, 0.5)[i % 3] for i in range(24)],
        "min_p": [(0.0, 0.1)[i % 2] for i in range(24)],
        "seeds": [(i * 7919) ** 3 - 2**40 for i in range(24)],
        "positions": [i * i for i in range(24)],
    }
    together = draw(logits, **wanted)
    for i in range(24):
        own = {name: values[i] for name, values in wanted.items()}
        assert draw(logits[i : i + 1], **own) == [together[i]]
    order = torch.randperm(24).tolist()
    moved = {name: [values[i] for i in order] for name, values in wanted.items()}
    assert draw(logits[order], **moved) == [together[i] for i in order]


def test_token_does_not_depend_on_what_is_computed_for_others() -> None:
    torch.manual_seed(3)
    logits = torch.randn(10, 40)
    plain = draw(logits, seeds=list(range(10)), needs=NOISE)
    assert draw(logits, seeds=list(range(10)), needs=ALL) == plain
    greedy = draw(logits, temperature=0.0, needs=SamplingNeeds())
    assert draw(logits, temperature=0.0, seeds=list(range(10)), needs=ALL) == greedy
    mixed = draw(logits, temperature=[0.0, 1.0] * 5, seeds=list(range(10)), needs=NOISE)
    assert mixed == [(greedy, plain)[i % 2][i] for i in range(10)]


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Returns how many standard deviations the statistic lies above its mean."""
    degrees = len(counts) - 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float((statistic - degrees) / math.sqrt(2 * degrees))


@pytest.mark.parametrize("vary", ["seeds", "high half of the seed", "positions", "both"])
def test_frequencies_follow_the_softmax(vary: str) -> None:
    many = 40_000
    logits = torch.linspace(-2.0, 2.5, 12)[torch.randperm(12, generator=seeded(0))]
    count = torch.arange(many)
    seeds = {"seeds": count, "high half of the seed": count << 32, "both": count % 200}
    positions = {"positions": count, "both": count // 200}
    drawn = sample(
        logits.expand(many, -1),
        torch.full((many,), 1.3),
        torch.zeros(many, dtype=torch.int32),
        torch.ones(many),
        torch.zeros(many),
        seeds.get(vary, torch.full((many,), 1234)),
        positions.get(vary, torch.full((many,), 17)).int(),
        NOISE,
    )
    expected = (logits / 1.3).softmax(-1).numpy() * many
    assert abs(chi_square(np.bincount(drawn, minlength=12), expected)) < 4


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def uniforms(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> np.ndarray:
    """Returns the noise as numbers that are uniform in [0, 1) if it is standard Gumbel."""
    return torch.exp(-torch.exp(-gumbel_noise(seeds, positions, vocab_size).double())).numpy()


STREAMS = {
    "consecutive seeds": lambda n: (n, n * 0 + 5),
    "consecutive positions": lambda n: (n * 0 + 99, n),
    "negative seeds": lambda n: (-1 - n, n * 0),
    "seeds that differ in the high half": lambda n: (n << 32, n * 0),
    "multiples of an odd constant": lambda n: (n * 0x1E3779B97F4A7C15, n * 0 + 1),
}


@pytest.mark.parametrize("name", STREAMS)
def test_noise_is_uniform_and_independent(name: str) -> None:
    n = torch.arange(2000)
    seeds, positions = STREAMS[name](n)
    noise = uniforms(seeds, positions.int(), 64)
    bins = np.bincount((noise * 50).astype(int).ravel(), minlength=50)
    assert abs(chi_square(bins, np.full(50, noise.size / 50))) < 4
    neighbours = {
        "next row": (noise[:-1], noise[1:]),
        "next index": (noise[:, :-1], noise[:, 1:]),
        "next index of the next row": (noise[:-1, 1:], noise[1:, :-1]),
        "eight rows on": (noise[:-8], noise[8:]),
    }
    for what, (left, right) in neighbours.items():
        cells = (left * 10).astype(int) * 10 + (right * 10).astype(int)
        counts = np.bincount(cells.ravel(), minlength=100)
        assert abs(chi_square(counts, np.full(100, left.size / 100))) < 4, what
    assert len(np.unique(noise[:, 0])) > 1995  # 2000 draws of 24 bits


def test_streams_of_two_seeds_do_not_overlap() -> None:
    """Seeds whose hashes are near each other must not share noise a few positions apart."""
    seeds = torch.arange(1, 200_000)
    hashes, order = _mix(seeds).sort()
    gap, at = torch.diff(hashes).min(0)
    first, second = int(seeds[order[at]]), int(seeds[order[at + 1]])
    distance = int(gap)
    assert distance < 100
    positions = torch.arange(64)
    ahead = uniforms(torch.full((64,), first), (positions + distance).int(), 32)
    behind = uniforms(torch.full((64,), second), positions.int(), 32)
    assert not np.isclose(ahead, behind).all(axis=1).any()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, M32), min_size=1, max_size=50, unique=True))
def test_hash_is_a_bijection_of_32_bits(values: list[int]) -> None:
    mixed = _mix(torch.tensor(values)).tolist()
    assert len(set(mixed)) == len(values)
    assert all(0 <= bits <= M32 for bits in mixed)
    assert _mix(torch.tensor([v + 2**32 for v in values])).tolist() == mixed


@pytest.mark.compiled
def test_compiled_sampling_equals_eager() -> None:
    torch.manual_seed(4)
    compiled = torch.compile(sample, fullgraph=True)
    arguments = (
        torch.randn(16, 100) * 3,
        torch.tensor([0.0, 0.3, 1.0, 2.0] * 4),
        torch.tensor([0, 7, 1, 50] * 4, dtype=torch.int32),
        torch.tensor([1.0, 0.9, 0.4, 0.99] * 4),
        torch.tensor([0.0, 0.05, 0.0, 0.2] * 4),
        torch.arange(16) * 0x123456789ABCDEF - 2**62,
        torch.arange(16, dtype=torch.int32) * 1000,
        ALL,
    )
    assert compiled(*arguments).tolist() == sample(*arguments).tolist()


NUMBERS = st.sampled_from([-math.inf, -1.0, 0.0, 2.5, math.inf])


def rows_of(numbers: list[float]) -> st.SearchStrategy[list[list[float]]]:
    row = st.lists(st.sampled_from(numbers), min_size=24, max_size=24)
    return st.lists(row, min_size=1, max_size=4)


@settings(max_examples=200, deadline=None)
@given(
    # few different numbers: of five, infinity would be in nearly every row
    values=st.lists(NUMBERS, min_size=1, max_size=3, unique=True).flatmap(rows_of),
    parts=st.sampled_from([1, 2, 3, 5, 7, 8, 24]),
)
def test_largest_is_the_first_of_several_however_it_is_searched(
    values: list[list[float]], parts: int
) -> None:
    rows = torch.tensor(values)
    places, tops = largest(rows, parts)
    assert places.tolist() == [row.index(max(row)) for row in values]
    assert tops.tolist() == [max(row) for row in values]


@pytest.mark.parametrize(
    ("vocab_size", "expected"),
    [
        (128, 1),
        (1023, 1),
        (1024, 2),
        (2048, 4),
        (32_000, 32),
        (32_003, 32),
        (50_257, 32),
        (128_256, 32),
        (151_936, 32),
    ],
)
def test_rows_are_searched_in_parts_that_are_not_small(vocab_size: int, expected: int) -> None:
    assert parts_of(vocab_size, torch.device("cuda")) == expected
    assert parts_of(vocab_size, torch.device("cpu")) == 1
