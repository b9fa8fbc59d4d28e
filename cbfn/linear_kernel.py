"""Linear layers of few tokens, in Triton: as fast as their weights can be read.

The product is taken transposed, so that rows of the weight fill the tensor cores and the tokens are
the narrow side. Where the weight has too few rows to occupy the device, its columns are split
(split-K), and the program that ends last adds the parts up, in their order: results do not depend
on who was first. `bench/README.md` has the figures that the tilings come from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int32
from torch import Tensor

from cbfn.dependents import LAUNCH, MAX_TOKENS

MAX_TILES = 4096
WIDE_ROWS = 16_384  # so many rows occupy the device in blocks of any size
BUSY_PROGRAMS = 128
MAX_SPLITS = 4  # more parts take longer to add up than to compute


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is cut.

    Arguments:
        block_rows: rows of the weight that a program computes.
        block_columns: columns of one iteration.
        splits: parts that the columns are cut into.
    """

    block_rows: int
    block_columns: int
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 4


def tiling(num_tokens: int, num_rows: int, num_columns: int) -> Tiling | None:
    """Returns how to cut a product; None where this kernel does not fit it, or is slower."""
    if not 0 < num_tokens <= MAX_TOKENS or num_rows % 64 or num_columns % 128:
        return None
    if num_rows >= WIDE_ROWS and num_rows % 128 == 0:
        return Tiling(64, 128, num_stages=2) if num_tokens <= 32 else Tiling(128, 64, 1, 8, 3)
    tiles = num_rows // 64
    if tiles > MAX_TILES:
        return None
    splits = min(max(round(BUSY_PROGRAMS / tiles), 1), MAX_SPLITS, num_columns // 128)
    return Tiling(64, 128, splits, num_stages=4 if num_tokens <= 32 else 6)


@triton.jit(do_not_specialize=["num_tokens", "splits"])
def _linear(
    x,  # [T, C]
    weight,  # [N, C]
    bias,  # [N]
    out,  # [T, N]
    partial,  # [tiles, S, BN, BT] fp32
    arrivals,  # [tiles]: 0 before and after
    num_tokens,
    num_rows,
    num_columns,
    splits,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    tile, part = tl.program_id(0), tl.program_id(1)
    units = num_columns // BC
    begin = part * units // splits * BC
    end = (part + 1) * units // splits * BC
    row = tile * BN + tl.arange(0, BN)
    token = tl.arange(0, BT)
    column = tl.arange(0, BC)
    there = token < num_tokens
    weights = weight + row.to(tl.int64)[:, None] * num_columns + column[None, :]
    inputs = x + token[:, None] * num_columns + column[None, :]
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros([BN, BT], tl.float32)
    for c in range(begin, end, BC):
        w = tl.load(weights + c)
        v = tl.load(inputs + c, mask=there[:, None], other=0.0)
        acc = tl.dot(w, tl.trans(v), acc, input_precision="ieee")
    if IS_SPLIT:
        inside = tl.arange(0, BN)[:, None] * BT + token[None, :]
        first = partial + tile.to(tl.int64) * (splits * BN * BT) + inside
        tl.store(first + part * (BN * BT), acc)
        tl.debug_barrier()  # the whole program has stored before it arrives
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") != splits - 1:
            return
        tl.store(arrivals + tile, 0)
        acc = tl.zeros([BN, BT], tl.float32)
        for other in range(splits):
            # other programs wrote these: past the first-level cache
            acc += tl.load(first + other * (BN * BT), cache_modifier=".cg")
    if HAS_BIAS:
        acc += tl.load(bias + row).to(tl.float32)[:, None]
    at = token[None, :].to(tl.int64) * num_rows + row[:, None]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=there[None, :])


def linear(
    x: Float[Tensor, "T C"],
    weight: Float[Tensor, "N C"],
    bias: Float[Tensor, "N"] | None,
    arrivals: Int32[Tensor, "tiles"],
    tiling: Tiling,
    dependent: bool = False,
) -> Float[Tensor, "T N"]:
    """Returns x @ weight.T + bias. All are contiguous.

    Arguments:
        arrivals: zeros before and after, one for each block of rows; for one stream only.
        dependent: launched as in `cbfn.dependents`.
    """
    num_tokens, num_columns = x.shape
    num_rows = weight.shape[0]
    out = x.new_empty(num_tokens, num_rows)
    block_tokens = max(triton.next_power_of_2(num_tokens), 16)
    tiles = num_rows // tiling.block_rows
    shape = (tiles, tiling.splits, tiling.block_rows, block_tokens)
    partial = out if tiling.splits == 1 else x.new_empty(shape, dtype=torch.float32)
    _linear[(tiles, tiling.splits)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        partial,
        arrivals,
        num_tokens,
        num_rows,
        num_columns,
        tiling.splits,
        BT=block_tokens,
        BN=tiling.block_rows,
        BC=tiling.block_columns,
        IS_SPLIT=tiling.splits > 1,
        HAS_BIAS=bias is not None,
        DEPENDENT=dependent,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **(LAUNCH if dependent else {}),
    )
    return out
