"""Attention by gathering pages: plain torch, any device; the reference for kernels.

Queries come in tiles: up to Q tokens of one row, which read one run of that row's pages. The pages
of a tile are gathered and padded to the widest, and dense attention runs with a mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int, Int32, Int64
from torch import Tensor
from torch.nn import functional

from cbfn.types import SLIDING, CacheSpec

TILE = 32


@dataclass(frozen=True, slots=True)
class Tiles:
    """The query tiles of one step and one attention type.

    Arguments:
        pages: the first page of each block that a tile reads; 0, a null block's, pads.
        tokens: the queries' places in the batch; the last one is repeated to fill a tile.
        mask: True where a query sees a gathered position.
        unseen: True where no query of a tile does.
    """

    pages: Int64[Tensor, "N M"]
    tokens: Int64[Tensor, "N Q"]
    mask: Bool[Tensor, "N Q S"]
    unseen: Bool[Tensor, "N S"]


def tiles(
    spec: CacheSpec,
    attention_type: str,
    block_table: Int32[np.ndarray, "B M"],
    cu_seqlens: Int32[np.ndarray, "B1"],
    seq_lens: Int32[np.ndarray, "B"],
    least: int = 0,
    tile_size: int = TILE,
) -> tuple[Tiles, Int64[np.ndarray, "n"]]:
    """Returns tiles that cover every token of the given rows, and each token's place in them.

    With `least`, there are at least that many tiles, of the full size, and blocks to each: tiles
    that read one token of a null block pad.
    """
    counts = np.diff(cu_seqlens)
    size = tile_size if least else min(tile_size, int(counts.max()))
    per_row = -(-counts // size)
    row = np.repeat(np.arange(len(counts)), per_row)
    index = np.arange(len(row)) - np.repeat(np.cumsum(per_row) - per_row, per_row)
    start = index * size
    offset = np.minimum(start[:, None] + np.arange(size), counts[row][:, None] - 1)
    tokens = cu_seqlens[row][:, None] + offset
    positions = (seq_lens - counts)[row][:, None] + offset
    window = spec.sliding_window if attention_type == SLIDING else None
    oldest = np.maximum(positions[:, 0] - window + 1, 0) if window else np.zeros_like(start)
    first_column = oldest // spec.page_size
    columns = positions[:, -1] // spec.page_size - first_column + 1
    read = first_column[:, None] + np.arange(columns.max(initial=0))
    wanted = np.arange(columns.max(initial=0)) < columns[:, None]
    blocks = np.where(wanted, block_table[row[:, None], np.where(wanted, read, 0)], 0)
    seen = first_column[:, None] * spec.page_size + np.arange(
        columns.max(initial=0) * spec.page_size
    )
    mask = seen[:, None, :] <= positions[:, :, None]
    if window:
        mask &= seen[:, None, :] > positions[:, :, None] - window
    place = np.repeat(np.cumsum(per_row) - per_row, counts) * size
    place += np.arange(len(place)) - np.repeat(cu_seqlens[:-1] - cu_seqlens[0], counts)
    extra = (0, max(least - len(blocks), 0)), (0, max(least - blocks.shape[1], 0))
    blocks = np.pad(blocks, extra)
    tokens = np.pad(tokens, (extra[0], (0, 0)))
    mask = np.pad(mask, (extra[0], (0, 0), (0, extra[1][1] * spec.page_size)))
    mask[len(mask) - extra[0][1] :, :, 0] = True
    covering = Tiles(
        pages=torch.from_numpy(blocks.astype(np.int64) * (2 * spec.num_layers(attention_type))),
        tokens=torch.from_numpy(tokens.astype(np.int64)),
        mask=torch.from_numpy(mask),
        unseen=torch.from_numpy(~mask.any(axis=1)),
    )
    return covering, place


def attend(
    query: Float[Tensor, "T H D"],
    kv: Float[Tensor, "lines K D"],
    layer_page: Int[Tensor, ""],
    tiles: Tiles,
    page_size: int,
    scale: float,
    softcap: float | None = None,
    sinks: Float[Tensor, "H"] | None = None,
) -> Float[Tensor, "n H D"]:
    """Returns the attention of each tile's queries over its pages, tile by tile; reads `kv` only.

    Arguments:
        layer_page: offset of the layer's K page in a block.
        softcap: scores s become softcap * tanh(s / softcap).
        sinks: a logit for each head that takes part in the softmax and has no value.
    """
    num_tiles, num_blocks = tiles.pages.shape
    _, num_kv_heads, head_dim = kv.shape
    paged = kv.view(-1, page_size * num_kv_heads * head_dim)
    at = (tiles.pages + layer_page).reshape(-1)
    shape = (num_tiles, num_blocks * page_size, num_kv_heads, head_dim)
    key = paged.index_select(0, at).view(shape)
    value = paged.index_select(0, at + 1).view(shape)
    # A mask adds to scores and multiplies values; neither undoes NaN. What no query sees may hold
    # what an earlier owner of a page has left. What some queries see and others do not is cleared
    # too, and made up for in the bias of those that see it. Sums of fp32 tell: NaN and infinity go
    # through them, and nothing that is not near its end comes to infinity.
    sums = key.sum(3, dtype=torch.float32) + value.sum(3, dtype=torch.float32)
    taint = (sums - sums).sum(2)  # [N, S]: 0 or NaN
    cleared = (tiles.unseen | taint.isnan())[:, :, None, None]
    key = key.masked_fill_(cleared, 0.0).transpose(1, 2)
    value = value.masked_fill_(cleared, 0.0).transpose(1, 2)
    bias = torch.where(tiles.mask, taint[:, None], float("-inf"))
    grouped = query[tiles.tokens].transpose(1, 2)  # [N, H, Q, D]
    if softcap is None and sinks is None:
        out = functional.scaled_dot_product_attention(
            grouped,
            key,
            value,
            attn_mask=bias[:, None].to(query.dtype),
            scale=scale,
            enable_gqa=True,
        )
    else:
        out = _attend_by_hand(grouped, key, value, bias, scale, softcap, sinks)
    return out.transpose(1, 2).reshape(-1, *query.shape[1:])


def _attend_by_hand(
    query: Float[Tensor, "N H Q D"],
    key: Float[Tensor, "N K S D"],
    value: Float[Tensor, "N K S D"],
    bias: Float32[Tensor, "N Q S"],
    scale: float,
    softcap: float | None,
    sinks: Float[Tensor, "H"] | None,
) -> Float[Tensor, "N H Q D"]:
    """Returns attention with what `scaled_dot_product_attention` does not have.

    `bias` stands for the scores where it is not 0; keys and values are finite.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query @ key.transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = torch.where((bias == 0)[:, None], scores, bias[:, None])
    if sinks is not None:
        column = sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[2]]
    return weights.to(value.dtype) @ value
