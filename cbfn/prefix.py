"""The prefix cache: which computed chunks hold the KV of which token prefix.

Content is named by a chained hash over full blocks: the digest of block i covers the tokens of
blocks 0 to i and the version of the weights that computed them (as in vLLM's automatic prefix
caching). A chunk is published under the digest of its last block once all its tokens are computed.

A prefix of n tokens is a hit where every full-attention chunk of it is known, and those
sliding-attention chunks that the token at n still sees. So hybrid models share prefixes too:
a sliding chunk that has left the window is released like any other and stays known while unneeded
memory lasts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np
from immutables import Map
from jaxtyping import Int32, Int64

from cbfn import pages
from cbfn.pages import Chunks, Pool, frozen
from cbfn.types import FULL, SLIDING, CacheSpec

Digest = bytes
DIGEST_BYTES = 16
_TYPE_MARKS = {FULL: b"f", SLIDING: b"s"}


def root_digest(weight_version: int) -> Digest:
    """Returns the digest that every chain computed with these weights starts from."""
    return blake2b(b"weights %d" % weight_version, digest_size=DIGEST_BYTES).digest()


def next_digest(parent: Digest, block_tokens: Int32[np.ndarray, "P"]) -> Digest:
    """Returns the digest of the block that follows `parent` and holds `block_tokens`."""
    return blake2b(parent + block_tokens.tobytes(), digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True, slots=True, eq=False)
class PrefixCache:
    """The pool, and what is known of its chunks' content.

    Arguments:
        spec: sizes and attention types.
        enabled: False publishes nothing, so nothing is ever shared.
        root: the digest of the present weights.
        pool: the chunks.
        chunk_of: key -> chunk, for published chunks.
        key_of: the reverse.
        last_used: when a chunk was last released; meaningful for cached chunks.
        clock: larger than any value in `last_used`.
        queue: cached chunks in order of eviction, as of some earlier moment, with their
            `last_used` then; an entry is void once the chunk was used again.
    """

    spec: CacheSpec
    enabled: bool
    root: Digest
    pool: Pool
    chunk_of: Map[Digest, int]
    key_of: Map[int, Digest]
    last_used: Int64[np.ndarray, "C"]
    clock: int
    queue: tuple[Int32[np.ndarray, "Q"], Int64[np.ndarray, "Q"]]


@dataclass(frozen=True, slots=True, eq=False)
class Hit:
    """A known prefix of `num_tokens` tokens; for each type its chunks, from chunk `first` on."""

    num_tokens: int
    first: Mapping[str, int]
    chunks: Mapping[str, Chunks]


def init(spec: CacheSpec, enabled: bool = True, weight_version: int = 0) -> PrefixCache:
    """Returns a cache whose chunks are all free."""
    return PrefixCache(
        spec=spec,
        enabled=enabled,
        root=root_digest(weight_version),
        pool=pages.init(spec.num_chunks),
        chunk_of=Map(),
        key_of=Map(),
        last_used=frozen(np.zeros(spec.num_chunks, np.int64)),
        clock=1,
        queue=_EMPTY_QUEUE,
    )


def match(cache: PrefixCache, digest: Callable[[int], Digest], num_tokens: int) -> Hit:
    """Returns the longest known prefix that leaves one or more of `num_tokens` to compute.

    `digest(i)` is the digest of the i-th block of the tokens. Nothing is claimed: see `claim`.
    """
    spec = cache.spec
    unit = math.lcm(*(spec.chunk_tokens(t) for t in spec.attention_types))
    length = (num_tokens - 1) // unit * unit if cache.enabled else 0
    found: dict[str, dict[int, int]] = {t: {} for t in spec.attention_types}

    def known(attention_type: str, index: int) -> bool:
        per_chunk = spec.blocks_per_chunk(attention_type)
        key = chunk_key(attention_type, digest((index + 1) * per_chunk - 1))
        chunk = cache.chunk_of.get(key)
        if chunk is not None:
            found[attention_type][index] = chunk
        return chunk is not None

    if FULL in spec.attention_types:
        size = spec.chunk_tokens(FULL)
        misses = (i for i in range(length // size) if not known(FULL, i))
        length = min(length, next(misses, length // size) * size // unit * unit)
    if SLIDING in spec.attention_types:
        size = spec.chunk_tokens(SLIDING)
        while length:
            needed = range(length // size - 1, first_visible(spec, length) // size - 1, -1)
            miss = next((i for i in needed if not known(SLIDING, i)), None)
            if miss is None:
                break
            length = miss * size // unit * unit
    first = {t: first_chunk(spec, t, length) for t in spec.attention_types}
    return Hit(
        num_tokens=length,
        first=first,
        chunks={
            t: np.array(
                [found[t][i] for i in range(first[t], length // spec.chunk_tokens(t))], np.int32
            )
            for t in spec.attention_types
        },
    )


def claim(cache: PrefixCache, hit: Hit) -> PrefixCache:
    """Returns the cache with one more owner for each chunk of `hit`, safe from eviction."""
    chunks = np.concatenate(list(hit.chunks.values()))
    return replace(cache, pool=pages.share(cache.pool, chunks)) if len(chunks) else cache


def num_idle(cache: PrefixCache, hit: Hit) -> int:
    """Returns how many of the hit's chunks have no owner, so that claiming takes them away."""
    return sum(int(np.count_nonzero(cache.pool.owners[c] == 0)) for c in hit.chunks.values())


def allocate(
    cache: PrefixCache, counts: Sequence[int]
) -> tuple[PrefixCache, tuple[Chunks, ...]] | None:
    """Returns the cache and `counts[i]` chunks for each i, evicting as few as needed; or None."""
    missing = sum(counts) - cache.pool.num_free
    if missing > cache.pool.num_cached:
        return None
    if missing > 0:
        cache = _evict(cache, missing)
    allocated = pages.allocate(cache.pool, counts)
    if allocated is None:
        return None
    return replace(cache, pool=allocated[0]), allocated[1]


def publish(cache: PrefixCache, keys: Sequence[Digest], chunks: Sequence[int]) -> PrefixCache:
    """Returns the cache with owned, fully computed `chunks` known under `keys`.

    A key that is known already keeps its chunk; the new twin stays private to its owner.
    """
    chunk_of, key_of = cache.chunk_of.mutate(), cache.key_of.mutate()
    fresh = []
    for key, chunk in zip(keys, chunks, strict=True):
        if key not in chunk_of and chunk not in key_of:
            chunk_of[key] = chunk
            key_of[chunk] = key
            fresh.append(chunk)
    if not fresh:
        return cache
    pool = pages.publish(cache.pool, np.array(fresh, np.int32))
    return replace(cache, pool=pool, chunk_of=chunk_of.finish(), key_of=key_of.finish())


def release(cache: PrefixCache, chunks: Chunks) -> PrefixCache:
    """Returns the cache with one owner less for each entry of `chunks`.

    Of those that become cached, the first in `chunks` is evicted first.
    """
    pool, cached = pages.release(cache.pool, chunks)
    if not len(cached):
        return replace(cache, pool=pool)
    last_used = cache.last_used.copy()
    last_used[cached] = np.arange(cache.clock, cache.clock + len(cached))
    clock = cache.clock + len(cached)
    return replace(cache, pool=pool, last_used=frozen(last_used), clock=clock)


def set_weight_version(cache: PrefixCache, weight_version: int) -> PrefixCache:
    """Returns the cache in which nothing computed before is ever a hit."""
    return replace(cache, root=root_digest(weight_version))


def chunk_key(attention_type: str, digest: Digest) -> Digest:
    """Returns the key of the chunk of one attention type whose last block has `digest`."""
    return _TYPE_MARKS[attention_type] + digest


def first_visible(spec: CacheSpec, position: int) -> int:
    """Returns the first position that a sliding layer's token at `position` sees."""
    assert spec.sliding_window is not None
    return max(0, position - spec.sliding_window + 1)


def first_chunk(spec: CacheSpec, attention_type: str, position: int) -> int:
    """Returns the first chunk that the token at `position`, or a later one, may still read."""
    if attention_type == FULL:
        return 0
    return first_visible(spec, position) // spec.chunk_tokens(SLIDING)


def check(cache: PrefixCache) -> None:
    """Raises InvariantViolation unless the two maps and the pool agree."""
    pages.check(cache.pool)
    published = set(np.flatnonzero(cache.pool.published).tolist())
    if published != set(cache.key_of) or len(cache.key_of) != len(cache.chunk_of):
        raise pages.InvariantViolation("prefix: the published chunks are not those that have keys")
    for chunk, key in cache.key_of.items():
        if cache.chunk_of.get(key) != chunk:
            raise pages.InvariantViolation(f"prefix: chunk {chunk} is not under its own key")


_EMPTY_QUEUE = (frozen(np.zeros(0, np.int32)), frozen(np.zeros(0, np.int64)))


def _evict(cache: PrefixCache, count: int) -> PrefixCache:
    """Returns the cache with its `count` least recently used cached chunks free."""
    chunks, stamps = cache.queue
    head = 64 + 4 * count  # few entries are void, as a rule
    valid = _valid(cache, chunks[:head], stamps[:head])
    if len(valid) < count:
        valid = _valid(cache, chunks, stamps)
    if len(valid) < count:
        # whatever is not in the queue was released after all that is: sort once, use it for long
        chunks = np.flatnonzero(cache.pool.published & (cache.pool.owners == 0)).astype(np.int32)
        chunks = chunks[np.argsort(cache.last_used[chunks], kind="stable")]
        stamps = cache.last_used[chunks]
        valid = np.arange(len(chunks))
    rest = valid[count - 1] + 1
    victims = chunks[valid[:count]]
    chunk_of, key_of = cache.chunk_of.mutate(), cache.key_of.mutate()
    for chunk in victims.tolist():
        del chunk_of[key_of.pop(chunk)]
    return replace(
        cache,
        pool=pages.evict(cache.pool, victims),
        chunk_of=chunk_of.finish(),
        key_of=key_of.finish(),
        queue=(frozen(chunks[rest:]), frozen(stamps[rest:])),
    )


def _valid(cache: PrefixCache, chunks: np.ndarray, stamps: np.ndarray) -> np.ndarray:
    pool = cache.pool
    unused = (pool.owners[chunks] == 0) & pool.published[chunks]
    return np.flatnonzero(unused & (cache.last_used[chunks] == stamps))
