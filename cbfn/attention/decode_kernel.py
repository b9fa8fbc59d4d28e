"""Decode attention over pages, in Triton: one query token a row.

Split-KV (Flash-Decoding, Dao et al. 2023): the keys of a row are cut into pieces that run side by
side, and a second kernel combines them. How many pieces a row has follows from its length, which
is read on the device; the launch knows only the largest number of pieces. The query heads of one
key-value head form the rows of one matrix product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int32
from torch import Tensor

BUSY_PROGRAMS = 1024
MOST_PIECES = 64


@triton.jit
def _piece_tokens(length, max_pieces, MIN_TOKENS: tl.constexpr, N: tl.constexpr):
    """Tokens of each piece of a row: a multiple of N, the same for all but the last."""
    pieces = tl.minimum(tl.cdiv(length, MIN_TOKENS), max_pieces)
    return tl.cdiv(tl.cdiv(length, tl.maximum(pieces, 1)), N) * N


@triton.jit
def _decode_pieces(
    query,  # [T, H, D]
    kv,  # [lines, K, D]
    out,  # [T, H, D]
    partial,  # [B, K, max_pieces, G, D] fp32
    stats,  # [B, K, max_pieces, 2, G] fp32: maximum and sum
    block_table,  # [B, M]
    seq_lens,  # [B]
    cu_seqlens,  # [B + 1]
    layer_page,  # []
    sinks,  # [H]
    row_stride,
    column_stride,
    max_pieces,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    G: tl.constexpr,  # H / K
    G_PAD: tl.constexpr,  # at least 16, for the matrix product
    P: tl.constexpr,
    BLOCK_PAGES: tl.constexpr,  # pages of a block of this attention type: 2 * layers
    N: tl.constexpr,  # keys of one iteration
    MIN_TOKENS: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: full attention
    SOFTCAP: tl.constexpr,  # 0: none
    HAS_SINKS: tl.constexpr,
    FILL_PADDING: tl.constexpr,
):
    head, row, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = tl.load(cu_seqlens + row)
    length = tl.load(seq_lens + row)
    group = tl.arange(0, G_PAD)
    dim = tl.arange(0, D)
    q_mask = group < G
    if tl.load(cu_seqlens + row + 1) - token != 1:
        if FILL_PADDING:
            at = row.to(tl.int64) * H * D + (head * G + group[:, None]) * D + dim[None, :]
            zeros = tl.zeros([G_PAD, D], out.dtype.element_ty)
            tl.store(out + at, zeros, mask=q_mask[:, None])
        return
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    size = _piece_tokens(length - first, max_pieces, MIN_TOKENS, N)
    start = first + piece * size
    end = tl.minimum(start + size, length)
    if start >= end:
        return
    key_offset = tl.arange(0, N)
    q_at = token.to(tl.int64) * H * D + (head * G + group[:, None]) * D + dim[None, :]
    q = tl.load(query + q_at, mask=q_mask[:, None], other=0.0)
    page_offset = tl.load(layer_page).to(tl.int64)
    top = tl.full([G_PAD], float("-inf"), tl.float32)
    total = tl.zeros([G_PAD], tl.float32)
    acc = tl.zeros([G_PAD, D], tl.float32)
    table = block_table + row.to(tl.int64) * row_stride
    for n in range(start, end, N):
        position = n + key_offset
        valid = position < end
        block = tl.load(table + (position // P) * column_stride, mask=valid, other=0).to(tl.int64)
        line = (block * BLOCK_PAGES + page_offset) * P + position % P
        at = line[:, None] * (K * D) + head * D + dim[None, :]
        key = tl.load(kv + at, mask=valid[:, None], other=0.0)
        value = tl.load(kv + at + P * K * D, mask=valid[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(key), input_precision="ieee") * SCALE
        if SOFTCAP > 0:
            scores = SOFTCAP * _tanh(scores / SOFTCAP)
        scores = tl.where(valid[None, :], scores * 1.4426950408889634, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(value.dtype), value, acc, input_precision="ieee")
        top = new_top
    if size >= length - first:  # one piece: nothing to combine
        if HAS_SINKS:
            sink = tl.load(sinks + head * G + group, mask=q_mask, other=0.0).to(tl.float32)
            total += tl.exp2(sink * 1.4426950408889634 - top)
        result = acc / total[:, None]
        tl.store(out + q_at, result.to(out.dtype.element_ty), mask=q_mask[:, None])
    else:
        slot = (row * K + head) * max_pieces + piece
        at = (slot.to(tl.int64) * G + group[:, None]) * D + dim[None, :]
        tl.store(partial + at, acc, mask=q_mask[:, None])
        tl.store(stats + slot * 2 * G + group, top, mask=q_mask)
        tl.store(stats + (slot * 2 + 1) * G + group, total, mask=q_mask)


@triton.jit
def _tanh(x):
    """tanh by exp2: exact at both ends, no division of infinities."""
    e = tl.exp2(-2.0 * 1.4426950408889634 * tl.abs(x))
    y = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -y, y)


@triton.jit
def _combine_pieces(
    out,
    partial,
    stats,
    seq_lens,
    cu_seqlens,
    sinks,
    max_pieces,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    PIECES_PAD: tl.constexpr,  # a power of two, max_pieces or more
    MIN_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    q_head, row = tl.program_id(0), tl.program_id(1)
    token = tl.load(cu_seqlens + row)
    length = tl.load(seq_lens + row)
    if tl.load(cu_seqlens + row + 1) - token != 1:
        return
    if WINDOW > 0:
        length = tl.minimum(length, WINDOW)
    size = _piece_tokens(length, max_pieces, MIN_TOKENS, N)
    if size >= length:
        return
    pieces = tl.cdiv(length, size)
    piece = tl.arange(0, PIECES_PAD)
    dim = tl.arange(0, D)
    there = piece < pieces
    slot = (row * K + q_head // G) * max_pieces + piece
    group = q_head % G
    top = tl.load(stats + slot * 2 * G + group, mask=there, other=float("-inf"))
    total = tl.load(stats + (slot * 2 + 1) * G + group, mask=there, other=0.0)
    largest = tl.max(top, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + q_head).to(tl.float32) * 1.4426950408889634
        largest = tl.maximum(largest, sink)
    share = tl.exp2(top - largest)
    below = tl.sum(total * share, 0)
    if HAS_SINKS:
        below += tl.exp2(sink - largest)
    at = (slot.to(tl.int64)[:, None] * G + group) * D + dim[None, :]
    acc = tl.load(partial + at, mask=there[:, None], other=0.0)
    result = tl.sum(acc * share[:, None], 0) / below
    tl.store(out + (token.to(tl.int64) * H + q_head) * D + dim, result.to(out.dtype.element_ty))


def attend(
    query: Float[Tensor, "T H D"],
    kv: Float[Tensor, "lines K D"],
    out: Float[Tensor, "T H D"],
    layer_page: Tensor,
    block_table: Int32[Tensor, "B M"],
    seq_lens: Int32[Tensor, "B"],
    cu_seqlens: Int32[Tensor, "B1"],
    page_size: int,
    block_pages: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, "H"] | None = None,
    fill_padding: bool = False,
    max_pieces: int | None = None,
    min_tokens: int = 256,
    keys: int = 64,
    num_warps: int = 4,
    num_stages: int = 3,
) -> None:
    """Writes to `out` the attention of every row that has exactly one token; others are skipped.

    With `fill_padding`, token i is row i's, and rows without a token get zeros.

    Arguments:
        layer_page: offset of the layer's K page in a block, on the device.
        block_pages: pages of a block, 2 * layers of the attention type.
        max_pieces: pieces of a row at most, up to 64; None: as many as keep the device busy.
        min_tokens: keys of a piece at least.
        keys: keys of one iteration.
    """
    _, num_heads, head_dim = query.shape
    num_rows, num_kv_heads = seq_lens.shape[0], kv.shape[1]
    groups = num_heads // num_kv_heads
    if max_pieces is None:  # about a thousand programs; symbolic where the rows are
        wanted = BUSY_PROGRAMS // (num_rows * num_kv_heads)
        max_pieces = max(min(wanted, MOST_PIECES), 4)
    shape = (num_rows, num_kv_heads, max_pieces)
    partial = torch.empty((*shape, groups, head_dim), dtype=torch.float32, device=query.device)
    stats = torch.empty((*shape, 2, groups), dtype=torch.float32, device=query.device)
    has_sinks = sinks is not None
    _decode_pieces[(num_kv_heads, num_rows, max_pieces)](
        query,
        kv,
        out,
        partial,
        stats,
        block_table,
        seq_lens,
        cu_seqlens,
        layer_page,
        sinks if has_sinks else query,
        block_table.stride(0),
        block_table.stride(1),
        max_pieces,
        H=num_heads,
        K=num_kv_heads,
        D=head_dim,
        G=groups,
        G_PAD=max(16, triton.next_power_of_2(groups)),
        P=page_size,
        BLOCK_PAGES=block_pages,
        N=keys,
        MIN_TOKENS=min_tokens,
        SCALE=scale,
        WINDOW=window or 0,
        SOFTCAP=softcap or 0.0,
        HAS_SINKS=has_sinks,
        FILL_PADDING=fill_padding,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    _combine_pieces[(num_heads, num_rows)](
        out,
        partial,
        stats,
        seq_lens,
        cu_seqlens,
        sinks if has_sinks else query,
        max_pieces,
        H=num_heads,
        K=num_kv_heads,
        D=head_dim,
        G=groups,
        N=keys,
        PIECES_PAD=MOST_PIECES,
        MIN_TOKENS=min_tokens,
        WINDOW=window or 0,
        HAS_SINKS=has_sinks,
        num_warps=4,
    )
