"""Attention over pages as one operator: kernels for rows of one token, and for rows of more."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cbfn import dependents
from cbfn.attention import decode_kernel, prefill_kernel
from cbfn.operators import LIBRARY

# `arrivals` is zero before and after, so nothing is said of its being written to
LIBRARY.define(
    "paged_attention(Tensor query, Tensor kv, Tensor layer_page, Tensor block_table, "
    "Tensor seq_lens, Tensor cu_seqlens, Tensor table, Tensor arrivals, Tensor? sinks, int unit, "
    "int page_size, int block_pages, float scale, float? softcap, int? window, bool decode_only) "
    "-> Tensor"
)
attend: Callable[..., Tensor] = torch.ops.cbfn.paged_attention.default


@torch.library.impl(LIBRARY, "paged_attention", "CompositeExplicitAutograd")
def _attend(
    query: Tensor,
    kv: Tensor,
    layer_page: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens: Tensor,
    table: Tensor,
    arrivals: Tensor,
    sinks: Tensor | None,
    unit: int,
    page_size: int,
    block_pages: int,
    scale: float,
    softcap: float | None,
    window: int | None,
    decode_only: bool,
) -> Tensor:
    """Returns the attention of each token, [T, H, D], finite for padding; reads `kv` only.

    With `decode_only`, token i is row i's. The other arguments are those of the kernels.
    """
    query = query.contiguous()
    # padding in a mixed batch belongs to no row, so no kernel writes it
    out = torch.empty_like(query) if decode_only else torch.zeros_like(query)
    batch = (query, kv, out, layer_page, block_table, seq_lens, cu_seqlens)
    parts = decode_kernel.Parts(table, arrivals, window, unit)
    decode_kernel.attend(
        *batch,
        parts,
        page_size,
        block_pages,
        scale,
        softcap,
        sinks,
        fill_padding=decode_only,
        dependent=dependents.pay_off(query.device, len(query), decode_only),
    )
    if not decode_only:
        prefill_kernel.attend(*batch, page_size, block_pages, scale, window, softcap, sinks)
    return out


@torch.library.register_fake("cbfn::paged_attention", lib=LIBRARY)
def _(query: Tensor, *_: object) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)
