"""The pool of chunks, against a dictionary."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from cbfn import pages
from cbfn.testing.fingerprint import fingerprint
from cbfn.testing.machines.base import Machine
from cbfn.testing.strategies import PageOp, page_ops
from cbfn.types import NUM_NULL_CHUNKS, InvariantViolation


class PagePoolMachine(Machine):
    """Any sequence of operations on a pool does what it does to a dictionary of owner counts.

    Set `pages` to a module or object with the functions of `cbfn.pages` to test another pool.
    """

    __test__ = False
    pages: Any = pages

    @initialize(usable=st.integers(1, 12))
    def start(self, usable: int) -> None:
        self.pool = self.pages.init(usable + NUM_NULL_CHUNKS)
        self.chunks = range(NUM_NULL_CHUNKS, usable + NUM_NULL_CHUNKS)
        self.owners = dict.fromkeys(self.chunks, 0)
        self.published: set[int] = set()
        self.kept: list[tuple[Any, bytes]] = []

    @rule(ops=st.lists(page_ops(), min_size=1, max_size=4))
    def sound(self, ops: list[PageOp]) -> None:
        """Operations that are allowed."""
        for op in ops:
            getattr(self, f"_{op.kind}")(op.picks)
            self.agrees_with_the_dictionary()

    @rule(op=page_ops())
    def unsound(self, op: PageOp) -> None:
        """An operation that is not raises, and leaves the pool as it was."""
        owned = [c for c in self.chunks if self.owners[c]]
        unowned = [c for c in self.chunks if not self.owners[c]]
        outside = [*range(NUM_NULL_CHUNKS), len(self.chunks) + NUM_NULL_CHUNKS]
        wrong = {
            "allocate": [],
            "share": [c for c in unowned if c not in self.published] + outside,
            "release": unowned + outside,
            "publish": unowned,
            "evict": [c for c in self.chunks if c not in self.cached],
        }[op.kind]
        if not wrong or not op.picks:
            return
        good = {"share": owned, "release": owned, "publish": owned, "evict": sorted(self.cached)}
        chunks = [*good[op.kind][:1], wrong[op.picks[0] % len(wrong)]]
        self._refused(op.kind, np.array(chunks, np.int32))

    @rule(op=page_ops())
    def too_often(self, op: PageOp) -> None:
        """A chunk is released once for each owner, and shared once in a call."""
        owned = [c for c in self.chunks if self.owners[c]]
        if owned and op.picks:
            chunk = owned[op.picks[0] % len(owned)]
            twice = [chunk] * (self.owners[chunk] + 1)
            self._refused("release", np.array(twice, np.int32))
            self._refused("share", np.array([chunk, chunk], np.int32))

    @invariant()
    def agrees_with_the_dictionary(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        self.pages.check(pool)
        free = {c for c in self.chunks if not self.owners[c]} - self.cached
        owned = sum(1 for c in self.chunks if self.owners[c])
        _expect("owners", [int(pool.owners[c]) for c in self.chunks], list(self.owners.values()))
        _expect("free chunks", set(pool.free.tolist()), free)
        _expect("free, cached", (pool.num_free, pool.num_cached), (len(free), len(self.cached)))
        _expect("owned", pool.num_owned, owned)
        _expect("available", pool.num_available, len(free) + len(self.cached))
        _expect("null chunks", pool.owners[:NUM_NULL_CHUNKS].tolist(), [0] * NUM_NULL_CHUNKS)

    def rest(self) -> None:
        for pool, digest in self.kept:
            if fingerprint(pool) != digest:
                raise InvariantViolation("old states: a pool has changed after a later operation")
        owned = [c for c in self.chunks for _ in range(self.owners[c])]
        self._move(self.pages.release(self.pool, np.array(owned, np.int32))[0])
        _expect("owned at rest", self.pool.num_owned, 0)
        _expect("available at rest", self.pool.num_available, len(self.chunks))

    @property
    def cached(self) -> set[int]:
        return {c for c in self.published if not self.owners[c]}

    def _allocate(self, picks: tuple[int, ...]) -> None:
        counts = [pick % 5 for pick in picks]
        free = {c for c in self.chunks if not self.owners[c]} - self.cached
        before = fingerprint(self.pool)
        done, again = (self.pages.allocate(self.pool, counts) for _ in range(2))
        if (done is None) != (sum(counts) > len(free)):
            raise InvariantViolation(f"pages: {counts} of {len(free)} free chunks gave {done}")
        _expect("a pool that was allocated from", fingerprint(self.pool), before)
        if done is None:
            return
        pool, parts = done
        _expect("counts", [len(part) for part in parts], counts)
        _expect("the same call", [p.tolist() for p in again[1]], [p.tolist() for p in parts])
        taken = [int(c) for part in parts for c in part]
        if len(set(taken)) < len(taken) or not set(taken) <= free:
            raise InvariantViolation(f"pages: {taken} were handed out, free were {sorted(free)}")
        self.owners.update(dict.fromkeys(taken, 1))
        self._move(pool)

    def _share(self, picks: tuple[int, ...]) -> None:
        chunks = self._pick([c for c in self.chunks if self.owners[c] or c in self.cached], picks)
        pool = self.pages.share(self.pool, np.array(chunks, np.int32))
        for chunk in chunks:
            self.owners[chunk] += 1
        self._move(pool)

    def _release(self, picks: tuple[int, ...]) -> None:
        owned = [c for c in self.chunks for _ in range(self.owners[c])]
        places = self._pick(list(range(len(owned))), picks)
        chunks = [owned[place] for place in places]
        pool, cached = self.pages.release(self.pool, np.array(chunks, np.int32))
        for chunk in chunks:
            self.owners[chunk] -= 1
        # in the order in which they were given
        idle = [c for c in dict.fromkeys(chunks) if not self.owners[c] and c in self.published]
        _expect("newly cached", cached.tolist(), idle)
        self._move(pool)

    def _publish(self, picks: tuple[int, ...]) -> None:
        chunks = self._pick([c for c in self.chunks if self.owners[c]], picks)
        self.published.update(chunks)
        self._move(self.pages.publish(self.pool, np.array(chunks, np.int32)))

    def _evict(self, picks: tuple[int, ...]) -> None:
        chunks = self._pick(sorted(self.cached), picks)
        self.published.difference_update(chunks)
        self._move(self.pages.evict(self.pool, np.array(chunks, np.int32)))

    def _refused(self, kind: str, chunks: np.ndarray) -> None:
        before = fingerprint(self.pool)
        try:
            getattr(self.pages, kind)(self.pool, chunks)
        except InvariantViolation:
            _expect(f"the pool after a refused {kind}", fingerprint(self.pool), before)
            return
        raise InvariantViolation(f"pages: {kind} took {chunks}, owners are {self.owners}")

    def _pick(self, candidates: list[int], picks: tuple[int, ...]) -> list[int]:
        if not candidates:
            return []
        return list(dict.fromkeys(candidates[pick % len(candidates)] for pick in picks))

    def _move(self, pool: Any) -> None:
        self.kept = [*self.kept[-3:], (self.pool, fingerprint(self.pool))]
        self.pool = pool


def _expect(what: str, got: Any, expected: Any) -> None:
    if got != expected:
        raise InvariantViolation(f"pages: {what}: expected {expected}, got {got}")
