"""Decode attention split by pages, in plain torch for inductor to fuse.

Each (row, page) pair is an item of its own: scores, a partial softmax and a partial output. The
items of a row are then combined by their running maxima and sums (split-KV decoding, as in
Flash-Decoding, Dao et al. 2023). Nothing is padded to the longest row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int, Int32, Int64
from torch import Tensor

from cbfn.types import SLIDING, CacheSpec


@dataclass(frozen=True, slots=True)
class Items:
    """The (row, page) pairs that one token of each row reads, of one attention type.

    Arguments:
        tokens: each row's token, its place in the batch.
        pages: the first page of the block of each item.
        row: its row.
        low, high: the offsets `low <= p < high` in the page are seen.
        first, count: row i has items `first[i]` to `first[i] + count[i] - 1`.
        widest: of the length of the largest count; only its shape matters.
    """

    tokens: Int64[Tensor, "R"]
    pages: Int64[Tensor, "N"]
    row: Int64[Tensor, "N"]
    low: Int64[Tensor, "N"]
    high: Int64[Tensor, "N"]
    first: Int64[Tensor, "R"]
    count: Int64[Tensor, "R"]
    widest: Int64[Tensor, "W"]


def items(
    spec: CacheSpec,
    attention_type: str,
    block_table: Int32[np.ndarray, "R M"],
    seq_lens: Int32[np.ndarray, "R"],
    tokens: Int[np.ndarray, "R"],
    least: int = 0,
) -> Items:
    """Returns the items of rows whose one token, at `tokens`, is the last of `seq_lens`.

    With `least`, every size is at least that: rows that read one token of a null block pad.
    """
    missing = max(least - len(tokens), 0)
    block_table = np.pad(block_table, ((0, missing), (0, 0)))
    seq_lens = np.pad(seq_lens, (0, missing), constant_values=1)
    tokens = np.pad(tokens, (0, missing))
    page_size = spec.page_size
    window = spec.sliding_window if attention_type == SLIDING else None
    oldest = np.maximum(seq_lens - window, 0) if window else np.zeros_like(seq_lens)
    begin = oldest // page_size
    count = (seq_lens - 1) // page_size - begin + 1
    row = np.repeat(np.arange(len(seq_lens)), count)
    first = np.cumsum(count) - count
    column = np.arange(len(row)) - first[row] + begin[row]
    low = np.maximum(oldest[row] - column * page_size, 0)
    high = np.minimum(seq_lens[row] - column * page_size, page_size)
    pages = block_table[row, column].astype(np.int64) * (2 * spec.num_layers(attention_type))
    widest = np.zeros(max(count.max(initial=0), least, 1))
    columns = (tokens, pages, row, low, high, first, count, widest)
    return Items(*(torch.from_numpy(column.astype(np.int64)) for column in columns))


def attend(
    query: Float[Tensor, "T H D"],
    kv: Float[Tensor, "lines K D"],
    layer_page: Int[Tensor, ""],
    items: Items,
    page_size: int,
    scale: float,
    softcap: float | None = None,
    sinks: Float[Tensor, "H"] | None = None,
) -> Float[Tensor, "R H D"]:
    """Returns the attention of each row's token over its items; the arguments are `gather`'s.

    Products are written as multiply and sum, so that inductor reads the pages where they are
    instead of gathering them for a matrix product.
    """
    _, num_heads, head_dim = query.shape
    num_kv_heads = kv.shape[1]
    shape = (-1, num_kv_heads, num_heads // num_kv_heads, 1, head_dim)
    paged = kv.view(-1, page_size, num_kv_heads, head_dim)
    at = items.pages + layer_page
    key = paged[at].permute(0, 2, 1, 3)[:, :, None]  # [N, K, 1, P, D]
    own = (query[items.tokens] * scale).view(shape)[items.row]
    scores = (own * key).sum(-1)  # [N, K, G, P]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    offset = torch.arange(page_size, device=query.device)
    seen = (offset >= items.low[:, None]) & (offset < items.high[:, None])
    scores = torch.where(seen[:, None, None], scores, float("-inf"))
    top = scores.amax(-1)
    weight = (scores - top[..., None]).exp()
    total = weight.sum(-1)
    # nothing times NaN is NaN, which an earlier owner of the page may have left
    value = paged[at + 1].masked_fill_(~seen[:, :, None, None], 0.0)
    value = value.permute(0, 2, 1, 3)[:, :, None]
    partial = (weight[..., None] * value).sum(3)  # [N, K, G, D]
    return _combine(partial, top, total, items, sinks).reshape(-1, num_heads, head_dim)


def _combine(
    partial: Float[Tensor, "N K G D"],
    top: Float[Tensor, "N K G"],
    total: Float[Tensor, "N K G"],
    items: Items,
    sinks: Float[Tensor, "H"] | None,
) -> Float[Tensor, "R K G D"]:
    """Returns each row's softmax over all its items."""
    rank = torch.arange(items.widest.shape[0], device=partial.device)
    there = rank < items.count[:, None]
    # what is not there repeats an item of the row: it weighs nothing, and nothing times NaN is NaN
    last = items.count[:, None] - 1
    at = items.first[:, None] + torch.minimum(rank, last)  # [R, W]
    tops = torch.where(there[:, :, None, None], top[at], float("-inf"))
    largest = tops.amax(1)
    if sinks is not None:
        sink = sinks.float().view(1, *largest.shape[1:])
        largest = torch.maximum(largest, sink)
    share = (tops - largest[:, None]).exp()
    below = (total[at] * share).sum(1)
    if sinks is not None:
        below = below + (sink - largest).exp()
    return (partial[at] * share[..., None]).sum(1) / below[..., None]
