"""Decode attention over pages, in Triton: one query token a row.

The keys of all rows form one line of tiles, row by row and head by head, which is cut into equal
shares, one for each program (as Stream-K cuts matrix products, Osama et al. 2023). A share may hold
several rows, or a part of one; who ends last on a row and head combines its parts by their
log-sum-exp, as in Flash-Decoding (Dao et al. 2023). All of that follows from the lengths on the
device, so a launch depends on nothing that changes from step to step, and ragged rows load the
device evenly. The query heads of one key-value head form the rows of one matrix product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int32
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _decode(
    query,  # [T, H, D]
    kv,  # [lines, K, D]
    out,  # [T, H, D]
    partial,  # [programs, 2, G, D] fp32
    stats,  # [programs, 2, 2, G] fp32: maximum and sum
    arrivals,  # [B * K], 0 before and after: how many parts of a row and head are done
    block_table,  # [B, M]
    seq_lens,  # [B]
    cu_seqlens,  # [B + 1]
    layer_page,  # []
    sinks,  # [H]
    num_rows,
    row_stride,
    column_stride,
    PROGRAMS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    B_PAD: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    G: tl.constexpr,  # H / K
    G_PAD: tl.constexpr,  # at least 16, for the matrix product
    P: tl.constexpr,
    BLOCK_PAGES: tl.constexpr,  # pages of a block of this attention type: 2 * layers
    N: tl.constexpr,  # keys of a tile
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: full attention
    SOFTCAP: tl.constexpr,  # 0: none
    HAS_SINKS: tl.constexpr,
    FILL_PADDING: tl.constexpr,
):
    rows = tl.arange(0, B_PAD)
    there = rows < num_rows
    count = tl.load(cu_seqlens + rows + 1, mask=there, other=0)
    count -= tl.load(cu_seqlens + rows, mask=there, other=0)
    lengths = tl.load(seq_lens + rows, mask=there & (count == 1), other=0)
    tiles = tl.cdiv(tl.minimum(lengths, WINDOW) if WINDOW > 0 else lengths, N)
    if FILL_PADDING:  # a row without a token has one tile without keys
        tiles = tl.where(there, tl.maximum(tiles, 1), 0)
    ends = tl.cumsum(tiles, 0)
    total_tiles = tl.sum(tiles, 0) * K
    share = tl.maximum(tl.cdiv(total_tiles, PROGRAMS), MIN_TILES)
    program = tl.program_id(0)
    at = program * share
    stop = tl.minimum(at + share, total_tiles)

    group = tl.arange(0, G_PAD)
    dim = tl.arange(0, D)
    key_offset = tl.arange(0, N)
    q_mask = group < G
    part_at = group[:, None] * D + dim[None, :]
    page_offset = tl.load(layer_page).to(tl.int64)
    while at < stop:
        row = tl.sum((ends * K <= at).to(tl.int32), 0)
        row_tiles = tl.sum(tl.where(rows == row, tiles, 0), 0)
        length = tl.sum(tl.where(rows == row, lengths, 0), 0)
        within = at - (tl.sum(tl.where(rows == row, ends, 0), 0) - row_tiles) * K
        head = within // row_tiles
        tile = within % row_tiles
        first_tile = at - tile  # of this row and head
        last_tile = tl.minimum(stop, first_tile + row_tiles) - first_tile
        token = row if FILL_PADDING else tl.load(cu_seqlens + row)
        first = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0

        q_at = token.to(tl.int64) * H * D + head * G * D + part_at
        q = tl.load(query + q_at, mask=q_mask[:, None], other=0.0)
        top = tl.full([G_PAD], float("-inf"), tl.float32)
        total = tl.zeros([G_PAD], tl.float32)
        acc = tl.zeros([G_PAD, D], tl.float32)
        table = block_table + row.to(tl.int64) * row_stride
        end = tl.minimum(first + last_tile * N, length)
        for n in range(first + tile * N, end, N):
            position = n + key_offset
            valid = position < end
            block = tl.load(table + (position // P) * column_stride, mask=valid, other=0)
            line = (block.to(tl.int64) * BLOCK_PAGES + page_offset) * P + position % P
            kv_at = line[:, None] * (K * D) + head * D + dim[None, :]
            key = tl.load(kv + kv_at, mask=valid[:, None], other=0.0)
            value = tl.load(kv + kv_at + P * K * D, mask=valid[:, None], other=0.0)
            scores = tl.dot(q, tl.trans(key), input_precision="ieee") * SCALE
            if SOFTCAP > 0:
                scores = SOFTCAP * _tanh(scores / SOFTCAP)
            scores = tl.where(valid[None, :], scores * LOG2_E, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - new_top[:, None])
            shrink = tl.exp2(top - new_top)
            total = total * shrink + tl.sum(weights, 1)
            acc = acc * shrink[:, None]
            acc = tl.dot(weights.to(value.dtype), value, acc, input_precision="ieee")
            top = new_top

        first_program = first_tile // share
        last_program = (first_tile + row_tiles - 1) // share
        done = first_program == last_program
        if not done:
            part = program * 2 + (at != program * share).to(tl.int32)
            tl.store(partial + part * G * D + part_at, acc, mask=q_mask[:, None])
            tl.store(stats + part * 2 * G + group, top, mask=q_mask)
            tl.store(stats + (part * 2 + 1) * G + group, total, mask=q_mask)
            tl.debug_barrier()  # the whole program has stored before it arrives
            counter = arrivals + row * K + head
            arrived = tl.atomic_add(counter, 1, sem="acq_rel")
            done = arrived == last_program - first_program
            if done:
                tl.store(counter, 0)
                top = tl.full([G_PAD], float("-inf"), tl.float32)
                total = tl.zeros([G_PAD], tl.float32)
                acc = tl.zeros([G_PAD, D], tl.float32)
                for other in range(first_program, last_program + 1):
                    part = other * 2 + (first_tile > other * share).to(tl.int32)
                    # other programs wrote these: past the first-level cache
                    stat = stats + part * 2 * G + group
                    part_top = tl.load(stat, mask=q_mask, other=0.0, cache_modifier=".cg")
                    part_total = tl.load(stat + G, mask=q_mask, other=1.0, cache_modifier=".cg")
                    part_acc = tl.load(
                        partial + part * G * D + part_at,
                        mask=q_mask[:, None],
                        other=0.0,
                        cache_modifier=".cg",
                    )
                    new_top = tl.maximum(top, part_top)
                    shrink = tl.exp2(top - new_top)
                    weight = tl.exp2(part_top - new_top)
                    total = total * shrink + part_total * weight
                    acc = acc * shrink[:, None] + part_acc * weight[:, None]
                    top = new_top
        if done:
            if HAS_SINKS:
                sink = tl.load(sinks + head * G + group, mask=q_mask, other=0.0).to(tl.float32)
                total += tl.exp2(sink * LOG2_E - top)
            result = acc / total[:, None]
            if FILL_PADDING:
                result = tl.where(length > 0, result, 0.0)
            tl.store(out + q_at, result.to(out.dtype.element_ty), mask=q_mask[:, None])
        at = first_tile + last_tile


@triton.jit
def _tanh(x):
    """tanh by exp2: exact at both ends, no division of infinities."""
    e = tl.exp2(-2.0 * 1.4426950408889634 * tl.abs(x))
    y = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -y, y)


def attend(
    query: Float[Tensor, "T H D"],
    kv: Float[Tensor, "lines K D"],
    out: Float[Tensor, "T H D"],
    layer_page: Tensor,
    block_table: Int32[Tensor, "B M"],
    seq_lens: Int32[Tensor, "B"],
    cu_seqlens: Int32[Tensor, "B1"],
    arrivals: Int32[Tensor, "R"],
    page_size: int,
    block_pages: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, "H"] | None = None,
    fill_padding: bool = False,
    programs: int = 256,
    min_tiles: int = 2,
    keys: int = 128,
    num_warps: int = 4,
    num_stages: int = 2,
) -> None:
    """Writes to `out` the attention of every row that has exactly one token; others are skipped.

    With `fill_padding`, token i is row i's, and rows without a token get zeros.

    Arguments:
        layer_page: offset of the layer's K page in a block, on the device.
        arrivals: zeros, and zeros again afterwards; K for each row of the largest batch.
        block_pages: pages of a block, 2 * layers of the attention type.
        programs: shares that the keys of all rows are cut into, at most.
        min_tiles: tiles of a share at least.
        keys: keys of a tile.
    """
    _, num_heads, head_dim = query.shape
    num_kv_heads = kv.shape[1]
    groups = num_heads // num_kv_heads
    partial = torch.empty((programs, 2, groups, head_dim), dtype=torch.float32, device=query.device)
    stats = torch.empty((programs, 2, 2, groups), dtype=torch.float32, device=query.device)
    has_sinks = sinks is not None
    _decode[(programs,)](
        query,
        kv,
        out,
        partial,
        stats,
        arrivals,
        block_table,
        seq_lens,
        cu_seqlens,
        layer_page,
        sinks if has_sinks else query,
        seq_lens.shape[0],
        block_table.stride(0),
        block_table.stride(1),
        PROGRAMS=programs,
        MIN_TILES=min_tiles,
        B_PAD=triton.next_power_of_2(arrivals.shape[0] // num_kv_heads),
        H=num_heads,
        K=num_kv_heads,
        D=head_dim,
        G=groups,
        G_PAD=max(16, triton.next_power_of_2(groups)),
        P=page_size,
        BLOCK_PAGES=block_pages,
        N=keys,
        SCALE=scale,
        WINDOW=window or 0,
        SOFTCAP=softcap or 0.0,
        HAS_SINKS=has_sinks,
        FILL_PADDING=fill_padding,
        num_warps=num_warps,
        num_stages=num_stages,
    )
