"""The prefix cache."""

from dataclasses import replace

import numpy as np
import pytest
from immutables import Map

from cbfn import prefix
from cbfn.types import FULL, SLIDING, CacheSpec, InvariantViolation

PAGE = 2


def make(layers=(FULL,), usable=8, window=4, **more):
    spec = CacheSpec(layers, PAGE, 16, usable + 2, sliding_window=window)
    return prefix.init(spec, **more)


def digests(cache, tokens):
    """Returns the digest of each whole block of a list of tokens."""
    found, digest = [], cache.root
    for start in range(0, len(tokens) - PAGE + 1, PAGE):
        digest = prefix.next_digest(digest, np.array(tokens[start : start + PAGE], np.int32))
        found.append(digest)
    return found


def compute(cache, tokens, types=None):
    """Returns the cache in which a request has computed `tokens`, and its chunks by type."""
    spec = cache.spec
    types = types or spec.attention_types
    counts = [-(-len(tokens) // spec.chunk_tokens(t)) for t in types]
    cache, parts = prefix.allocate(cache, counts)
    for t, part in zip(types, parts, strict=True):
        per_chunk = spec.blocks_per_chunk(t)
        whole = len(tokens) // spec.chunk_tokens(t)
        chain = digests(cache, tokens)
        keys = [prefix.chunk_key(t, chain[(i + 1) * per_chunk - 1]) for i in range(whole)]
        cache = prefix.publish(cache, keys, part[:whole].tolist())
    return cache, dict(zip(types, parts, strict=True))


def hit(cache, tokens):
    return prefix.match(cache, digests(cache, tokens).__getitem__, len(tokens))


def test_known_prefix_is_found_up_to_the_last_whole_block():
    cache, held = compute(make(), [1, 2, 3, 4, 5])
    found = hit(cache, [1, 2, 3, 4, 9, 9])
    assert found.num_tokens == 4
    assert found.chunks[FULL].tolist() == held[FULL][:2].tolist()
    assert hit(cache, [1, 2, 9, 4, 5, 6]).num_tokens == 2
    assert hit(cache, [9, 2, 3, 4, 5, 6]).num_tokens == 0


@pytest.mark.parametrize(("length", "cached"), [(1, 0), (2, 0), (3, 2), (4, 2), (5, 4)])
def test_one_token_at_least_is_always_computed(length, cached):
    cache, _ = compute(make(), [1, 2, 3, 4, 5, 6])
    assert hit(cache, [1, 2, 3, 4, 5, 6][:length]).num_tokens == cached


def test_released_chunks_stay_known_until_they_are_needed():
    cache, held = compute(make(usable=4), [1, 2, 3, 4])
    cache = prefix.release(cache, held[FULL])
    assert (cache.pool.num_free, cache.pool.num_cached) == (2, 2)
    cache, _ = prefix.allocate(cache, [2])
    assert hit(cache, [1, 2, 3, 4, 5]).num_tokens == 4
    cache, _ = prefix.allocate(cache, [1])
    assert cache.pool.num_cached == 1
    assert prefix.allocate(cache, [2]) is None
    prefix.check(cache)


def test_least_recently_released_chunk_is_evicted_first():
    cache, a = compute(make(usable=6), [1, 1])
    cache, b = compute(cache, [2, 2])
    cache, c = compute(cache, [3, 3])
    for held in (b, a, c):
        cache = prefix.release(cache, held[FULL])
    cache = prefix.release(prefix.claim(cache, hit(cache, [2, 2, 0])), b[FULL])  # b is used again
    known = []
    for _ in range(6):
        cache, _ = prefix.allocate(cache, [1])
        known.append("".join(n for n, t in zip("abc", (1, 2, 3), strict=True)
                             if hit(cache, [t, t, 0]).num_tokens))  # fmt: skip
    assert known == ["abc", "abc", "abc", "bc", "b", ""]


def test_deepest_chunk_of_a_request_is_evicted_before_its_beginning():
    cache, held = compute(make(usable=4), [1, 2, 3, 4, 5, 6])
    cache = prefix.release(cache, held[FULL][::-1])
    lengths = []
    for _ in range(4):
        cache, _ = prefix.allocate(cache, [1])
        lengths.append(hit(cache, [1, 2, 3, 4, 5, 6, 7]).num_tokens)
    assert lengths == [6, 4, 2, 0]


def test_claimed_chunks_are_not_evicted():
    cache, held = compute(make(usable=3), [1, 2, 3, 4])
    cache = prefix.release(cache, held[FULL])
    found = hit(cache, [1, 2, 3, 4, 5])
    assert prefix.num_idle(cache, found) == 2
    cache = prefix.claim(cache, found)
    assert prefix.num_idle(cache, found) == 0
    assert prefix.allocate(cache, [2]) is None
    cache, (rest,) = prefix.allocate(cache, [1])
    assert not set(rest) & set(found.chunks[FULL])


def test_key_that_is_known_keeps_its_chunk_and_the_twin_stays_private():
    cache, first = compute(make(), [1, 2])
    cache, second = compute(cache, [1, 2])
    assert hit(cache, [1, 2, 3]).chunks[FULL].tolist() == first[FULL].tolist()
    cache = prefix.release(prefix.release(cache, first[FULL]), second[FULL])
    assert (cache.pool.num_cached, cache.pool.num_free) == (1, 7)
    prefix.check(cache)


def test_nothing_is_known_where_sharing_is_off():
    cache, _ = compute(make(enabled=False), [1, 2, 3, 4])
    assert hit(cache, [1, 2, 3, 4, 5]).num_tokens == 0


def test_nothing_of_older_weights_is_a_hit_and_it_is_evicted_like_the_rest():
    cache, held = compute(make(usable=2), [1, 2])
    cache = prefix.set_weight_version(prefix.release(cache, held[FULL]), 1)
    assert hit(cache, [1, 2, 3]).num_tokens == 0
    cache, _ = prefix.allocate(cache, [2])
    assert not cache.key_of


def test_digest_covers_parent_and_tokens_and_weights():
    block = np.array([1, 2], np.int32)
    root, other = prefix.root_digest(0), prefix.root_digest(1)
    found = {
        prefix.next_digest(root, block),
        prefix.next_digest(other, block),
        prefix.next_digest(root, block[::-1]),
        prefix.next_digest(prefix.next_digest(root, block), block),
        prefix.next_digest(root, np.array([1, 2 + 2**16], np.int32)),
    }
    assert len(found) == 5
    assert {len(digest) * 8 for digest in found} == {128}
    assert prefix.chunk_key(FULL, root) != prefix.chunk_key(SLIDING, root)


def test_sliding_hit_needs_the_window_and_nothing_before_it():
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    cache, held = compute(make((SLIDING,), window=3), tokens)
    cache = prefix.release(cache, held[SLIDING][:2])  # columns 0 and 1 left the window
    cache, _ = prefix.allocate(cache, [cache.pool.num_free + 2])
    found = hit(cache, [*tokens, 9])
    assert found.num_tokens == 8
    assert found.first[SLIDING] == 3
    assert found.chunks[SLIDING].tolist() == held[SLIDING][3:].tolist()
    assert hit(cache, tokens).num_tokens == 6  # the token at 6 sees 4 and 5, column 2
    assert hit(cache, tokens[:6]).num_tokens == 0  # and the one at 4 what is gone


def test_hybrid_hit_is_known_to_both_types():
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    spec_cache = make((FULL, SLIDING), usable=12, window=3)
    cache, _ = compute(spec_cache, tokens, types=(FULL,))
    assert hit(cache, [*tokens, 9]).num_tokens == 0
    cache, _ = compute(cache, tokens[:4], types=(SLIDING,))
    found = hit(cache, [*tokens, 9])
    assert found.num_tokens == 4
    assert (len(found.chunks[FULL]), found.first[SLIDING]) == (2, 1)


def test_hit_is_a_whole_number_of_chunks_of_both_types():
    cache = make((FULL, SLIDING, SLIDING), usable=20, window=2)
    assert (cache.spec.chunk_tokens(FULL), cache.spec.chunk_tokens(SLIDING)) == (4, 2)
    cache, _ = compute(cache, list(range(10)))
    assert [hit(cache, list(range(n))).num_tokens for n in range(1, 12)] == [0] * 4 + [4] * 4 + [
        8
    ] * 3


def test_eviction_queue_survives_reuse_between_evictions():
    cache = make(usable=30)
    held = []
    for number in range(10):
        cache, chunks = compute(cache, [number, number, 50, number])
        held.append(chunks[FULL])
    for chunks in held:
        cache = prefix.release(cache, chunks)
    cache, _ = prefix.allocate(cache, [11])  # builds the queue, evicts one of request 0
    assert not hit(cache, [0, 0, 50, 0, 1]).num_tokens
    cache = prefix.release(prefix.claim(cache, hit(cache, [1, 1, 50, 1, 0])), held[1])
    cache, _ = prefix.allocate(cache, [3])
    assert hit(cache, [1, 1, 50, 1, 0]).num_tokens == 4  # it moved behind the others
    assert hit(cache, [2, 2, 50, 2, 0]).num_tokens == 0
    assert hit(cache, [3, 3, 50, 3, 0]).num_tokens == 4
    prefix.check(cache)


def test_check_finds_a_chunk_under_a_wrong_key():
    cache, _ = compute(make(), [1, 2, 3, 4])
    prefix.check(cache)
    (one, first), (other, second) = cache.key_of.items()
    swapped = Map({one: second, other: first})
    with pytest.raises(InvariantViolation, match="prefix:"):
        prefix.check(replace(cache, key_of=swapped))
    with pytest.raises(InvariantViolation, match="prefix:"):
        prefix.check(replace(cache, key_of=Map({one: first})))
    with pytest.raises(InvariantViolation, match="prefix:"):
        prefix.check(replace(cache, chunk_of=cache.chunk_of.delete(first)))
