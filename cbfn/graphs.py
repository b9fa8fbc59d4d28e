"""CUDA graphs of the step: one for each bucket, slot and kind of sampling, in one memory pool.

Sharing the pool is safe: graphs never overlap, and what one leaves for the next (inputs, outputs,
the KV cache) lies outside it. Capturing the largest bucket first lets all others fit into its
memory, so that the pool is as large as the largest graph.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from cbfn.plan import Bucket
from cbfn.sample import SamplingNeeds

Key = tuple[Bucket, int, SamplingNeeds]


def buckets(max_tokens: int, max_rows: int, least: int = 1) -> list[Bucket]:
    """Returns the batch shapes to run in, largest first, none of fewer than `least` tokens.

    Decode steps have as many tokens as rows: 1, 2, 4, 8, then multiples of 8 that get further
    apart. Mixed steps have all rows and powers of two of tokens, always more than rows.
    """
    max_rows, max_tokens = max(max_rows, least), max(max_tokens, least)
    rows = {max(1, least), 2, 4}
    step, size = 8, 8
    while size < max_rows:
        rows.add(size)
        if size >= 8 * step:
            step *= 2
        size += step
    decode = {Bucket(r, r) for r in rows if r < max_rows} | {Bucket(max_rows, max_rows)}
    tokens = {max_tokens}
    size = 64
    while size < max_tokens:
        tokens.add(size)
        size *= 2
    mixed = {Bucket(max(t, max_rows + 1), max_rows) for t in tokens}
    return sorted(decode | mixed, reverse=True)


def smallest(buckets: list[Bucket], rows: int, tokens: int) -> Bucket:
    """Returns the smallest of `buckets` for a step of that many rows and tokens."""
    decode = rows == tokens
    return next(
        b
        for b in reversed(buckets)
        if b.rows >= rows and b.tokens >= tokens and (b.rows == b.tokens) == decode
    )


class Graphs:
    """Captured launches that share one pool and one stream, and are destroyed together."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Key, torch.cuda.CUDAGraph] = {}
        self.first_bytes = 0  # of the pool, after the first capture

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool."""
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if s["segment_pool_id"] == self._pool)

    def __contains__(self, key: Key) -> bool:
        return key in self._graphs

    def __len__(self) -> int:
        return len(self._graphs)

    def rehearse(self, launch: Callable[[], None]) -> None:
        """Runs a launch as it will be captured: this compiles, and allocates workspaces."""
        with torch.cuda.stream(self._stream):
            launch()
            self._stream.synchronize()

    def capture(self, key: Key, launch: Callable[[], None]) -> None:
        """Captures `launch`, which was rehearsed with these sizes and this kind of sampling."""
        with torch.cuda.stream(self._stream):
            graph = torch.cuda.CUDAGraph()
            # torch.cuda.graph would collect garbage and empty the cache before each capture
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                launch()
            finally:
                graph.capture_end()
        self._graphs[key] = graph
        if len(self._graphs) == 1:
            self.first_bytes = self.num_bytes

    def replay(self, key: Key) -> None:
        """Enqueues a captured launch on the current stream."""
        self._graphs[key].replay()

    def close(self) -> None:
        """Destroys all graphs at once: one that stays could replay on a workspace that is gone."""
        torch.cuda.synchronize()
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()
