"""The shape of a KV cache."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from cbfn import checks

FULL = "full_attention"
SLIDING = "sliding_attention"
NUM_NULL_CHUNKS = 2  # chunk 0 is read by padding, chunk 1 is written by padding


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The shape of a model's KV cache, in pages, blocks and chunks.

    A block is one page for each layer of one attention type. A chunk holds as many pages as the
    least common multiple of the two types' layer counts, so that it is tiled exactly by blocks of
    either type, and any chunk can serve either.

    Arguments:
        layer_types: "full_attention" or "sliding_attention" for each layer, in order.
        page_size: tokens in a page, P.
        page_bytes: bytes of a page: K and V of P tokens in one layer.
        num_chunks: chunks in the pool, C, with the two null chunks.
        num_host_chunks: chunks in host memory for preempted requests.
        sliding_window: tokens that a sliding layer sees, the token itself included.
        vocab_size: V; None leaves prompts unchecked.
        max_model_len: tokens that the model's positions allow; None: as many as the cache holds.

    Raises ValueError that names the field, the value and what was expected.
    """

    layer_types: tuple[str, ...]
    page_size: int
    page_bytes: int
    num_chunks: int
    sliding_window: int | None = None
    vocab_size: int | None = None
    max_model_len: int | None = None
    num_host_chunks: int = 0
    attention_types: tuple[str, ...] = field(init=False)
    chunk_pages: int = field(init=False)

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        put("layer_types", tuple(checks.texts("CacheSpec.layer_types", self.layer_types)))
        unknown = sorted(set(self.layer_types) - {FULL, SLIDING})
        if unknown or not self.layer_types:
            raise ValueError(
                f'CacheSpec.layer_types: expected one or more of "{FULL}" and "{SLIDING}", '
                f"got {unknown or self.layer_types!r}"
            )
        put("attention_types", tuple(t for t in (FULL, SLIDING) if t in self.layer_types))
        put("chunk_pages", math.lcm(*(self.num_layers(t) for t in self.attention_types)))
        for name, low in (("page_size", 1), ("page_bytes", 1), ("num_chunks", NUM_NULL_CHUNKS + 1)):
            put(name, checks.integer(f"CacheSpec.{name}", getattr(self, name), low))
        put("num_host_chunks", checks.integer("CacheSpec.num_host_chunks", self.num_host_chunks, 0))
        for name in ("sliding_window", "vocab_size", "max_model_len"):
            if getattr(self, name) is not None:
                put(name, checks.integer(f"CacheSpec.{name}", getattr(self, name), 1))
        if SLIDING in self.attention_types and self.sliding_window is None:
            raise ValueError(
                f'CacheSpec.sliding_window: expected an integer for "{SLIDING}" layers, got None'
            )

    @property
    def usable_chunks(self) -> int:
        """Chunks that can be handed out: all but the null chunks."""
        return self.num_chunks - NUM_NULL_CHUNKS

    def num_layers(self, attention_type: str) -> int:
        """Layers of one attention type."""
        return self.layer_types.count(attention_type)

    def blocks_per_chunk(self, attention_type: str) -> int:
        """Blocks of one attention type that tile a chunk."""
        return self.chunk_pages // self.num_layers(attention_type)

    def chunk_tokens(self, attention_type: str) -> int:
        """Tokens whose KV of one attention type fills a chunk."""
        return self.blocks_per_chunk(attention_type) * self.page_size
