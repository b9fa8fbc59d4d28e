"""What follows a linear layer, computed with it: a gate's SiLU, the sum with the residual."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

from cbfn.linear import gated_linear, linear, linear_add


class _Pass(CustomGraphPass):
    """A pass whose results are cached until this file changes."""

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


class Gate(_Pass):
    """Replaces a linear layer that two halves are cut from, the SiLU of the first and its product
    with the second by one operator. For graphs as dynamo makes them."""

    def __call__(self, graph: Graph) -> None:
        for node in list(graph.nodes):
            if node.target is not operator.mul:
                continue
            for gate, up in (node.args, node.args[::-1]):
                product = _halved(gate, up)
                if product is not None:
                    with graph.inserting_before(node):
                        both = graph.call_function(gated_linear, product.args[:2])
                    both.meta = dict(node.meta)
                    node.replace_all_uses_with(both)
                    for unused in (node, gate, gate.args[0], up, up.args[0], product):
                        graph.erase_node(unused)
                    break


def _halved(gate: Any, up: Any) -> Node | None:
    """Returns the linear layer that `gate` is the SiLU of the first half of, and `up` the second;
    None where it is not so, or something else needs a part."""
    if not _is_call(gate, torch.nn.functional.silu) or not _is_call(up, operator.getitem):
        return None
    first = gate.args[0]
    if not _is_call(first, operator.getitem) or (first.args[1], up.args[1]) != (0, 1):
        return None
    halves = first.args[0]
    if halves is not up.args[0] or halves.target != "split" or len(halves.users) != 2:
        return None
    product, sizes = halves.args
    if len(set(sizes)) != 1 or len(sizes) != 2 or halves.kwargs != {"dim": -1}:
        return None
    alone = all(len(node.users) == 1 for node in (gate, first, up))
    return product if alone and _is_product(product) and product.args[2] is None else None


def _is_call(node: Any, target: Any) -> bool:
    return isinstance(node, Node) and node.target is target


class AddResidual(_Pass):
    """Replaces a linear layer and the sum with a tensor of its shape by one operator."""

    def __call__(self, graph: Graph) -> None:
        for node in list(graph.nodes):
            if node.target is torch.ops.aten.add.Tensor and not node.kwargs:
                for product, residual in (node.args, node.args[::-1]):
                    if _is_product(product) and _are_alike(product, residual):
                        with graph.inserting_before(node):
                            both = graph.call_function(linear_add, (*product.args, residual))
                        both.meta = dict(node.meta)
                        node.replace_all_uses_with(both)
                        graph.erase_node(node)
                        graph.erase_node(product)
                        break


def _is_product(node: Any) -> bool:
    """Returns whether a node is a linear layer that nothing but the sum needs."""
    return isinstance(node, Node) and node.target is linear and len(node.users) == 1


def _are_alike(product: Node, residual: Any) -> bool:
    """Returns whether both are tensors of one shape and dtype."""
    if not isinstance(residual, Node) or residual is product:
        return False
    a, b = product.meta.get("val"), residual.meta.get("val")
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return a.shape == b.shape and a.dtype == b.dtype
