"""Batch shapes that steps run in."""

import pytest

from cbfn.graphs import buckets, smallest


@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize(
    ("max_tokens", "max_rows"), [(1, 1), (8, 8), (64, 33), (100, 64), (256, 1), (8192, 256)]
)
def test_every_step_fits_into_a_bucket_of_its_kind(max_tokens: int, max_rows: int, least: int):
    shapes = buckets(max_tokens, max_rows, least)
    assert shapes == sorted(shapes, reverse=True)
    assert min(shapes).tokens >= least
    for rows in range(1, max_rows + 1):
        assert (found := smallest(shapes, rows, rows)).rows == found.tokens
        for tokens in {rows + 1, (rows + max_tokens) // 2, max_tokens}:
            if rows < tokens <= max_tokens:
                found = smallest(shapes, rows, tokens)
                assert found.tokens > found.rows == shapes[0].rows


def test_decode_buckets_waste_few_rows():
    shapes = buckets(8192, 256)
    for rows in range(1, 257):
        assert smallest(shapes, rows, rows).rows <= max(rows + 7, 1.25 * rows)
    assert len(shapes) < 48
