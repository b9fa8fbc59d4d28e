"""The prefix cache, against a list of token prefixes in order of their last use."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from cbfn import prefix
from cbfn.testing.fingerprint import fingerprint
from cbfn.testing.hashing import first_read
from cbfn.testing.machines.base import Machine
from cbfn.testing.strategies import cache_specs, prompts
from cbfn.types import FULL, SLIDING, CacheSpec, InvariantViolation


class Content(NamedTuple):
    """What a published chunk holds: the KV of the last tokens of a prefix."""

    attention_type: str
    tokens: tuple[int, ...]
    weights: int


@dataclass(eq=False)
class Holder:
    """A request that holds chunks, by attention type and column."""

    tokens: tuple[int, ...]
    weights: int
    digests: list[bytes]
    held: dict[str, dict[int, int]] = field(default_factory=dict)


class PrefixCacheMachine(Machine):
    """Hits are exact and the longest there are; the least recently used chunk is evicted first.

    Set `prefix` to a module or object with the functions of `cbfn.prefix` to test another cache.
    """

    __test__ = False
    prefix: Any = prefix

    @initialize(spec=cache_specs(min_chunks=2), enabled=st.sampled_from([True, True, True, False]))
    def start(self, spec: CacheSpec, enabled: bool) -> None:
        self.spec, self.enabled, self.weights = spec, enabled, 0
        self.cache = self.prefix.init(spec, enabled=enabled)
        self.owners = dict.fromkeys(range(2, spec.num_chunks), 0)
        self.contents: dict[int, Content] = {}
        self.unused: list[int] = []  # cached chunks, the one to be evicted next first
        self.holders: list[Holder] = []
        self.kept: list[tuple[Any, bytes]] = []

    @rule(tokens=prompts())
    def admit(self, tokens: tuple[int, ...]) -> None:
        """Match, claim what is known, allocate the rest; or nothing, where too little is left."""
        holder = Holder(tokens, self.weights, self._digests(tokens))
        hit = self.prefix.match(self.cache, holder.digests.__getitem__, len(tokens))
        self._check_hit(tokens, hit)
        woken = [c for part in hit.chunks.values() for c in part.tolist() if not self.owners[c]]
        _expect("idle chunks of a hit", self.prefix.num_idle(self.cache, hit), len(woken))
        claimed = self.prefix.claim(self.cache, hit)
        counts = [
            -(-len(tokens) // self.spec.chunk_tokens(t)) - hit.first[t] - len(hit.chunks[t])
            for t in self.spec.attention_types
        ]
        num_free = sum(1 for c, n in self.owners.items() if not n) - len(self.unused)
        available = num_free + len(self.unused) - len(woken)
        digest = fingerprint(claimed)
        done, again = (self.prefix.allocate(claimed, counts) for _ in range(2))
        _expect("a cache that was allocated from", fingerprint(claimed), digest)
        if (done is None) != (sum(counts) > available):
            raise InvariantViolation(f"prefix: {counts} of {available} chunks gave {done}")
        if done is None:
            return
        cache, parts = done
        _expect("the same call", [p.tolist() for p in again[1]], [p.tolist() for p in parts])
        for t, part in zip(self.spec.attention_types, parts, strict=True):
            known = hit.chunks[t].tolist()
            holder.held[t] = dict(enumerate([*known, *part.tolist()], int(hit.first[t])))
            for chunk in known:
                self.owners[chunk] += 1
        self.unused = [c for c in self.unused if c not in woken]
        evicted = self.unused[: max(sum(counts) - num_free, 0)]
        del self.unused[: len(evicted)]
        for chunk in evicted:
            del self.contents[chunk]
        for chunk in np.concatenate(parts).tolist():
            if self.owners[chunk] or chunk in self.contents:
                raise InvariantViolation(f"prefix: chunk {chunk} was handed out, it is in use")
            self.owners[chunk] = 1
        self.holders.append(holder)
        self._move(cache)

    @rule(who=st.integers(0, 15), limit=st.integers(0, 24))
    @precondition(lambda self: bool(self.holders))
    def publish(self, who: int, limit: int) -> None:
        """The first chunks of a request, those that its first `limit` tokens fill."""
        holder = self.holders[who % len(self.holders)]
        keys, chunks = [], []
        known = {content: chunk for chunk, content in self.contents.items()}
        for t, held in holder.held.items():
            size, per_chunk = self.spec.chunk_tokens(t), self.spec.blocks_per_chunk(t)
            for column, chunk in held.items():
                end = (column + 1) * size
                if end > min(limit, len(holder.tokens)):
                    continue
                keys.append(self.prefix.chunk_key(t, holder.digests[(column + 1) * per_chunk - 1]))
                chunks.append(chunk)
                content = Content(t, holder.tokens[:end], holder.weights)
                if content not in known and chunk not in self.contents:
                    self.contents[chunk] = content
                    known[content] = chunk
        if self.enabled:
            self._move(self.prefix.publish(self.cache, keys, chunks))
        else:
            self.contents.clear()

    @rule(who=st.integers(0, 15))
    @precondition(lambda self: bool(self.holders))
    def release(self, who: int) -> None:
        """All chunks of a request, the deepest first."""
        holder = self.holders.pop(who % len(self.holders))
        self._release([c for held in holder.held.values() for _, c in sorted(held.items())[::-1]])

    @rule(tokens=prompts(max_length=12))
    def comes_and_goes(self, tokens: tuple[int, ...]) -> None:
        """A request from its admission to its end, its full chunks published."""
        before = len(self.holders)
        self.admit(tokens)
        if len(self.holders) > before:
            self.publish(before, len(tokens))
            self.release(before)

    @rule(who=st.integers(0, 15), count=st.integers(1, 4))
    @precondition(lambda self: bool(self.holders))
    def slide(self, who: int, count: int) -> None:
        """The first sliding chunks of a request; it goes on with the others."""
        held = self.holders[who % len(self.holders)].held.get(SLIDING, {})
        columns = sorted(held)[:count]
        self._release([held.pop(column) for column in columns[::-1]])

    @rule()
    def weights_updated(self) -> None:
        self.weights += 1
        self._move(self.prefix.set_weight_version(self.cache, self.weights))

    @invariant()
    def agrees_with_the_list(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.prefix.check(self.cache)
        pool = self.cache.pool
        _expect("owners", pool.owners[2:].tolist(), list(self.owners.values()))
        _expect("published chunks", set(self.cache.key_of), set(self.contents))
        idle = {c for c, n in self.owners.items() if not n}
        _expect("free chunks", set(pool.free.tolist()), idle - set(self.unused))
        _expect("cached chunks", pool.num_cached, len(self.unused))

    def rest(self) -> None:
        for holder in self.holders:
            self._release([c for held in holder.held.values() for c in held.values()])
        _expect("chunks owned at rest", self.cache.pool.num_owned, 0)
        for cache, digest in self.kept:
            if fingerprint(cache) != digest:
                raise InvariantViolation("old states: a cache has changed after a later operation")

    def _release(self, chunks: list[int]) -> None:
        for chunk in chunks:
            self.owners[chunk] -= 1
            if not self.owners[chunk] and chunk in self.contents:
                self.unused.append(chunk)
        self._move(self.prefix.release(self.cache, np.array(chunks, np.int32)))

    def _check_hit(self, tokens: tuple[int, ...], hit: Any) -> None:
        """The hit is the longest multiple of whole chunks of which all that is read is known."""
        spec = self.spec
        unit = math.lcm(*(spec.chunk_tokens(t) for t in spec.attention_types))
        by_content = {content: chunk for chunk, content in self.contents.items()}
        longest = (len(tokens) - 1) // unit * unit if self.enabled else 0
        for length in range(longest, -1, -unit):
            needed = {
                t: range(
                    0 if t == FULL else first_read(spec, t, length) // spec.chunk_tokens(t),
                    length // spec.chunk_tokens(t),
                )
                for t in spec.attention_types
            }
            found = {
                t: [
                    by_content.get(
                        Content(t, tokens[: (column + 1) * spec.chunk_tokens(t)], self.weights), -1
                    )
                    for column in columns
                ]
                for t, columns in needed.items()
            }
            if all(-1 not in chunks for chunks in found.values()):
                break
        _expect("tokens of a hit", hit.num_tokens, length)
        _expect("chunks of a hit", {t: c.tolist() for t, c in hit.chunks.items()}, found)
        _expect("columns of a hit", dict(hit.first), {t: r.start for t, r in needed.items()})

    def _digests(self, tokens: tuple[int, ...]) -> list[bytes]:
        page, digest, digests = self.spec.page_size, self.cache.root, []
        for start in range(0, len(tokens) - page + 1, page):
            block = np.array(tokens[start : start + page], np.int32)
            digest = self.prefix.next_digest(digest, block)
            digests.append(digest)
        return digests

    def _move(self, cache: Any) -> None:
        self.kept = [*self.kept[-3:], (self.cache, fingerprint(self.cache))]
        self.cache = cache


def _expect(what: str, got: Any, expected: Any) -> None:
    if got != expected:
        raise InvariantViolation(f"prefix: {what}: expected {expected}, got {got}")
