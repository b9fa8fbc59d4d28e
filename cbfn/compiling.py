"""Compiling a step function: one graph for all sizes, one region for all layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cbfn.model import Adopted
from cbfn.step import GatheredAttention, StepFunction, StepInputs, StepOutputs

RECOMPILE_LIMIT = 64
OPTIONS: dict[str, Any] = {
    "triton.cudagraphs": False,
    # to time settings of the kernel that writes KV, inductor would copy the whole cache
    "triton.autotune_pointwise": False,
}


def compile_step(step: StepFunction, model: Adopted) -> StepFunction:
    """Returns `step` compiled with `fullgraph=True`, without inductor's own CUDA graphs.

    Sizes that change from step to step are marked as dynamic, so that few graphs serve all of
    them. The decoder layers of the shell become one region, which is compiled once for all layers.
    """
    _share_region(model)
    compiled = torch.compile(step, fullgraph=True, options=OPTIONS)

    def run(inputs: StepInputs, kv: Tensor, previous_token_ids: Tensor) -> StepOutputs:
        _mark(inputs)
        with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
            outputs: StepOutputs = compiled(inputs, kv, previous_token_ids)
        return outputs

    return run


def _share_region(model: Adopted) -> None:
    """Makes the forward of the decoder layers a region that is traced and compiled once."""
    layers = [layer for layer in decoder_layers(model) if layer is not None]
    kinds = {type(layer) for layer in layers}
    regions: dict[type, Callable[..., Any]] = {
        kind: torch.compiler.nested_compile_region(kind.forward) for kind in kinds
    }
    for layer in layers:
        if "forward" not in vars(layer):  # else somebody has replaced it already
            layer.forward = regions[type(layer)].__get__(layer)


def decoder_layers(model: Adopted) -> list[nn.Module]:
    """Returns the entries of the shell's module lists that hold an attention module each."""
    attention = {id(module) for module in model.attention_modules}
    lists = (m for m in model.module.modules() if isinstance(m, nn.ModuleList))
    return [
        layer
        for entries in lists
        for layer in entries
        if any(id(module) in attention for module in layer.modules())
    ]


def _mark(inputs: StepInputs) -> None:
    """Marks the sizes that change from step to step."""
    tokens = (inputs.input_ids, inputs.positions, inputs.carry_index)
    rows = (
        inputs.logits_index,
        inputs.temperature,
        inputs.top_k,
        inputs.top_p,
        inputs.min_p,
        inputs.seeds,
        inputs.sample_positions,
    )
    for tensor in (*tokens, *rows):
        _dynamic(tensor, 0)
    for attention in inputs.attention.values():
        if isinstance(attention, GatheredAttention):
            for tensor in (attention.lines, attention.place, *_tensors(attention.items)):
                _dynamic(tensor, 0)
            if attention.tiles is not None:
                _dynamic(attention.tiles.pages, 0, 1)
                _dynamic(attention.tiles.tokens, 0)
                _dynamic(attention.tiles.mask, 0, 2)
        else:
            _dynamic(attention.slot_mapping, 0)
            _dynamic(attention.block_table, 0)
            _dynamic(attention.seq_lens, 0)
            _dynamic(attention.cu_seqlens, 0)


def _tensors(value: Any) -> list[Tensor]:
    return [getattr(value, name) for name in value.__dataclass_fields__]


def _dynamic(tensor: Tensor, *dims: int) -> None:
    for dim in dims:
        torch._dynamo.maybe_mark_dynamic(tensor, dim)
