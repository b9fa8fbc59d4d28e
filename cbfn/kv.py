"""The KV cache as one flat tensor of lines, addressed by pages.

A line is the K or the V of one token in one layer, a page `page_size` such lines. A block of an
attention type with n layers is 2n consecutive pages: K and V of its first layer, K and V of the
next, and so on. Chunks are tiled by blocks, so block b of that type starts at page 2nb whatever
the chunk it lies in. Layers therefore differ by a constant offset, and nothing is ever a view that
is written to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from cbfn.types import NUM_NULL_CHUNKS, CacheSpec, Move

_ALIGNMENT = 64  # bytes of a cache line


def num_lines(spec: CacheSpec) -> int:
    """Returns how many lines the cache has: K and V of every token slot in every page."""
    return spec.num_chunks * spec.chunk_pages * 2 * spec.page_size


def allocate(
    spec: CacheSpec, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "lines K D"]:
    """Returns an empty cache, zeroed so that what padding reads is finite."""
    shape = (num_lines(spec), num_kv_heads, head_dim)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # calloc's memory is zero without being written, and is not there before it is: start-up is
    # quick, and a large cache costs what is used of it
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size + _ALIGNMENT, np.uint8)
    first = -raw.ctypes.data % _ALIGNMENT
    return torch.from_numpy(raw[first : first + size]).view(dtype).view(shape)


def allocate_host(
    spec: CacheSpec, kv: Float[Tensor, "lines K D"]
) -> Float[Tensor, "host_chunks elements"]:
    """Returns host memory for the chunks of preempted requests, pinned where the cache is not on
    the host itself. Raises RuntimeError where it cannot be had."""
    shape = (spec.num_host_chunks, kv.numel() // spec.num_chunks)
    pinned = kv.device.type != "cpu"
    return torch.empty(shape, dtype=kv.dtype, device="cpu", pin_memory=pinned)


def move(
    spec: CacheSpec,
    kv: Float[Tensor, "lines K D"],
    host: Float[Tensor, "host_chunks elements"],
    moves: Sequence[Move],
) -> None:
    """Enqueues the copies of chunks to the host or back."""
    chunks = kv.view(spec.num_chunks, -1)
    for to_host, device_ids, host_ids, *_ in moves:
        for mine, other in zip(device_ids.tolist(), host_ids.tolist(), strict=True):
            here, there = chunks[mine], host[other - NUM_NULL_CHUNKS]
            source, target = (here, there) if to_host else (there, here)
            target.copy_(source, non_blocking=True)


def layer_pages(spec: CacheSpec) -> list[int]:
    """Returns for each layer the offset of its K page in a block; its V page is the next."""
    seen = dict.fromkeys(spec.attention_types, 0)
    offsets = []
    for attention_type in spec.layer_types:
        offsets.append(2 * seen[attention_type])
        seen[attention_type] += 1
    return offsets


def first_line(slots: Int[Tensor, "T"], page_size: int, num_layers: int) -> Int64[Tensor, "T"]:
    """Returns the line of each slot's K in the first of its block's `num_layers` layers."""
    page = (slots // page_size).long() * (2 * num_layers)
    return page * page_size + slots % page_size


def write(
    kv: Float[Tensor, "lines K D"],
    lines: Int64[Tensor, "T"],
    layer_line: Tensor,
    page_size: int,
    key: Float[Tensor, "T K D"],
    value: Float[Tensor, "T K D"],
) -> None:
    """Writes K and V of one layer in place; `layer_line` is the layer's first line in a block."""
    at = lines + layer_line
    kv.index_copy_(0, at, key)
    kv.index_copy_(0, at + page_size, value)
