"""Linear layers of one input as one matrix product: q, k and v; gate and up.

The weights of a group become slices of one tensor, where the user's own parameters then lie: they
keep their identity, there is no second copy, and what an optimizer writes is seen at once. A
parameter whose storage is exchanged leaves the group until `Group.gather` brings it back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cbfn.linear import is_faster, linear

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def fuse(module: nn.Module) -> list[Group]:
    """Makes linear layers that share an input compute together; returns their groups."""
    groups = []
    for parent in module.modules():
        children = dict(parent.named_children())
        for names in GROUPS:
            if all(name in children for name in names):
                layers = [children[name] for name in names]
                if _fit_together(layers):
                    groups.append(Group(layers))
    return groups


class Group:
    """Linear layers that compute together. The first that is called with an input does it for all.

    Where the others get another input after all, they compute on their own.
    """

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        self.sizes = [layer.out_features for layer in layers]
        self.x: Tensor | None = None
        self.parts: tuple[Tensor, ...] = ()
        self.gather()
        self.own_kernel = is_faster(layers[0].weight)
        for index, layer in enumerate(layers):
            layer.forward = GroupForward(self, index)

    def gather(self) -> None:
        """Lays all weights into one tensor, unless they are there; its address never changes."""
        for kind in ("weight", "bias"):
            tensors = [getattr(layer, kind) for layer in self.layers]
            fused = getattr(self.layers[0], f"cbfn_{kind}", None)
            if tensors[0] is None or (fused is not None and _is_made_of(fused, tensors)):
                continue
            if fused is None:
                fused = _common(tensors)  # of an engine before this one, or beside it
                self.layers[0].register_buffer(f"cbfn_{kind}", fused, persistent=False)
            else:
                fused.copy_(torch.cat([tensor.detach() for tensor in tensors]))
            for tensor, part in zip(tensors, fused.split(self.sizes), strict=True):
                tensor.data = part

    def compute(self, index: int, x: Tensor) -> Tensor:
        """Returns layer `index` of `x`."""
        if self.x is not x:
            first = self.layers[0]
            compute = linear if self.own_kernel else nn.functional.linear
            out = compute(x, first.cbfn_weight, getattr(first, "cbfn_bias", None))
            self.x, self.parts = x, out.split(self.sizes, dim=-1)
        part = self.parts[index]
        if index == len(self.sizes) - 1:  # nothing outlives the step
            self.x, self.parts = None, ()
        return part


class GroupForward:
    """The forward of one layer of a group."""

    def __init__(self, group: Group, index: int) -> None:
        self.group = group
        self.index = index

    def __call__(self, x: Tensor) -> Tensor:
        return self.group.compute(self.index, x)


def _fit_together(layers: list[Any]) -> bool:
    """Returns whether layers are plain, and alike but for their width."""
    if any(type(layer) is not nn.Linear or "forward" in vars(layer) for layer in layers):
        return False
    likes = {
        (layer.in_features, layer.bias is None, layer.weight.dtype, layer.weight.requires_grad)
        for layer in layers
    }
    parameters = [id(p) for layer in layers for p in layer.parameters()]
    return len(likes) == 1 and len(set(parameters)) == len(parameters)


def _common(tensors: list[Tensor]) -> Tensor:
    """Returns the tensor that `tensors` lie in, one after the other; else one of their values."""
    first = tensors[0].detach()
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    if len(storages) == 1 and _is_made_of(first, tensors):
        size = (sum(tensor.shape[0] for tensor in tensors), *first.shape[1:])
        return first.as_strided(size, first.stride())
    return torch.cat([tensor.detach() for tensor in tensors])


def _is_made_of(fused: Tensor, tensors: list[Tensor]) -> bool:
    """Returns whether `tensors` lie in `fused`, one after the other."""
    at = fused.data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != at or not tensor.is_contiguous():
            return False
        at += tensor.numel() * tensor.element_size()
    return True
