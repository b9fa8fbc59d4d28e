"""The arithmetic of cache sizes against counting."""

from hypothesis import given
from hypothesis import strategies as st

from cbfn import sizing
from cbfn.testing import strategies
from cbfn.types import FULL, SLIDING, CacheSpec


def touched(spec: CacheSpec, attention_type: str, start: int, end: int) -> int:
    """Returns how many chunks hold what the tokens at `start` to `end - 1` read and write."""
    first = 0
    if attention_type == SLIDING:
        first = max(0, start + 1 - spec.sliding_window)
    return len({position // spec.chunk_tokens(attention_type) for position in range(first, end)})


def longest_by_counting(spec: CacheSpec) -> int:
    """Returns how many tokens of one request fit, computed one after the other."""
    lines = spec.usable_chunks * max(spec.chunk_tokens(t) for t in spec.attention_types)
    longest = spec.max_model_len or lines
    for newest in range(longest):
        needed = sum(touched(spec, t, newest, newest + 1) for t in spec.attention_types)
        if needed > spec.usable_chunks:
            return newest
    return longest


@given(a=st.integers(0, 10**9), b=st.integers(1, 10**6))
def test_ceil_div_is_the_least_number_of_parts(a, b):
    parts = sizing.ceil_div(a, b)
    assert parts * b >= a
    assert parts == 0 or (parts - 1) * b < a


@given(
    spec=strategies.cache_specs(kinds=("sliding", "hybrid"), max_window=20),
    step=st.integers(1, 12),
)
def test_window_chunks_is_the_worst_alignment(spec, step):
    alignments = range(60, 60 + spec.chunk_tokens(SLIDING))
    worst = max(touched(spec, SLIDING, start, start + step) for start in alignments)
    assert sizing.window_chunks(spec, step) == worst


@given(
    spec=strategies.cache_specs(max_window=20), length=st.integers(1, 80), step=st.integers(1, 12)
)
def test_resident_chunks_bound_what_a_request_holds(spec, length, step):
    bound = sizing.resident_chunks(spec, length, step)
    for offset in range(min(step, length)):  # the first step may be shorter
        starts = [0, *range(offset, length, step)] if offset else range(0, length, step)
        for start, end in zip(starts, [*list(starts)[1:], length], strict=True):
            used = sum(touched(spec, t, start, end) for t in spec.attention_types)
            assert used <= bound
    if spec.attention_types == (FULL,):
        assert bound == touched(spec, FULL, 0, length)


@given(spec=strategies.cache_specs(min_chunks=1, max_window=20))
def test_longest_request_fits_and_is_no_shorter_than_it_must_be(spec):
    longest, counted = sizing.max_request_tokens(spec), longest_by_counting(spec)
    assert longest <= counted
    if len(spec.attention_types) == 1:
        assert longest == counted
    else:  # the window's worst alignment is allowed for, which not every length meets
        assert counted - longest <= spec.chunk_tokens(FULL)


@given(spec=strategies.cache_specs())
def test_block_table_is_as_wide_as_the_longest_request(spec):
    blocks = sizing.max_blocks(spec)
    assert (blocks - 1) * spec.page_size < max(sizing.max_request_tokens(spec), 1)
    assert blocks * spec.page_size >= sizing.max_request_tokens(spec)


@given(spec=strategies.cache_specs(max_layers=6))
def test_blocks_of_either_type_tile_a_chunk(spec):
    for t in spec.attention_types:
        assert spec.blocks_per_chunk(t) * spec.num_layers(t) == spec.chunk_pages
        assert spec.chunk_tokens(t) == spec.blocks_per_chunk(t) * spec.page_size
    counts = [spec.num_layers(t) for t in spec.attention_types]
    assert all(spec.chunk_pages % count == 0 for count in counts)
    assert not any(
        all(pages % count == 0 for count in counts) for pages in range(1, spec.chunk_pages)
    )
