"""Compiling a step: one block for all decoder layers of a kind, two functions for sampling.

Tracing a whole model takes the better part of a minute for each kind of step. A decoder layer
takes seconds, and serves all layers once their parameters are its inputs. What lies beside the
layers (positions, the last norm) is a block each, and on a GPU so is carry-over. The rest
(embedding, head) is a handful of kernels, and a CUDA graph replays those as well.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from cbfn import dependents
from cbfn import sample as sampling
from cbfn.fusing import GroupForward
from cbfn.linear import LinearForward
from cbfn.model import Adopted, decoder_layers, has_experts
from cbfn.step import (
    ComposedStep,
    GatheredAttention,
    StepFunction,
    StepInputs,
    StepOutputs,
    carry_over,
)

RECOMPILE_LIMIT = 64
OPTIONS: dict[str, Any] = {
    "triton.cudagraphs": False,
    # to time settings of the kernel that writes KV, inductor would copy the whole cache
    "triton.autotune_pointwise": False,
}


class CompiledStep:
    """A step function with the shell's decoder layers, what is beside them, its own sampling and,
    on a GPU, its carry-over compiled.

    Each is compiled with `fullgraph=True`, without inductor's own CUDA graphs, and with the sizes
    that change from step to step as symbols, so that few graphs serve all sizes of 2 and more: one
    for mixed steps, one for decode steps, and one for those whose kernels are dependents.
    """

    def __init__(self, step: StepFunction, model: Adopted) -> None:
        self._mode = _Mode()
        # Apart, as inductor may put both into one kernel of several passes over a row, which hands
        # noise from one pass to the next in memory, and where a warp then reads what another has
        # not written yet (pytorch/pytorch, issue 190517; torch 2.11 and 2.13)
        self._likeliest = _OfLines(sampling.likeliest, self._mode)
        self._draw = _OfLines(sampling.draw, self._mode)
        on_cpu = model.device.type == "cpu"
        if isinstance(step, ComposedStep) and step.carry_over is carry_over and not on_cpu:
            # five kernels otherwise; to a CPU they are cheaper than a call of a compiled function
            step = replace(step, carry_over=_OfLines(carry_over, self._mode))
        # a CPU's argmax has nothing to fuse; of the filters, inductor cannot compile the running
        # sum over a large vocabulary (torch 2.11)
        self._step = step
        likeliest = sampling.likeliest if on_cpu else self._likeliest
        self._sampler = functools.partial(sampling.sample, likeliest=likeliest, draw=self._draw)
        self._blocks: dict[Hashable, _Block] = {}
        self._device = model.device
        for layer in (*decoder_layers(model), *beside_layers(model)):
            if _is_plain(layer):
                kind = _kind(layer)
                if kind not in self._blocks:
                    self._blocks[kind] = _Block(layer, self._mode)
                layer.forward = _Bound(self._blocks[kind], layer)

    def __call__(self, inputs: StepInputs, kv: Tensor, previous_token_ids: Tensor) -> StepOutputs:
        attention = {name: part.prepared() for name, part in inputs.attention.items()}
        inputs = replace(inputs, attention=attention, sampler=self._sampler)
        num_tokens, num_rows = len(inputs.input_ids), len(inputs.logits_index)
        decodes = num_tokens == num_rows
        self._mode.dependent = dependents.pay_off(self._device, num_tokens, decodes)
        _mark(inputs)
        with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
            return self._step(inputs, kv, previous_token_ids)

    def freeze(self) -> None:
        """Makes it an error that anything of the step is compiled once more."""
        self._mode.frozen = True


@dataclass(slots=True)
class _Mode:
    """What holds for all that is compiled of a step.

    Arguments:
        dependent: kernels are launched as in `cbfn.dependents`.
        frozen: another compilation is an error.
    """

    dependent: bool = False
    frozen: bool = False


class _Compiled:
    """A function compiled as one graph, for each way of launching kernels."""

    has_dependents = True

    def __init__(self, function: Callable[..., Any], mode: _Mode) -> None:
        self.mode = mode
        self._compiled = [
            torch.compile(function, fullgraph=True, options={**OPTIONS, **more})
            for more in ({}, {"triton.enable_pdl": True})
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiled = self._compiled[self.mode.dependent and self.has_dependents]
        if not self.mode.frozen:
            return compiled(*args, **kwargs)
        with torch.compiler.set_stance("fail_on_recompile"):
            return compiled(*args, **kwargs)


class _OfLines(_Compiled):
    """A function of tensors that have a line for each row or token."""

    def __call__(self, *tensors: Tensor) -> Any:
        for tensor in tensors:
            _dynamic(tensor, 0)
        return super().__call__(*tensors)


class _Block(_Compiled):
    """A decoder layer as a function of its parameters.

    The template has no values: a compiled `functional_call` that first sees a module's own
    parameters would keep to them.
    """

    def __init__(self, layer: nn.Module, mode: _Mode) -> None:
        template = copy.deepcopy(layer).to("meta")
        template._forward_pre_hooks.clear()  # they run around the block
        template._forward_hooks.clear()
        # what routes tokens to experts may fill tensors, and inductor's kernels that only fill wait
        # for nothing (torch 2.13): what is launched behind them could come too early
        self.has_dependents = not has_experts(layer)

        def block(tensors: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
            return functional_call(template, tensors, args, kwargs)

        super().__init__(block, mode)


class _Bound:
    """The forward of one decoder layer: the block with this layer's parameters and buffers."""

    def __init__(self, block: _Block, layer: nn.Module) -> None:
        self.block = block
        self.layer = layer
        # not the tensors themselves: a parameter may be replaced
        self.places = [
            (f"{prefix}.{leaf}" if prefix else leaf, tensors, leaf)
            for prefix, module in layer.named_modules()
            for tensors in (module._parameters, module._buffers)
            for leaf, tensor in tensors.items()
            if tensor is not None
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # in the caller's own graph of the whole step
            return type(self.layer).forward(self.layer, *args, **kwargs)
        for leaf in torch.utils._pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.dim() > 1:  # [1, T, ...]
                _dynamic(leaf, 1)
        tensors = {name: owner[leaf] for name, owner, leaf in self.places}
        return self.block(tensors, *args, **kwargs)


def beside_layers(model: Adopted) -> list[nn.Module]:
    """Returns the modules that compute something beside the decoder layers: norms, positions.

    Embeddings and heads are one kernel each already.
    """
    layers = {id(layer) for layer in decoder_layers(model)}
    single = (nn.Embedding, nn.Linear)
    return [
        child
        for parent in model.module.modules()
        if any(id(entry) in layers for child in parent.children() for entry in child.children())
        for child in parent.children()
        if not isinstance(child, (*single, nn.ModuleList, nn.ModuleDict))
    ]


def _is_plain(layer: nn.Module) -> bool:
    """Returns whether a block computes what the layer does: nobody has put anything in its way."""
    if "forward" in vars(layer):
        return False
    for module in layer.modules():
        forward = vars(module).get("forward")
        if forward is not None and not isinstance(forward, (LinearForward, GroupForward)):
            return False
        if module is not layer and (module._forward_pre_hooks or module._forward_hooks):
            return False
    return True


def _kind(layer: nn.Module) -> Hashable:
    """Returns what two layers have to have in common to be one block."""
    plain = (bool, int, float, str, type(None), tuple, list, torch.dtype)
    modules = tuple(
        (
            name,
            type(module),
            type(vars(module).get("forward")),
            tuple(
                (key, repr(value))
                for key, value in sorted(vars(module).items())
                if isinstance(value, plain) and key != "layer_idx"
            ),
        )
        for name, module in layer.named_modules()
    )
    tensors = (*layer.named_parameters(), *layer.named_buffers())
    return modules, tuple((name, t.shape, t.stride(), t.dtype) for name, t in tensors)


def _mark(inputs: StepInputs) -> None:
    """Marks the sizes that change from step to step."""
    for attention in inputs.attention.values():
        if isinstance(attention, GatheredAttention):
            for tensor in (attention.lines, attention.place, *_tensors(attention.items)):
                _dynamic(tensor, 0)
            if attention.tiles is not None:
                _dynamic(attention.tiles.pages, 0, 1)
                _dynamic(attention.tiles.tokens, 0)
                _dynamic(attention.tiles.mask, 0, 2)
                _dynamic(attention.tiles.unseen, 0, 1)
        else:
            for tensor in (
                attention.slot_mapping,
                attention.block_table,
                attention.seq_lens,
                attention.cu_seqlens,
                attention.parts.table,
                attention.parts.arrivals,
            ):
                _dynamic(tensor, 0)


def _tensors(value: Any) -> list[Tensor]:
    return [getattr(value, name) for name in value.__dataclass_fields__]


def _dynamic(tensor: Tensor, *dims: int) -> None:
    for dim in dims:
        torch._dynamo.maybe_mark_dynamic(tensor, dim)
