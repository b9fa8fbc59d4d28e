"""From the arrays of a packed batch to the tensors of a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Int32
from torch import Tensor

from cbfn import kv as kv_cache
from cbfn.attention import gather, split
from cbfn.model import Adopted
from cbfn.plan import DTYPES, Bucket, PackedBatch, layout
from cbfn.sample import SamplingNeeds
from cbfn.step import GatheredAttention, PagedAttention, StepInputs
from cbfn.types import SLIDING, CacheSpec

_TOKENS = ("input_ids", "positions", "carry_index")
_ROWS = ("temperature", "top_k", "top_p", "min_p", "seeds", "sample_positions", "logits_index")
_TENSORS = (*_TOKENS, *_ROWS)


def sampling_needs(
    temperature: np.ndarray, top_k: np.ndarray, top_p: np.ndarray, min_p: np.ndarray
) -> SamplingNeeds:
    """Returns what the rows of a batch ask for."""
    noise = bool(temperature.any())
    return SamplingNeeds(noise, noise and bool(top_k.any() or min_p.any() or (top_p < 1).any()))


def gathered_inputs(
    model: Adopted, spec: CacheSpec, packed: PackedBatch, padded: bool
) -> StepInputs:
    """Returns the inputs of a step that gathers pages; the tensors are copies.

    With `padded`, every size that changes from step to step is at least 2 and every part is there,
    so that one compiled graph serves all steps (0 and 1 would be specialised).
    """
    tensors: dict[str, Any] = {
        name: torch.from_numpy(getattr(packed, name).copy()) for name in _TENSORS
    }
    return StepInputs(
        model=model,
        page_size=spec.page_size,
        needs=sampling_needs(packed.temperature, packed.top_k, packed.top_p, packed.min_p),
        **tensors,
        attention={t: _gathered(spec, packed, t, padded) for t in spec.attention_types},
    )


def _gathered(
    spec: CacheSpec, packed: PackedBatch, attention_type: str, padded: bool
) -> GatheredAttention:
    """Returns the addresses of one attention type: rows of one token, then tiles of the others."""
    rows = packed.num_rows
    cu_seqlens, seq_lens = packed.cu_seqlens[: rows + 1], packed.seq_lens[:rows]
    table = packed.block_table[attention_type][:rows]
    # the scheduler puts rows of one token first
    border = int(np.argmax(np.append(np.diff(cu_seqlens) > 1, True)))
    tokens = np.arange(border)
    least = 2 if padded else 0
    items = split.items(spec, attention_type, table[:border], seq_lens[:border], tokens, least)
    tiles, place = None, tokens
    if border < rows or padded:
        tiles, places = gather.tiles(
            spec, attention_type, table[border:], cu_seqlens[border:], seq_lens[border:], least
        )
        place = np.concatenate([tokens, places + len(items.tokens)])
    missing = len(packed.input_ids) - len(place)
    place = np.append(place, np.zeros(missing, np.int64))  # any finite result will do for padding
    slots = torch.from_numpy(packed.slot_mapping[attention_type].copy())
    lines = kv_cache.first_line(slots, spec.page_size, spec.num_layers(attention_type))
    where = torch.from_numpy(place.astype(np.int64))
    return GatheredAttention(lines, items, tiles, where, spec.page_size)


def paged_inputs(
    model: Adopted,
    spec: CacheSpec,
    bucket: Bucket,
    buffer: Int32[Tensor, "words"],
    needs: SamplingNeeds,
) -> StepInputs:
    """Returns the inputs of a step whose kernels read pages in place: views of `buffer`."""
    where = layout(bucket, spec)
    views: dict[str, Any] = {
        name: buffer[start : start + size].view(getattr(torch, DTYPES.get(name, "int32")))
        for name, (start, size) in where.places.items()
    }
    tables = buffer[where.tables : where.num_words].view(where.table_shape)
    return StepInputs(
        model=model,
        page_size=spec.page_size,
        needs=needs,
        **{name: views[name] for name in _TENSORS},
        attention={
            t: PagedAttention(
                slot_mapping=views[f"slot_mapping.{t}"],
                block_table=tables[:, at].T,
                seq_lens=views["seq_lens"],
                cu_seqlens=views["cu_seqlens"],
                page_size=spec.page_size,
                num_layers=spec.num_layers(t),
                num_kv_heads=model.num_kv_heads,
                window=spec.sliding_window if t == SLIDING else None,
                decode_only=bucket.tokens == bucket.rows,
            )
            for at, t in enumerate(spec.attention_types)
        },
    )
