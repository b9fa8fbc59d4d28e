"""What the kernels that read pages share: tiles of keys, in Triton.

The blocks of a tile are looked up one tile ahead: Triton keeps loads whose addresses are loaded in
the same iteration in flight for half as many iterations, at best.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

HOPPER_SHARED_MEMORY = 228 * 2**10
RESERVED_BYTES = 2**10  # of shared memory, of each program, by the driver


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Returns the bytes of shared memory of a multiprocessor; for a CPU a Hopper GPU's."""
    if device.type == "cpu":
        return HOPPER_SHARED_MEMORY
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_multiprocessor)


@triton.jit
def tile_blocks(table, column_stride, n, end, P: tl.constexpr, N: tl.constexpr):
    """The blocks of keys `n` to `n + N - 1` of a row, of those before `end`: a scalar where one
    page (P keys) holds them all, else [N]. `n` is a multiple of N."""
    if P % N == 0:
        blocks = tl.load(table + (n // P) * column_stride, mask=n < end, other=0)
    else:
        position = n + tl.arange(0, N)
        blocks = tl.load(table + (position // P) * column_stride, mask=position < end, other=0)
    return blocks


@triton.jit
def tile_keys(
    kv,
    blocks,
    page_offset,
    n,
    head,
    K: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    BLOCK_PAGES: tl.constexpr,
    N: tl.constexpr,
):
    """Pointers to the keys of a tile, [N, D]; their values lie P * K * D elements behind."""
    key = tl.arange(0, N)
    inside = n % P if P % N == 0 else (n + key) % P
    line = (blocks.to(tl.int64) * BLOCK_PAGES + page_offset) * P + inside
    first = kv + head * D + tl.arange(0, D)[None, :]
    if P % N == 0:
        at = first + line * (K * D) + key[:, None] * (K * D)
    else:
        at = first + line[:, None] * (K * D)
    return at


@triton.jit
def tanh(x):
    """tanh by exp2: exact at both ends, no division of infinities."""
    e = tl.exp2(-2.0 * 1.4426950408889634 * tl.abs(x))
    y = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -y, y)
