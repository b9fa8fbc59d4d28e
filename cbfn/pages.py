"""The pool of KV chunks: who owns what, as a pure value.

Every usable chunk is free, cached or owned. An owned chunk counts its owners; a cached chunk has
none and still holds KV that a later request may reuse; a free chunk holds nothing of worth. The
two null chunks are outside: padding reads the first and writes the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Int32

from cbfn.types import NUM_NULL_CHUNKS, InvariantViolation

Chunks = Int32[np.ndarray, "_"]


def frozen(values: np.ndarray) -> np.ndarray:
    """Returns `values` itself, made read-only."""
    values.flags.writeable = False
    return values


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """The chunks of one KV cache.

    Arguments:
        owners: number of owners of each chunk; the null chunks stay at 0.
        published: True for chunks whose content the prefix cache knows.
        free: the free chunks, a stack whose end is handed out first.
        num_cached: chunks that are published and have no owner.
    """

    owners: Int32[np.ndarray, "C"]
    published: Bool[np.ndarray, "C"]
    free: Int32[np.ndarray, "F"]
    num_cached: int

    @property
    def num_free(self) -> int:
        return len(self.free)

    @property
    def num_available(self) -> int:
        """Chunks that an allocation can get, once cached ones are evicted."""
        return len(self.free) + self.num_cached

    @property
    def num_usable(self) -> int:
        return len(self.owners) - NUM_NULL_CHUNKS

    @property
    def num_owned(self) -> int:
        return self.num_usable - self.num_available


def init(num_chunks: int) -> Pool:
    """Returns a pool of `num_chunks` chunks, null chunks included, all others free."""
    return Pool(
        owners=frozen(np.zeros(num_chunks, np.int32)),
        published=frozen(np.zeros(num_chunks, bool)),
        free=frozen(np.arange(num_chunks - 1, NUM_NULL_CHUNKS - 1, -1, dtype=np.int32)),
        num_cached=0,
    )


def allocate(pool: Pool, counts: Sequence[int]) -> tuple[Pool, tuple[Chunks, ...]] | None:
    """Returns the pool and `counts[i]` free chunks for each i, owned once; all or nothing.

    None where too few are free: the prefix cache evicts first. The same calls on equal pools give
    the same chunks.
    """
    total = sum(counts)
    left = len(pool.free) - total
    if left < 0:
        return None
    taken = pool.free[left:][::-1]
    owners = pool.owners.copy()
    owners[taken] = 1
    parts, start = [], 0
    for count in counts:
        parts.append(taken[start : start + count])
        start += count
    return replace(pool, owners=frozen(owners), free=pool.free[:left]), tuple(parts)


def share(pool: Pool, chunks: Chunks) -> Pool:
    """Returns the pool with one more owner for each of `chunks`, which are owned or cached.

    Raises InvariantViolation for a free chunk, a null chunk, or one given twice.
    """
    _check_handed_out(pool, chunks)
    owners = pool.owners.copy()
    woken = int(np.count_nonzero(owners[chunks] == 0))
    if not pool.published[chunks[owners[chunks] == 0]].all():
        raise InvariantViolation(f"pages: only owned or cached chunks are shared, got {chunks}")
    owners[chunks] += 1
    return replace(pool, owners=frozen(owners), num_cached=pool.num_cached - woken)


def release(pool: Pool, chunks: Chunks) -> tuple[Pool, Chunks]:
    """Returns the pool with one owner less for each entry of `chunks`, and the chunks cached by it.

    A chunk that loses its last owner is cached where it is published, else free. A chunk may stand
    in `chunks` once for each owner that lets go. Raises InvariantViolation for a chunk that has
    fewer owners than that; nothing changes then.
    """
    _check_handed_out(pool, chunks, repeated=True)
    owners = pool.owners.copy()
    np.subtract.at(owners, chunks, 1)
    if (owners[chunks] < 0).any():
        lost = sorted({int(c) for c in chunks[owners[chunks] < 0]})
        raise InvariantViolation(f"pages: only owned chunks are released, got {lost}")
    idle = chunks[owners[chunks] == 0]
    if len(idle) > 1:
        idle = idle[np.sort(np.unique(idle, return_index=True)[1])]
    kept = pool.published[idle]
    cached, freed = idle[kept], idle[~kept]
    pool = replace(
        pool,
        owners=frozen(owners),
        free=_push(pool.free, freed),
        num_cached=pool.num_cached + len(cached),
    )
    return pool, cached


def publish(pool: Pool, chunks: Chunks) -> Pool:
    """Returns the pool with owned `chunks` marked as known to the prefix cache."""
    if (pool.owners[chunks] < 1).any():
        raise InvariantViolation(f"pages: only owned chunks are published, got {chunks}")
    published = pool.published.copy()
    published[chunks] = True
    return replace(pool, published=frozen(published))


def evict(pool: Pool, chunks: Chunks) -> Pool:
    """Returns the pool with cached `chunks` free. Raises InvariantViolation for any other chunk."""
    if (pool.owners[chunks] != 0).any() or not pool.published[chunks].all():
        raise InvariantViolation(f"pages: only cached chunks are evicted, got {chunks}")
    published = pool.published.copy()
    published[chunks] = False
    return replace(
        pool,
        published=frozen(published),
        free=_push(pool.free, chunks),
        num_cached=pool.num_cached - len(chunks),
    )


def check(pool: Pool) -> None:
    """Raises InvariantViolation unless free, cached and owned chunks partition the usable ones."""
    usable = np.arange(NUM_NULL_CHUNKS, len(pool.owners))
    idle = usable[pool.owners[usable] == 0]
    if (pool.owners < 0).any():
        raise InvariantViolation("pages: a chunk has a negative number of owners")
    if pool.owners[:NUM_NULL_CHUNKS].any() or pool.published[:NUM_NULL_CHUNKS].any():
        raise InvariantViolation("pages: a null chunk is owned or published")
    cached = idle[pool.published[idle]]
    if len(cached) != pool.num_cached:
        raise InvariantViolation(
            f"pages: {len(cached)} chunks are cached, and num_cached is {pool.num_cached}"
        )
    free = np.sort(pool.free)
    if not np.array_equal(free, idle[~pool.published[idle]]):
        raise InvariantViolation(f"pages: the free stack {free} is not the set of idle chunks")


def _push(stack: np.ndarray, chunks: np.ndarray) -> np.ndarray:
    return frozen(np.concatenate([stack, chunks[::-1]])) if len(chunks) else stack


def _check_handed_out(pool: Pool, chunks: np.ndarray, repeated: bool = False) -> None:
    if len(chunks) and (chunks.min() < NUM_NULL_CHUNKS or chunks.max() >= len(pool.owners)):
        raise InvariantViolation(f"pages: {chunks} has a null chunk or one outside the pool")
    if not repeated and len(np.unique(chunks)) != len(chunks):
        raise InvariantViolation(f"pages: {chunks} names a chunk twice")
