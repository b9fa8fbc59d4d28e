"""Linear layers on a CPU through oneDNN.

torch hands fp32 matrix products to MKL, which on many machines reaches half of what oneDNN does for
the few rows of a decode step (`bench/README.md` has figures). The weights stay where they are.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

Weight = Float[Tensor, "out in"]


@torch.library.custom_op(
    "cbfn::linear",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns x @ weight.T + bias."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


@linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def use_onednn(module: nn.Module) -> bool:
    """Makes the fp32 linear layers of a module on a CPU run through oneDNN, if torch has it.

    Returns whether any does. Only the module's own forward calls change.
    """
    if not torch.backends.mkldnn.is_available() or not hasattr(
        torch.ops.mkldnn, "_linear_pointwise"
    ):
        return False
    found = False
    for layer in module.modules():
        replaced = "forward" in vars(layer)  # by the user or a library, and not for us to undo
        if type(layer) is nn.Linear and layer.weight.dtype == torch.float32 and not replaced:
            layer.forward = _Forward(layer)  # type: ignore[method-assign, assignment]
            found = True
    return found


class _Forward:
    """The forward of one linear layer; looks its parameters up at each call."""

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.layer.weight, self.layer.bias)
