"""The step: what one launch computes, as functions that compose.

A step function takes the inputs of a launch, the KV cache and the tokens that the launch before
sampled. It writes `kv` in place and is pure otherwise; it compiles as one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Float32, Int, Int32, Int64
from torch import Tensor

from cbfn import kv as kv_cache
from cbfn import sample as sampling
from cbfn.attention import gather, split

with suppress(ImportError):  # without Triton the runner does not choose the kernels
    from cbfn.attention import decode_kernel, paged

from cbfn.model import Adopted
from cbfn.sample import SamplingNeeds

__all__ = [
    "ComposedStep",
    "StepInputs",
    "StepOutputs",
    "carry_over",
    "compose",
    "forward",
    "sample",
]


@dataclass(frozen=True, slots=True)
class GatheredAttention:
    """How a step addresses the KV of one attention type where it gathers pages.

    Arguments:
        lines: the line of each token's K in the first layer of its block.
        items: what rows of one token read.
        tiles: what all other tokens read; None in a step without such tokens.
        place: where each token's result is among those of the items and then the tiles.
    """

    lines: Int64[Tensor, "T"]
    items: split.Items
    tiles: gather.Tiles | None
    place: Int64[Tensor, "T"]
    page_size: int

    @property
    def decode_only(self) -> bool:
        """False: the rows of a padded batch may have any of its tokens."""
        return False

    def prepared(self) -> GatheredAttention:
        """Returns itself: the host has prepared everything."""
        return self

    def attend(
        self,
        query: Tensor,
        kv: Tensor,
        layer_page: Tensor,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Float[Tensor, "T H D"]:
        """Returns the attention of each token; reads `kv` only."""
        how = (self.page_size, scale, softcap, sinks)
        out = split.attend(query, kv, layer_page, self.items, *how)
        if self.tiles is not None:
            out = torch.cat([out, gather.attend(query, kv, layer_page, self.tiles, *how)])
        return out[self.place]


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """How a step addresses the KV of one attention type where kernels read pages in place.

    Arguments:
        num_layers: layers of this type.
        num_kv_heads: K.
        window: tokens that a sliding layer sees, or None.
        decode_only: no row has more than one token, and token i is row i's.
        parts: how rows of one token are cut; None until `prepared`.
    """

    slot_mapping: Int32[Tensor, "T"]
    block_table: Int32[Tensor, "B M"]
    seq_lens: Int32[Tensor, "B"]
    cu_seqlens: Int32[Tensor, "B1"]
    page_size: int
    num_layers: int
    num_kv_heads: int
    window: int | None
    decode_only: bool
    parts: Any = None

    @property
    def lines(self) -> Int64[Tensor, "T"]:
        """The line of each token's K in the first layer of its block."""
        return kv_cache.first_line(self.slot_mapping, self.page_size, self.num_layers)

    def prepared(self) -> PagedAttention:
        """Returns this with what all layers share, computed once a step."""
        if self.parts is not None:
            return self
        lengths = (self.seq_lens, self.cu_seqlens)
        parts = decode_kernel.split(*lengths, self.num_kv_heads, self.window, self.decode_only)
        return replace(self, parts=parts)

    def attend(
        self,
        query: Tensor,
        kv: Tensor,
        layer_page: Tensor,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Float[Tensor, "T H D"]:
        """Returns the attention of each token, finite ones for padding; reads `kv` only."""
        parts = self.prepared().parts
        out: Tensor = paged.attend(
            query,
            kv,
            layer_page,
            self.block_table,
            self.seq_lens,
            self.cu_seqlens,
            parts.table,
            parts.arrivals,
            sinks,
            parts.unit,
            self.page_size,
            2 * self.num_layers,
            scale,
            softcap,
            self.window,
            self.decode_only,
        )
        return out


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The tensors of one launch; the names are those of `cbfn.plan.PackedBatch`."""

    model: Adopted
    page_size: int
    needs: SamplingNeeds
    input_ids: Int32[Tensor, "T"]
    positions: Int32[Tensor, "T"]
    carry_index: Int32[Tensor, "T"]
    logits_index: Int32[Tensor, "B"]
    temperature: Float32[Tensor, "B"]
    top_k: Int32[Tensor, "B"]
    top_p: Float32[Tensor, "B"]
    min_p: Float32[Tensor, "B"]
    seeds: Int64[Tensor, "B"]
    sample_positions: Int32[Tensor, "B"]
    attention: Mapping[str, GatheredAttention | PagedAttention]
    sampler: Callable[..., Tensor] = sampling.sample


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What a step function returns: a sampled token for each row.

    `cbfn.sample.INVALID_TOKEN` fails the row's request, any other id outside of the vocabulary the
    whole step.
    """

    token_ids: Int64[Tensor, "B"]


StepFunction = Callable[[StepInputs, Tensor, Tensor], StepOutputs]


def carry_over(
    input_ids: Int[Tensor, "T"],
    previous_token_ids: Int[Tensor, "R"],
    carry_index: Int[Tensor, "T"],
) -> Int[Tensor, "T"]:
    """Returns the inputs, with the previous launch's token wherever `carry_index` names a row.

    `cbfn.sample.INVALID_TOKEN` becomes 0: an embedding must find something, and what such a row
    computes is dropped.
    """
    carried = previous_token_ids[carry_index.clamp(min=0)].clamp(min=0).to(input_ids.dtype)
    return torch.where(carry_index >= 0, carried, input_ids)


def forward(
    inputs: StepInputs, input_ids: Int[Tensor, "T"], kv: Float[Tensor, "lines K D"]
) -> Float[Tensor, "B V"]:
    """Returns the logits of each row's last token. Writes the tokens' KV in place."""
    size = inputs.page_size
    attention = {name: part.prepared() for name, part in inputs.attention.items()}

    def attend(
        module: Any,
        query: Float[Tensor, "1 H T D"],
        key: Float[Tensor, "1 K T D"],
        value: Float[Tensor, "1 K T D"],
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> Float[Tensor, "1 T H D"]:
        name, page = module.cbfn_attention_type, module.cbfn_layer_page
        lines = attention[name].lines
        kv_cache.write(
            kv, lines, page * size, size, key[0].transpose(0, 1), value[0].transpose(0, 1)
        )
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        queries = query[0].transpose(0, 1)
        return attention[name].attend(queries, kv, page, scale, softcap, s_aux)[None]

    every = all(part.decode_only for part in attention.values())
    kept = None if every else inputs.logits_index
    return inputs.model.logits(attend, input_ids, inputs.positions, kept)


def sample(logits: Float[Tensor, "B V"], inputs: StepInputs) -> Int64[Tensor, "B"]:
    """Returns a token for each row, by the row's sampling parameters; see `cbfn.sample`.

    It is `cbfn.sample.INVALID_TOKEN`, a negative number, where the logits hold NaN or nothing but
    -inf: clamp before indexing. That row's request then fails, and no other.
    """
    return inputs.sampler(
        logits,
        inputs.temperature,
        inputs.top_k,
        inputs.top_p,
        inputs.min_p,
        inputs.seeds,
        inputs.sample_positions,
        inputs.needs,
    )


@dataclass(frozen=True, slots=True)
class ComposedStep:
    """A step function made of parts; see `compose`."""

    carry_over: Callable[..., Tensor]
    forward: Callable[..., Tensor]
    sample: Callable[..., Tensor]

    def __call__(self, inputs: StepInputs, kv: Tensor, previous_token_ids: Tensor) -> StepOutputs:
        input_ids = self.carry_over(inputs.input_ids, previous_token_ids, inputs.carry_index)
        return StepOutputs(self.sample(self.forward(inputs, input_ids, kv), inputs))


def compose(
    carry_over: Callable[..., Tensor] = carry_over,
    forward: Callable[..., Tensor] = forward,
    sample: Callable[..., Tensor] = sample,
) -> ComposedStep:
    """Returns the step function made of these parts; any of them may be the caller's own.

    Raises ValueError for a part that is no function.
    """
    parts = {"carry_over": carry_over, "forward": forward, "sample": sample}
    for name, part in parts.items():
        if not callable(part):
            raise ValueError(f"compose: {name}: expected a function, got {part!r:.80}")
    return ComposedStep(**parts)
