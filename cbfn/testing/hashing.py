"""A model that is a hash: the next token is a function of the whole prefix."""

from __future__ import annotations

from collections.abc import Iterable

from cbfn.types import FULL, CacheSpec

EMPTY = 0x243F6A8885A308D3  # the content of no tokens
_MASK = 2**64 - 1


def extend(content: int, token: int) -> int:
    """Returns the content (64 bits) of a prefix with content `content` and `token` behind it."""
    x = (content + (token + 1) * 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def next_token(prefix_token_ids: Iterable[int], vocab_size: int) -> int:
    """Returns the token in [0, vocab_size) that the model puts behind a prefix."""
    content = EMPTY
    for token in prefix_token_ids:
        content = extend(content, int(token))
    return content % vocab_size


def vocabulary(spec: CacheSpec) -> int:
    """Returns the vocabulary's size; where the spec leaves it open, all ids that fit."""
    return spec.vocab_size or 2**31 - 1


def first_read(spec: CacheSpec, attention_type: str, position: int) -> int:
    """Returns the first position that the token at `position` reads."""
    if attention_type == FULL:
        return 0
    assert spec.sliding_window is not None
    return max(0, position + 1 - spec.sliding_window)
