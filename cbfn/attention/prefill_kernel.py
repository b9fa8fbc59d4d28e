"""Attention of prompt chunks over pages, in Triton: every row that has more than one query token.

Tiles of query tokens run side by side (FlashAttention-2, Dao 2023). The query heads of one
key-value head share a tile, so that keys are read once for all of them. Which row a tile belongs to
is searched on the device, so a launch depends on the number of tokens and rows alone.
"""

from __future__ import annotations

import triton
import triton.language as tl
from jaxtyping import Float, Int32
from torch import Tensor

from cbfn.attention.key_tiles import RESERVED_BYTES, shared_memory, tanh, tile_blocks, tile_keys


@triton.jit
def _row_of_tile(cu_seqlens, tile, num_rows, TOKENS: tl.constexpr):
    """The last row whose first tile, cu_seqlens[row] // TOKENS + row, is at or before `tile`."""
    low = 0
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_seqlens + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _attend_keys(
    q,
    acc,
    top,
    total,
    kv,
    table,
    column_stride,
    page_offset,
    head,
    position_q,
    start,
    end,
    K: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    BLOCK_PAGES: tl.constexpr,
    N: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
    CLEAN: tl.constexpr,
):
    """The running softmax over keys `start` to `end - 1`. Unmasked, all of them are seen, and both
    are multiples of N. Clean, a NaN or an infinity in a line reaches those queries alone that see
    it; that is for masked keys."""
    begin = start // N * N
    next_blocks = tile_blocks(table, column_stride, begin, end, P, N)
    for n in range(begin, end, N):
        position = n + tl.arange(0, N)
        blocks = next_blocks
        next_blocks = tile_blocks(table, column_stride, n + N, end, P, N)
        at = tile_keys(kv, blocks, page_offset, n, head, K, D, P, BLOCK_PAGES, N)
        if MASKED:
            valid = ((position >= start) & (position < end))[:, None]
            key = tl.load(at, mask=valid, other=0.0)
            value = tl.load(at + P * K * D, mask=valid, other=0.0)
        else:
            key = tl.load(at)
            value = tl.load(at + P * K * D)
        scores = tl.dot(q, tl.trans(key), input_precision="ieee")
        if SOFTCAP > 0:
            scores = SOFTCAP * tanh(scores * (SCALE / SOFTCAP)) * 1.4426950408889634
        else:
            scores = scores * (SCALE * 1.4426950408889634)
        if CLEAN:
            finite = tl.abs(value.to(tl.float32)) < float("inf")
            broken = tl.max((finite == 0).to(tl.int32), 1) > 0
            value = tl.where(finite, value, 0.0)
            scores = tl.where(broken[None, :], float("nan"), scores)
        if MASKED:
            seen = position[None, :] <= position_q[:, None]
            if WINDOW > 0:
                seen = seen & (position[None, :] > position_q[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # a row that has seen no key yet has no maximum: shift by 0 instead of by -inf
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - shift[:, None])
        shrink = tl.exp2(top - shift)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(value.dtype), value, acc, input_precision="ieee")
        top = new_top
    return acc, top, total


@triton.jit
def _prefill(
    query,  # [T, H, D]
    kv,  # [lines, K, D]
    out,  # [T, H, D]
    block_table,  # [B, M]
    seq_lens,  # [B]
    cu_seqlens,  # [B + 1]
    layer_page,  # []
    sinks,  # [H]
    num_rows,
    row_stride,
    column_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    G: tl.constexpr,
    G_PAD: tl.constexpr,
    P: tl.constexpr,
    BLOCK_PAGES: tl.constexpr,
    TOKENS: tl.constexpr,  # query tokens of a tile
    N: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    tile, head = tl.program_id(0), tl.program_id(1)
    row = _row_of_tile(cu_seqlens, tile, num_rows, TOKENS)
    begin = tl.load(cu_seqlens + row)
    count = tl.load(cu_seqlens + row + 1) - begin
    first = (tile - (begin // TOKENS + row)) * TOKENS
    if (count <= 1) | (first >= count):
        return
    length = tl.load(seq_lens + row)
    index = tl.arange(0, TOKENS * G_PAD)
    token = first + index // G_PAD
    group = index % G_PAD
    dim = tl.arange(0, D)
    q_mask = (token < count) & (group < G)
    q_at = (begin + token).to(tl.int64) * (H * D) + (head * G + group) * D
    q = tl.load(query + q_at[:, None] + dim[None, :], mask=q_mask[:, None], other=0.0)
    # queries beyond the last token repeat its position, so that every line of the tile sees a key
    position_q = length - count + tl.minimum(token, count - 1)
    page_offset = tl.load(layer_page).to(tl.int64)
    table = block_table + row.to(tl.int64) * row_stride
    top = tl.full([TOKENS * G_PAD], float("-inf"), tl.float32)
    total = tl.zeros([TOKENS * G_PAD], tl.float32)
    acc = tl.zeros([TOKENS * G_PAD, D], tl.float32)
    oldest_q = length - count + first
    newest_q = tl.minimum(oldest_q + TOKENS, length) - 1
    if WINDOW > 0:  # the borders of the window cut through the keys at both ends
        start = tl.maximum(oldest_q - WINDOW + 1, 0)
        acc, top, total = _attend_keys(
            q, acc, top, total, kv, table, column_stride, page_offset, head, position_q,
            start, newest_q + 1, K, D, P, BLOCK_PAGES, N, SCALE, WINDOW, SOFTCAP, True, False,
        )  # fmt: skip
    else:
        border = (oldest_q + 1) // N * N  # all queries of the tile see every key before it
        acc, top, total = _attend_keys(
            q, acc, top, total, kv, table, column_stride, page_offset, head, position_q,
            0, border, K, D, P, BLOCK_PAGES, N, SCALE, WINDOW, SOFTCAP, False, False,
        )  # fmt: skip
        acc, top, total = _attend_keys(
            q, acc, top, total, kv, table, column_stride, page_offset, head, position_q,
            border, newest_q + 1, K, D, P, BLOCK_PAGES, N, SCALE, WINDOW, SOFTCAP, True, False,
        )  # fmt: skip
    # A key that is masked weighs nothing, but nothing times NaN is NaN. Where there is any, which
    # no sound model has, the tile is computed once more, by the fewest keys that a matrix product
    # takes: so few hardly need more registers than the loops above, which stay as they are.
    if tl.max(tl.max((acc != acc).to(tl.int32), 1), 0) > 0:
        again = 0
        if WINDOW > 0:
            again = tl.maximum(oldest_q - WINDOW + 1, 0)
        acc, top, total = _attend_keys(
            q, tl.zeros_like(acc), tl.full([TOKENS * G_PAD], float("-inf"), tl.float32),
            tl.zeros_like(total), kv, table, column_stride, page_offset, head, position_q,
            again, newest_q + 1, K, D, P, BLOCK_PAGES, 16, SCALE, WINDOW, SOFTCAP, True, True,
        )  # fmt: skip
    if HAS_SINKS:
        sink = tl.load(sinks + head * G + group, mask=group < G, other=0.0).to(tl.float32)
        total += tl.exp2(sink * 1.4426950408889634 - top)
    result = acc / total[:, None]
    at = q_at[:, None] + dim[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=q_mask[:, None])


def tiling(head_dim: int, element_bytes: int, shared: int) -> tuple[int, int, int, int]:
    """Returns the lines of a query tile, the keys of an iteration, warps and stages, such that
    registers hold the sums, and the stages of keys and values fit into a multiprocessor's `shared`
    bytes beside the queries: three of them where they fit, unless two would let a second program
    share it."""
    if element_bytes == 4:  # no tensor cores: the operands of the products are in registers
        return (32 if head_dim <= 128 else 16), 16, 8, 2
    tile, line = 64, head_dim * element_bytes

    def programs(keys: int, stages: int) -> int:
        return shared // ((tile + 2 * stages * keys) * line + RESERVED_BYTES)

    keys = next((keys for keys in (64, 32) if programs(keys, 2)), 16)
    stages = 3 if programs(keys, 3) >= min(max(programs(keys, 2), 1), 2) else 2
    return tile, keys, 4 if head_dim <= 128 else 8, stages


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
    tile: int | None = None,
    keys: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
) -> None:
    """Writes to `out` the attention of every row that has more than one token; others are skipped.

    Arguments:
        layer_page: offset of the layer's K page in a block, on the device.
        block_pages: pages of a block, 2 * layers of the attention type.
        tile: lines of a query tile, tokens times query heads of a group.
        keys: keys of one iteration. None stands for what `tiling` says, here and for the others.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_rows, num_kv_heads = seq_lens.shape[0], kv.shape[1]
    groups = num_heads // num_kv_heads
    best = tiling(head_dim, kv.element_size(), shared_memory(kv.device))
    tile, keys = tile or best[0], keys or best[1]
    padded = triton.next_power_of_2(groups)
    tokens = max(tile // padded, 1)
    has_sinks = sinks is not None
    _prefill[(num_tokens // tokens + num_rows, num_kv_heads)](
        query,
        kv,
        out,
        block_table,
        seq_lens,
        cu_seqlens,
        layer_page,
        sinks if has_sinks else query,
        num_rows,
        block_table.stride(0),
        block_table.stride(1),
        H=num_heads,
        K=num_kv_heads,
        D=head_dim,
        G=groups,
        G_PAD=padded,
        P=page_size,
        BLOCK_PAGES=block_pages,
        TOKENS=tokens,
        N=keys,
        SCALE=scale,
        WINDOW=window or 0,
        SOFTCAP=softcap or 0.0,
        HAS_SINKS=has_sinks,
        num_warps=num_warps or best[2],
        num_stages=num_stages or best[3],
    )
