"""Every attention backend equals a reference that takes one query, one head and one key at a time.

Pages hold poison outside of what a query may see: NaN in blocks that are nobody's and behind the
last token of a row, and huge numbers in the null block, which are read and must weigh nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cbfn import kv as kv_cache
from cbfn.attention import gather, split
from cbfn.types import FULL, SLIDING, CacheSpec
from tests.conftest import run_interpreted

LAYERS = {
    "full": (FULL, FULL),
    "sliding": (SLIDING, SLIDING, SLIDING),
    "hybrid": (SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL),
}


@dataclass
class Case:
    """Rows of queries over random pages, for one layer of one model."""

    spec: CacheSpec
    layer: int
    query: Tensor
    kv: Tensor
    table: np.ndarray
    seq_lens: np.ndarray
    cu_seqlens: np.ndarray
    scale: float
    softcap: float | None
    sinks: Tensor | None

    @property
    def attention_type(self) -> str:
        return self.spec.layer_types[self.layer]

    @property
    def window(self) -> int | None:
        return self.spec.sliding_window if self.attention_type == SLIDING else None

    @property
    def layer_page(self) -> Tensor:
        return torch.tensor(kv_cache.layer_pages(self.spec)[self.layer])

    @property
    def how(self) -> tuple[float, float | None, Tensor | None]:
        return self.scale, self.softcap, self.sinks

    def expected(self) -> Tensor:
        """Returns the attention of every query, in float64, one key at a time."""
        page, per_block = self.spec.page_size, 2 * self.spec.num_layers(self.attention_type)
        out = torch.zeros(self.query.shape, dtype=torch.float64)
        groups = self.query.shape[1] // self.kv.shape[1]
        for row, length in enumerate(self.seq_lens.tolist()):
            begin, end = self.cu_seqlens[row : row + 2].tolist()
            for token in range(begin, end):
                newest = length - end + token
                oldest = 0 if self.window is None else max(newest - self.window + 1, 0)
                seen = range(oldest, newest + 1)
                lines = [
                    (int(self.table[row, p // page]) * per_block + int(self.layer_page)) * page
                    + p % page
                    for p in seen
                ]
                for head in range(self.query.shape[1]):
                    key = self.kv[lines, head // groups].double()
                    value = self.kv[[line + page for line in lines], head // groups].double()
                    scores = key @ self.query[token, head].double() * self.scale
                    if self.softcap is not None:
                        scores = self.softcap * torch.tanh(scores / self.softcap)
                    weights = scores.exp()
                    total = weights.sum()
                    if self.sinks is not None:
                        total = total + self.sinks[head].double().exp()
                    out[token, head] = weights @ value / total
        return out


def make_case(
    seed: int,
    rows: list[tuple[int, int]],
    page_size: int = 4,
    model: str = "full",
    layer: int = 0,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 8,
    window: int = 5,
    softcap: float | None = None,
    has_sinks: bool = False,
    shared: int = 0,
    skipped: int = 0,
) -> Case:
    """Returns a case with a row for each (tokens before, queries) of `rows`.

    All rows share their first `shared` pages as far as they are full; `skipped` tokens of other
    rows stand before the queries.
    """
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    layer_types = LAYERS[model]
    num_pages = [-(-(before + new) // page_size) for before, new in rows]

    def spec_of(num_chunks: int) -> CacheSpec:
        sliding = window if SLIDING in layer_types else None
        return CacheSpec(layer_types, page_size, 1, num_chunks, sliding_window=sliding)

    layer %= len(layer_types)
    per_chunk = spec_of(3).blocks_per_chunk(layer_types[layer])
    spec = spec_of(2 + -(-(sum(num_pages) + shared) // per_chunk) + 1)
    first, last = 2 * per_chunk, spec.num_chunks * per_chunk
    blocks = rng.permutation(np.arange(first, last)).tolist()
    table = np.zeros((len(rows), max(num_pages) + 2), np.int32)
    together, free = blocks[:shared], iter(blocks[shared:])
    for row, (before, _) in enumerate(rows):
        both = min(shared, before // page_size)
        own = [next(free) for _ in range(num_pages[row] - both)]
        table[row, : num_pages[row]] = [*together[:both], *own]
        if layer_types[layer] == SLIDING:  # pages behind the window are let go
            table[row, : max(before - window + 1, 0) // page_size] = 0
    num_heads, num_kv_heads = heads
    kv = torch.full((kv_cache.num_lines(spec), num_kv_heads, head_dim), float("nan"))
    per_block = 2 * spec.num_layers(layer_types[layer])
    pages = kv.view(-1, per_block, page_size, num_kv_heads, head_dim)
    pages[0] = 1e4
    for row, (before, new) in enumerate(rows):
        for column in range(num_pages[row]):
            block, used = int(table[row, column]), before + new - column * page_size
            if block and bool(pages[block].isnan().all()):
                pages[block].normal_(generator=generator)
                pages[block][:, used:] = float("nan")
    counts = [new for _, new in rows]
    cu_seqlens = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32) + skipped
    shape = (int(cu_seqlens[-1]), num_heads, head_dim)
    return Case(
        spec=spec,
        layer=layer,
        query=torch.randn(shape, generator=generator),
        kv=kv,
        table=table,
        seq_lens=np.array([before + new for before, new in rows], np.int32),
        cu_seqlens=cu_seqlens,
        scale=head_dim**-0.5,
        softcap=softcap,
        sinks=torch.randn(num_heads, generator=generator) if has_sinks else None,
    )


@st.composite
def cases(draw: Any, queries: st.SearchStrategy[int]) -> Case:
    rows = st.tuples(st.integers(0, 70), queries)
    return make_case(
        seed=draw(st.integers(0, 2**31)),
        rows=draw(st.lists(rows, min_size=1, max_size=4)),
        page_size=draw(st.sampled_from([1, 4, 16, 64])),
        model=draw(st.sampled_from(sorted(LAYERS))),
        layer=draw(st.integers(0, 5)),
        heads=draw(st.sampled_from([(4, 2), (2, 2), (4, 1), (6, 2)])),
        head_dim=draw(st.sampled_from([4, 8])),
        window=draw(st.sampled_from([1, 3, 16, 40])),
        softcap=draw(st.sampled_from([None, None, 2.0])),
        has_sinks=draw(st.booleans()),
        shared=draw(st.integers(0, 3)),
        skipped=draw(st.integers(0, 3)),
    )


def check(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-5)


relaxed = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@relaxed
@given(cases(st.integers(1, 40)), st.sampled_from([0, 2, 7]), st.sampled_from([1, 3, 32]))
def test_gather_equals_the_reference(case: Case, least: int, tile_size: int) -> None:
    before = case.kv.clone()
    tiles, place = gather.tiles(
        case.spec, case.attention_type, case.table, case.cu_seqlens, case.seq_lens, least, tile_size
    )
    size = case.spec.page_size
    out = gather.attend(case.query, case.kv, case.layer_page, tiles, size, *case.how)
    check(out[place], case.expected()[int(case.cu_seqlens[0]) :])
    assert tiles.tokens.shape[1] <= tile_size
    assert min(tiles.pages.shape) >= least
    assert out.isfinite().all()  # padding too
    torch.testing.assert_close(case.kv, before, rtol=0, atol=0, equal_nan=True)


@relaxed
@given(cases(st.just(1)), st.sampled_from([0, 2, 7]))
def test_split_equals_the_reference(case: Case, least: int) -> None:
    before = case.kv.clone()
    items = split.items(
        case.spec, case.attention_type, case.table, case.seq_lens, case.cu_seqlens[:-1], least
    )
    size = case.spec.page_size
    out = split.attend(case.query, case.kv, case.layer_page, items, size, *case.how)
    rows = len(case.seq_lens)
    check(out[:rows], case.expected()[int(case.cu_seqlens[0]) :])
    assert len(out) == max(rows, least)
    assert out.isfinite().all()  # padding too
    torch.testing.assert_close(case.kv, before, rtol=0, atol=0, equal_nan=True)


@relaxed
@given(cases(st.just(1)))
def test_split_reads_no_page_that_no_query_sees(case: Case) -> None:
    items = split.items(
        case.spec, case.attention_type, case.table, case.seq_lens, case.cu_seqlens[:-1]
    )
    for row, length in enumerate(case.seq_lens.tolist()):
        mine = (items.row == row).nonzero()[:, 0].tolist()
        assert mine == list(range(int(items.first[row]), int(items.first[row] + items.count[row])))
        seen = sum(int(items.high[item] - items.low[item]) for item in mine)
        assert seen == min(length, case.window or length)
        assert all(items.high[item] > items.low[item] for item in mine)
    assert int(items.count.sum()) == len(items.row)
    assert len(items.widest) == int(items.count.max())


def test_split_of_no_rows_is_empty() -> None:
    case = make_case(0, [(3, 1)])
    nothing = split.items(case.spec, FULL, case.table[:0], case.seq_lens[:0], np.zeros(0, np.int64))
    out = split.attend(case.query, case.kv, case.layer_page, nothing, 4, *case.how)
    assert out.shape == (0, 4, 8)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("backend", ["gather", "split"])
def test_extreme_scores_stay_finite(backend: str, softcap: float | None) -> None:
    case = make_case(3, [(9, 1), (0, 1), (30, 1)], softcap=softcap, has_sinks=True)
    case.query *= 1e3
    size = case.spec.page_size
    if backend == "gather":
        tiles, place = gather.tiles(case.spec, FULL, case.table, case.cu_seqlens, case.seq_lens)
        out = gather.attend(case.query, case.kv, case.layer_page, tiles, size, *case.how)[place]
    else:
        items = split.items(case.spec, FULL, case.table, case.seq_lens, case.cu_seqlens[:-1])
        out = split.attend(case.query, case.kv, case.layer_page, items, size, *case.how)
    assert out.isfinite().all()
    assert out.abs().max() < 10  # a mean of values, however sharp


# Kernels, in Triton's interpreter.


def kernel_cases(queries: list[int]) -> list[Case]:
    """Returns a few cases, each of whose rows has some of `queries` tokens."""
    befores = [0, 14, 15, 16, 32, 95, 6, 0]
    rows = [(before, queries[i % len(queries)]) for i, before in enumerate(befores)]
    return [
        make_case(1, rows, 16, "full", 1, (4, 2), 16),
        make_case(2, rows, 16, "sliding", 2, (8, 2), 32, window=40, has_sinks=True),
        make_case(3, rows, 32, "full", 0, (6, 2), 16, softcap=5.0, shared=2),
        make_case(4, rows, 64, "hybrid", 4, (4, 1), 64, 17, softcap=3.0, has_sinks=True),
        make_case(5, rows, 16, "hybrid", 5, (3, 3), 16, window=1, has_sinks=True),
        make_case(6, rows, 16, "sliding", 0, (4, 4), 16, window=1),
    ]


def run_decode(
    case: Case,
    programs: int,
    unit: int,
    min_units: int = 1,
    keys: int | None = None,
    fill_padding: bool = False,
) -> Tensor:
    """Returns what the kernel writes, NaN where it writes nothing."""
    from cbfn.attention import decode_kernel

    lengths, cu_seqlens = torch.from_numpy(case.seq_lens), torch.from_numpy(case.cu_seqlens)
    num_kv_heads = case.kv.shape[1]
    cut = (programs * num_kv_heads, min_units, unit)
    parts = decode_kernel.split(lengths, cu_seqlens, num_kv_heads, case.window, fill_padding, *cut)
    out = torch.empty_like(case.query)
    for _ in range(2):  # the second layer finds what the first has left
        out.fill_(float("nan"))
        decode_kernel.attend(
            case.query,
            case.kv,
            out,
            case.layer_page,
            torch.from_numpy(case.table),
            lengths,
            cu_seqlens,
            parts,
            page_size=case.spec.page_size,
            block_pages=2 * case.spec.num_layers(case.attention_type),
            scale=case.scale,
            softcap=case.softcap,
            sinks=case.sinks,
            fill_padding=fill_padding,
            keys=keys,
        )
        assert not parts.arrivals.any()
    return out


def run_prefill(case: Case, **tuning: int) -> Tensor:
    """Returns what the kernel writes, NaN where it writes nothing."""
    from cbfn.attention import prefill_kernel

    out = torch.full_like(case.query, float("nan"))
    prefill_kernel.attend(
        case.query,
        case.kv,
        out,
        case.layer_page,
        torch.from_numpy(case.table),
        torch.from_numpy(case.seq_lens),
        torch.from_numpy(case.cu_seqlens),
        page_size=case.spec.page_size,
        block_pages=2 * case.spec.num_layers(case.attention_type),
        scale=case.scale,
        window=case.window,
        softcap=case.softcap,
        sinks=case.sinks,
        **tuning,
    )
    return out


def check_kernel(run: Any, queries: list[int], only_single: bool, tunings: Any) -> None:
    """Raises where a kernel differs from the reference on its own rows, or writes to others."""
    for case in kernel_cases(queries):
        counts = np.diff(case.cu_seqlens)
        own = torch.from_numpy(np.repeat((counts == 1) == only_single, counts))
        wanted = case.expected()
        for tuning in tunings:
            out = run(case, **tuning)
            check(out[own], wanted[own])
            assert out[~own].isnan().all()


def check_decode_kernel() -> None:
    tunings = [
        {"programs": 1, "unit": 128},
        {"programs": 3, "unit": 16},
        {"programs": 8, "unit": 16, "min_units": 2},
        {"programs": 40, "unit": 32},
        {"programs": 3, "unit": 64, "keys": 16},
    ]
    check_kernel(run_decode, [1, 1, 1, 5], True, tunings)
    with pytest.raises(ValueError, match="expected keys that divide a unit of 48, got 32"):
        run_decode(kernel_cases([1])[0], programs=3, unit=48, keys=32)
    for case in kernel_cases([1, 1, 1, 1, 1]):
        padded = replace(
            case,
            seq_lens=np.where(np.arange(len(case.seq_lens)) < 3, case.seq_lens, np.int32(0)),
            cu_seqlens=np.minimum(case.cu_seqlens, np.int32(3)),
        )
        out = run_decode(padded, programs=8, unit=16, fill_padding=True)
        check(out[:3], case.expected()[:3])
        assert not out[3:].any()


def check_prefill_kernel() -> None:
    tunings = [{"tile": 16, "keys": 16}, {"tile": 64, "keys": 32}]
    check_kernel(run_prefill, [16, 1, 5, 33, 2], False, tunings)


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("kernel", ["decode", "prefill"])
def test_kernel_equals_the_reference(kernel: str) -> None:
    run_interpreted(f"from tests.test_attention import *; check_{kernel}_kernel()")
