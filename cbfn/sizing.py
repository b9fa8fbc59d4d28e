"""Arithmetic of cache sizes."""

from __future__ import annotations

from bisect import bisect_right

from cbfn.types import SLIDING, CacheSpec


def ceil_div(a: int, b: int) -> int:
    """Returns a / b rounded up."""
    return -(-a // b)


def window_chunks(spec: CacheSpec, step_tokens: int = 1) -> int:
    """Returns the most sliding chunks that a step of `step_tokens` tokens of one request touches:
    the tokens and the window before the first of them, at the worst alignment."""
    assert spec.sliding_window is not None
    span = spec.sliding_window - 1 + step_tokens
    return ceil_div(span - 1, spec.chunk_tokens(SLIDING)) + 1


def resident_chunks(spec: CacheSpec, num_tokens: int, step_tokens: int = 1) -> int:
    """Returns the most chunks that a request of `num_tokens` tokens holds at a time, if it computes
    at most `step_tokens` of them in one step: sliding chunks are let go between steps."""
    total = 0
    for attention_type in spec.attention_types:
        chunks = ceil_div(num_tokens, spec.chunk_tokens(attention_type))
        if attention_type == SLIDING:
            chunks = min(chunks, window_chunks(spec, step_tokens))
        total += chunks
    return total


def max_request_tokens(spec: CacheSpec) -> int:
    """Returns how many tokens' KV one request can have with the whole cache for itself.

    The model's length bounds it too; where neither does (all layers slide and nothing is said of
    the model's positions), as many as the cache has lines for.
    """
    lines = spec.usable_chunks * max(spec.chunk_tokens(t) for t in spec.attention_types)
    longest = spec.max_model_len or lines
    fits = bisect_right(
        range(longest + 1), spec.usable_chunks, key=lambda n: resident_chunks(spec, n)
    )
    return fits - 1


def max_blocks(spec: CacheSpec) -> int:
    """Returns M, the columns of a block table: one for each page of the longest request."""
    return max(ceil_div(max_request_tokens(spec), spec.page_size), 1)
