"""Decode attention over pages, in Triton: one query token a row.

Split-KV (Flash-Decoding, Dao et al. 2023): long rows are cut into parts that run side by side, and
the program that ends last combines them by their log-sum-exp. How rows are cut is decided on the
device, once a step, from the lengths of all rows: a launch depends on nothing that changes from
step to step, and one long row among short ones is shared by the whole device. The query heads of
one key-value head form the rows of one matrix product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int32
from torch import Tensor

from cbfn.attention.key_tiles import RESERVED_BYTES, shared_memory, tanh, tile_blocks, tile_keys
from cbfn.dependents import LAUNCH

BUSY_PROGRAMS = 256  # as many parts, over all heads, as all keys are shared out to
# rows x heads: three programs to a multiprocessor were slower at 256, and faster from 800 on
MANY_PROGRAMS = 2 * BUSY_PROGRAMS
TILE_BYTES = 2**14  # of keys in one iteration
MIN_QUERIES = 16  # rows of a matrix product
OTHER_BYTES = 5 * 2**10 + RESERVED_BYTES  # of shared memory beside tiles and up to 16 queries
UNIT = 128  # keys: where rows are cut, so that the kernel knows how its loads are aligned
SPLIT_ENTRIES = 16  # of the list of parts, that a program makes; fewer where there are many rows
SPLIT_CELLS = 2**14  # entries times rows: what registers hold


class Parts(NamedTuple):
    """How the keys of a batch are cut: part e of each key-value head, in order of rows.

    Arguments:
        table: row (-1: none), first unit of keys, end of the keys, first part of the row, parts of
            the row.
        arrivals: 0 before and after a layer: how many parts of the row that begins here are done.
        window: keys that a row sees, or None.
        unit: keys of a unit.
    """

    table: Int32[Tensor, "E 5"]
    arrivals: Int32[Tensor, "E K"]
    window: int | None
    unit: int


def tiling(
    head_dim: int, element_bytes: int, shared: int, num_programs: int, queries: int = MIN_QUERIES
) -> tuple[int, int, int]:
    """Returns the keys of an iteration, warps, and the most stages, from 2 to 4, with which two
    programs share a multiprocessor of `shared` bytes, if they can: while one begins or ends, the
    other reads. Many more programs than run at once are faster three at a time, each with a stage
    less.

    Arguments:
        queries: query heads of one key-value head, padded.
    """
    keys = max(min(TILE_BYTES // (head_dim * element_bytes), UNIT), 16)
    tile = 2 * keys * head_dim * element_bytes  # and their values; a stage less are kept
    fixed = queries * head_dim * element_bytes + OTHER_BYTES

    def stages(programs: int) -> int:
        return min(max((shared // programs - fixed) // tile, 1), 3) + 1

    timed = (keys, element_bytes, queries) == (64, 2, MIN_QUERIES)
    if num_programs > MANY_PROGRAMS and timed and stages(3) >= 3:
        return keys, 4, stages(3)
    narrow = keys < 64 and element_bytes < 4  # products too small for 8 warps
    return keys, 4 if narrow else 8, stages(2)


def split_tiling(num_rows: int) -> tuple[int, int]:
    """Returns the rows that a program of `split` looks at, padding included, and the entries of the
    list that it makes."""
    padded = max(triton.next_power_of_2(num_rows), 64)  # one kernel for most sizes
    return padded, max(min(SPLIT_ENTRIES, SPLIT_CELLS // padded), 1)


def split(
    seq_lens: Int32[Tensor, "B"],
    cu_seqlens: Int32[Tensor, "B1"],
    num_kv_heads: int,
    window: int | None,
    fill_padding: bool,
    programs: int = BUSY_PROGRAMS,
    min_units: int = 2,
    unit: int = UNIT,
) -> Parts:
    """Returns how to cut the rows of one token; with `fill_padding`, others are one empty part.

    Arguments:
        programs: parts that the keys of all rows and heads would be cut into, were they one row.
        min_units: units of a part at least.
        unit: keys of a unit; parts begin at multiples of it.
    """
    num_rows = seq_lens.shape[0]
    shares = max(programs // num_kv_heads, 1)
    entries = num_rows + shares
    table = torch.empty((entries, 5), dtype=torch.int32, device=seq_lens.device)
    arrivals = torch.empty((entries, num_kv_heads), dtype=torch.int32, device=seq_lens.device)
    padded, own = split_tiling(num_rows)
    _split[(triton.cdiv(entries, own),)](
        table,
        arrivals,
        seq_lens,
        cu_seqlens,
        num_rows,
        entries,
        SHARES=shares,
        K=num_kv_heads,
        K_PAD=triton.next_power_of_2(num_kv_heads),
        B_PAD=padded,
        E=own,
        MIN_UNITS=min_units,
        UNIT=unit,
        WINDOW=window or 0,
        FILL_PADDING=fill_padding,
    )
    return Parts(table, arrivals, window, unit)


@triton.jit(do_not_specialize=["num_rows", "num_entries"])
def _split(
    table,  # [E, 5]
    arrivals,  # [E, K]
    seq_lens,  # [B]
    cu_seqlens,  # [B + 1]
    num_rows,
    num_entries,
    SHARES: tl.constexpr,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    B_PAD: tl.constexpr,
    E: tl.constexpr,
    MIN_UNITS: tl.constexpr,
    UNIT: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: full attention
    FILL_PADDING: tl.constexpr,
):
    rows = tl.arange(0, B_PAD)
    there = rows < num_rows
    count = tl.load(cu_seqlens + rows + 1, mask=there, other=0)
    count -= tl.load(cu_seqlens + rows, mask=there, other=0)
    lengths = tl.load(seq_lens + rows, mask=there & (count == 1), other=0)
    units = tl.cdiv(lengths, UNIT)
    if WINDOW > 0:
        units -= tl.maximum(lengths - WINDOW, 0) // UNIT
    share = tl.maximum(tl.cdiv(tl.sum(units, 0), SHARES), MIN_UNITS)
    parts = tl.cdiv(units, share)
    if FILL_PADDING:
        parts = tl.where(there, tl.maximum(parts, 1), 0)
    ends = tl.cumsum(parts, 0)

    entry = tl.program_id(0) * E + tl.arange(0, E)
    row = tl.sum((ends[None, :] <= entry[:, None]).to(tl.int32), 1)
    mine = rows[None, :] == row[:, None]
    num_parts = tl.sum(tl.where(mine, parts[None, :], 0), 1)
    first = tl.sum(tl.where(mine, (ends - parts)[None, :], 0), 1)
    length = tl.sum(tl.where(mine, lengths[None, :], 0), 1)
    num_units = tl.sum(tl.where(mine, units[None, :], 0), 1)
    size = tl.cdiv(num_units, tl.maximum(num_parts, 1))
    start = tl.cdiv(length, UNIT) - num_units + (entry - first) * size
    exists = entry < num_entries
    at = table + entry * 5
    tl.store(at, tl.where(row < B_PAD, row, -1), mask=exists)
    tl.store(at + 1, start, mask=exists)
    tl.store(at + 2, tl.minimum((start + size) * UNIT, length), mask=exists)
    tl.store(at + 3, first, mask=exists)
    tl.store(at + 4, num_parts, mask=exists)
    head = tl.arange(0, K_PAD)
    zero = tl.zeros([E, K_PAD], tl.int32)
    mask = exists[:, None] & (head < K)[None, :]
    tl.store(arrivals + entry[:, None] * K + head[None, :], zero, mask=mask)


@triton.jit
def _decode(
    query,  # [T, H, D]
    kv,  # [lines, K, D]
    out,  # [T, H, D]
    partial,  # [E, K, G, D] fp32
    stats,  # [E, K, 2, G] fp32: maximum and sum
    table,  # [E, 5]
    arrivals,  # [E, K]
    block_table,  # [B, M]
    seq_lens,  # [B]
    cu_seqlens,  # [B + 1]
    layer_page,  # []
    sinks,  # [H]
    row_stride,
    column_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    G: tl.constexpr,  # H / K
    G_PAD: tl.constexpr,  # at least MIN_QUERIES
    P: tl.constexpr,
    BLOCK_PAGES: tl.constexpr,  # pages of a block of this attention type: 2 * layers
    N: tl.constexpr,  # keys of one iteration
    UNIT: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: full attention
    SOFTCAP: tl.constexpr,  # 0: none
    HAS_SINKS: tl.constexpr,
    FILL_PADDING: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    head, entry = tl.program_id(0), tl.program_id(1)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.load(table + entry * 5)
    if row < 0:
        return
    start = tl.load(table + entry * 5 + 1) * UNIT
    end = tl.load(table + entry * 5 + 2)
    first = tl.load(table + entry * 5 + 3)
    num_parts = tl.load(table + entry * 5 + 4)
    page_offset = tl.load(layer_page).to(tl.int64)
    group = tl.arange(0, G_PAD)
    dim = tl.arange(0, D)
    key_offset = tl.arange(0, N)
    q_mask = group < G
    part_at = group[:, None] * D + dim[None, :]
    token = row if FILL_PADDING else tl.load(cu_seqlens + row)
    q_at = token.to(tl.int64) * H * D + head * G * D + part_at
    q = tl.load(query + q_at, mask=q_mask[:, None], other=0.0)
    top = tl.full([G_PAD], float("-inf"), tl.float32)
    total = tl.zeros([G_PAD], tl.float32)
    acc = tl.zeros([G_PAD, D], tl.float32)
    oldest = 0
    if WINDOW > 0:
        oldest = tl.load(seq_lens + row) - WINDOW
        start = tl.maximum(start, oldest // N * N)
    own_table = block_table + row.to(tl.int64) * row_stride
    next_blocks = tile_blocks(own_table, column_stride, start, end, P, N)
    for n in range(start, end, N):
        position = n + key_offset
        valid = position < end
        if WINDOW > 0:
            valid = valid & (position >= oldest)
        blocks = next_blocks
        next_blocks = tile_blocks(own_table, column_stride, n + N, end, P, N)
        at = tile_keys(kv, blocks, page_offset, n, head, K, D, P, BLOCK_PAGES, N)
        key = tl.load(at, mask=valid[:, None], other=0.0)
        value = tl.load(at + P * K * D, mask=valid[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(key), input_precision="ieee") * SCALE
        if SOFTCAP > 0:
            scores = SOFTCAP * tanh(scores / SOFTCAP)
        scores = tl.where(valid[None, :], scores * 1.4426950408889634, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(value.dtype), value, acc, input_precision="ieee")
        top = new_top
    if num_parts > 1:
        part = entry * K + head
        tl.store(partial + part.to(tl.int64) * G * D + part_at, acc, mask=q_mask[:, None])
        tl.store(stats + part * 2 * G + group, top, mask=q_mask)
        tl.store(stats + (part * 2 + 1) * G + group, total, mask=q_mask)
        tl.debug_barrier()  # the whole program has stored before it arrives
        counter = arrivals + first * K + head
        if tl.atomic_add(counter, 1, sem="acq_rel") != num_parts - 1:
            return
        tl.store(counter, 0)
        top = tl.full([G_PAD], float("-inf"), tl.float32)
        total = tl.zeros([G_PAD], tl.float32)
        acc = tl.zeros([G_PAD, D], tl.float32)
        for other in range(first, first + num_parts):
            part = other * K + head
            # other programs wrote these: past the first-level cache
            stat = stats + part * 2 * G + group
            part_top = tl.load(stat, mask=q_mask, other=0.0, cache_modifier=".cg")
            part_total = tl.load(stat + G, mask=q_mask, other=1.0, cache_modifier=".cg")
            acc_at = partial + part.to(tl.int64) * G * D + part_at
            part_acc = tl.load(acc_at, mask=q_mask[:, None], other=0.0, cache_modifier=".cg")
            new_top = tl.maximum(top, part_top)
            shrink = tl.exp2(top - new_top)
            weight = tl.exp2(part_top - new_top)
            total = total * shrink + part_total * weight
            acc = acc * shrink[:, None] + part_acc * weight[:, None]
            top = new_top
    if HAS_SINKS:
        sink = tl.load(sinks + head * G + group, mask=q_mask, other=0.0).to(tl.float32)
        total += tl.exp2(sink * 1.4426950408889634 - top)
    result = acc / total[:, None]
    if FILL_PADDING:
        result = tl.where(end > start, result, 0.0)
    tl.store(out + q_at, result.to(out.dtype.element_ty), mask=q_mask[:, None])


def attend(
    query: Float[Tensor, "T H D"],
    kv: Float[Tensor, "lines K D"],
    out: Float[Tensor, "T H D"],
    layer_page: Tensor,
    block_table: Int32[Tensor, "B M"],
    seq_lens: Int32[Tensor, "B"],
    cu_seqlens: Int32[Tensor, "B1"],
    parts: Parts,
    page_size: int,
    block_pages: int,
    scale: float,
    softcap: float | None = None,
    sinks: Float[Tensor, "H"] | None = None,
    fill_padding: bool = False,
    keys: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
    dependent: bool = False,
) -> None:
    """Writes to `out` the attention of every row that has exactly one token; others are skipped.

    With `fill_padding`, token i is row i's, and rows without a token get zeros.

    Arguments:
        layer_page: offset of the layer's K page in a block, on the device.
        parts: of `split`, with the same `fill_padding`.
        block_pages: pages of a block, 2 * layers of the attention type.
        keys: keys of one iteration, which divide a unit. None stands for what `tiling` says, here
            and for warps and stages.
        dependent: launched as in `cbfn.dependents`.
    """
    _, num_heads, head_dim = query.shape
    num_kv_heads = kv.shape[1]
    groups = num_heads // num_kv_heads
    programs = seq_lens.shape[0] * num_kv_heads  # of rows that are prompts or padding too
    queries = max(MIN_QUERIES, triton.next_power_of_2(groups))
    shared = shared_memory(kv.device)
    best = tiling(head_dim, kv.element_size(), shared, programs, queries)
    keys = min(keys or best[0], parts.unit)
    if parts.unit % keys:
        raise ValueError(f"attend: expected keys that divide a unit of {parts.unit}, got {keys}")
    entries = parts.table.shape[0]
    shape = (entries, num_kv_heads)
    partial = torch.empty((*shape, groups, head_dim), dtype=torch.float32, device=query.device)
    stats = torch.empty((*shape, 2, groups), dtype=torch.float32, device=query.device)
    has_sinks = sinks is not None
    _decode[(num_kv_heads, entries)](
        query,
        kv,
        out,
        partial,
        stats,
        parts.table,
        parts.arrivals,
        block_table,
        seq_lens,
        cu_seqlens,
        layer_page,
        sinks if has_sinks else query,
        block_table.stride(0),
        block_table.stride(1),
        H=num_heads,
        K=num_kv_heads,
        D=head_dim,
        G=groups,
        G_PAD=queries,
        P=page_size,
        BLOCK_PAGES=block_pages,
        N=keys,
        UNIT=parts.unit,
        SCALE=scale,
        WINDOW=parts.window or 0,
        SOFTCAP=softcap or 0.0,
        HAS_SINKS=has_sinks,
        FILL_PADDING=fill_padding,
        DEPENDENT=dependent,
        num_warps=num_warps or best[1],
        num_stages=num_stages or best[2],
        **(LAUNCH if dependent else {}),
    )
