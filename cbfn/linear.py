"""Linear layers through kernels that are faster than torch's own for the few tokens of a step.

On a CPU, torch hands fp32 matrix products to MKL, which on many machines reaches half of what
oneDNN does. On GPUs for data centres, from Hopper on, 16-bit products of up to 64 tokens run in a
kernel of ours (`cbfn.linear_kernel`). `bench/README.md` has figures. The weights stay where they
are.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cbfn import dependents
from cbfn.operators import LIBRARY

with suppress(ImportError):  # without Triton the runner does not choose the kernel
    from cbfn import linear_kernel

Weight = Float[Tensor, "out in"]


LIBRARY.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
linear: Callable[[Tensor, Weight, Tensor | None], Tensor] = torch.ops.cbfn.linear.default
"""Returns x @ weight.T + bias."""


@torch.library.impl(LIBRARY, "linear", "CPU")
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


@torch.library.impl(LIBRARY, "linear", "CUDA")
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    tiling = linear_kernel.tiling(flat.shape[0], *weight.shape)
    if tiling is None or not flat.is_contiguous() or not weight.is_contiguous():
        return nn.functional.linear(x, weight, bias)
    arrivals = _arrivals(torch.cuda.current_stream(x.device))
    out = linear_kernel.linear(flat, weight, bias, arrivals, tiling, dependent=True)
    return out.view(*x.shape[:-1], -1)


@torch.library.register_fake("cbfn::linear", lib=LIBRARY)
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def use_own_kernels(module: nn.Module) -> bool:
    """Makes linear layers of a module run through the operator above, where that is faster.

    Returns whether any does. Only the module's own forward calls change.
    """
    found = False
    for layer in module.modules():
        replaced = "forward" in vars(layer)  # by the user or a library, and not for us to undo
        if type(layer) is nn.Linear and not replaced and is_faster(layer.weight):
            layer.forward = LinearForward(layer)  # type: ignore[method-assign, assignment]
            found = True
    return found


def is_faster(weight: Weight) -> bool:
    """Returns whether a layer of this weight's device and dtype should run through the operator."""
    if weight.device.type == "cpu":
        mkldnn = torch.ops.mkldnn
        available = torch.backends.mkldnn.is_available() and hasattr(mkldnn, "_linear_pointwise")
        return available and weight.dtype == torch.float32
    return weight.dtype in (torch.bfloat16, torch.float16) and dependents.are_known(weight.device)


class LinearForward:
    """The forward of one linear layer; looks its parameters up at each call."""

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.layer.weight, self.layer.bias)


_ARRIVALS: dict[torch.cuda.Stream, Tensor] = {}


def _arrivals(stream: torch.cuda.Stream) -> Tensor:
    """Returns the zeroed counters of a stream, on which kernels follow one another.

    So graphs that were captured on one stream must not run on two at a time.
    """
    if stream not in _ARRIVALS:
        counters = torch.zeros(linear_kernel.MAX_TILES, dtype=torch.int32, device=stream.device)
        if torch.cuda.is_current_stream_capturing():  # the graph's memory, so its own counters
            return counters
        _ARRIVALS[stream] = counters
    return _ARRIVALS[stream]
