"""Arithmetic of an engine's memory: from shapes to bytes, and from bytes to blocks.

The KV cache and the buffers of the slots are exact. What a step computes is bounded: a caching
allocator gives a freed block to a tensor of another size only where it fits, so each intermediate
result that a layer has is counted once, as if none were ever computed in the memory of another of
another size. Layers run one after the other and do use each other's memory. All captured steps
share one pool, which the largest of them fills.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace

from cbfn.breakdown import MemoryBreakdown
from cbfn.plan import Bucket, layout
from cbfn.sizing import ceil_div
from cbfn.types import NUM_NULL_CHUNKS, CacheSpec

NUM_SLOTS = 2
TOKEN_ID_BYTES = 8
WORD_BYTES = 4
FP32_BYTES = 4
# parts that the decode kernel cuts rows into, beside one for each row: one program each at least
DECODE_PARTS = 256
# a logit's: scaled in fp32 (4); its place in the order, value and index (4 + 8); and what a radix
# sort of a whole batch works in: places there and back (8 + 8), keys (4), and cub's other copies of
# both (4 + 8). All that comes after the sort is smaller and fits into what that leaves.
SAMPLING_BYTES = 48


@dataclass(frozen=True, slots=True)
class StepShape:
    """The largest step of an engine.

    Arguments:
        bucket: its tokens and rows.
        intermediate_size: width of the MLP, of one expert in a mixture of experts.
        num_heads, num_kv_heads, head_dim: H, K, D.
        num_logits: V.
        dtype_bytes: bytes of an element in the model's dtype.
        num_norms: norms of a layer that give all of the hidden size.
        num_experts_per_tok: experts that compute each token; 0: the MLP is none of experts.
        compiled: element-wise operations are fused into the ones that need them.
    """

    bucket: Bucket
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_logits: int
    dtype_bytes: int
    num_norms: int = 2
    num_experts_per_tok: int = 0
    compiled: bool = True


def with_blocks(spec: CacheSpec, num_blocks: int) -> CacheSpec:
    """Returns the cache of as many blocks of the full model: chunks of the same bytes, rounded
    down, but one or more; null chunks on top."""
    chunks = num_blocks * len(spec.layer_types) // spec.chunk_pages
    return replace(spec, num_chunks=NUM_NULL_CHUNKS + max(chunks, 1))


def chunk_bytes(spec: CacheSpec) -> int:
    """Returns the bytes of a chunk."""
    return spec.chunk_pages * spec.page_bytes


def kv_cache_bytes(spec: CacheSpec) -> int:
    """Returns the bytes of the KV cache, null chunks included."""
    return spec.num_chunks * chunk_bytes(spec)


def io_bytes(spec: CacheSpec, bucket: Bucket) -> int:
    """Returns the bytes of both slots' inputs and outputs, on one side of the copies."""
    words = layout(bucket, spec).num_words
    return NUM_SLOTS * (WORD_BYTES * words + TOKEN_ID_BYTES * bucket.rows)


def activation_bytes(shape: StepShape) -> int:
    """Returns the bytes of the intermediate results of a layer, at as many tokens as there are."""
    tokens, rows = shape.bucket.tokens, shape.bucket.rows
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    # the layer's input and output, what both halves add to it, and what norms make of it
    residual = (4 + shape.num_norms) * shape.hidden_size
    # q, k and v as projected, q and k once they are rotated, and the result
    attention = (q + 2 * kv) + (q + kv) + q
    elements = residual + attention + _mlp_elements(shape)
    scratch = 0
    if not shape.compiled:
        # an operation at a time: the norms' fp32 copies, the terms of the rotation, of activations
        inner = max(shape.num_experts_per_tok, 1) * shape.intermediate_size
        elements += 3 * q + kv + 2 * inner
        scratch = 3 * FP32_BYTES * shape.hidden_size * tokens
    # of rows of one token: the result of each of their parts, its maximum and its sum
    parts = FP32_BYTES * shape.num_heads * (shape.head_dim + 2) * (rows + DECODE_PARTS)
    return tokens * elements * shape.dtype_bytes + scratch + parts


def _mlp_elements(shape: StepShape) -> int:
    """Returns the elements of a token in an MLP: gate and up, and their product.

    Each of a token's experts has its own, beside a copy of the input, a result, the result by its
    weight, and the biases of both products.
    """
    hidden, inner = shape.hidden_size, shape.intermediate_size
    return max(3 * inner, shape.num_experts_per_tok * (4 * hidden + 5 * inner))


def breakdown(
    spec: CacheSpec, num_blocks: int, shape: StepShape, base: MemoryBreakdown
) -> MemoryBreakdown:
    """Returns the memory of an engine with `num_blocks` blocks.

    `base` says what depends neither on the blocks nor on the step: limit, weights, other, graphs,
    libraries.
    """
    spec = with_blocks(spec, num_blocks)
    logits = shape.bucket.rows * shape.num_logits
    io = io_bytes(spec, shape.bucket)
    return replace(
        base,
        kv_cache=kv_cache_bytes(spec),
        activations=activation_bytes(shape),
        logits=logits * shape.dtype_bytes,
        sampling=logits * SAMPLING_BYTES,
        io_buffers=io,
        host=io + spec.num_host_chunks * chunk_bytes(spec),
    )


def blocks_that_fit(spec: CacheSpec, shape: StepShape, base: MemoryBreakdown) -> int:
    """Returns the most blocks whose `breakdown` stays within its limit; 0 where none does.

    The inverse of `breakdown(...).total`, which only grows with the blocks: a larger cache lets
    requests grow longer, and their block tables with them.
    """
    most = max(base.limit // (len(spec.layer_types) * spec.page_bytes), 0)
    counts = range(1, most + 1)
    return bisect_right(counts, base.limit, key=lambda n: breakdown(spec, n, shape, base).total)


def useful_blocks(spec: CacheSpec, rows: int) -> int | None:
    """Returns the blocks that `rows` requests of the model's length use; None: any number."""
    if spec.max_model_len is None:
        return None
    return rows * ceil_div(spec.max_model_len, spec.page_size)
