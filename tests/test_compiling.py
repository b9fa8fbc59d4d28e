"""Few graphs serve all sizes, and later compilations are errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from cbfn import Engine, EngineConfig, RequestOutput, SamplingParams, dependents
from cbfn.compiling import CompiledStep, _Block, _Mode
from cbfn.compiling import _Bound as Bound
from cbfn.epilogues import AddResidual, Gate
from cbfn.linear import gated_linear, linear, linear_add
from cbfn.model import adopt
from cbfn.step import compose
from tests.conftest import small_model


def run(engine: Engine, count: int, **params: Any) -> list[RequestOutput]:
    for number in range(count):
        prompt = [1 + number] * (3 + 5 * number)
        engine.add_request(prompt, SamplingParams(max_tokens=5, **params))
    return [output for output in engine.stream() if output.status.ended]


@pytest.mark.compiled
def test_sizes_change_without_a_compilation_and_another_one_is_an_error() -> None:
    config = EngineConfig(page_size=16, num_blocks=64, max_batch_tokens=64, compile=True)
    with Engine(small_model("llama"), config=config) as engine:
        run(engine, 3, temperature=0)
        step = engine.runner._device.step
        assert isinstance(step, CompiledStep)
        step.freeze()
        for count in (1, 2, 5, 9):
            outputs = run(engine, count, temperature=0)
            assert [len(output.token_ids) for output in outputs] == [5] * count
        torch._dynamo.reset()  # as if a size had not been foreseen
        (output,) = run(engine, 1, temperature=0)
        assert "recompile" in str(output.error)


@pytest.mark.compiled
def test_a_closed_engine_leaves_no_cache_behind() -> None:
    config = EngineConfig(page_size=16, num_blocks=64, max_batch_tokens=64, compile=True)
    with Engine(small_model("llama"), config=config) as engine:
        run(engine, 1, temperature=0)
        kv = engine.runner.kv
    assert kv.numel() == 0  # guards of the compiled layer may hold the tensor


def test_layers_and_what_is_beside_them_are_blocks() -> None:
    model = adopt(small_model("llama"))
    CompiledStep(compose(), model)
    bound = [
        n for n, m in model.module.named_modules() if isinstance(vars(m).get("forward"), Bound)
    ]
    layers = [f"model.layers.{index}" for index in range(2)]
    assert bound == [*layers, "model.norm", "model.rotary_emb"]


def test_layers_with_experts_are_never_dependent() -> None:
    for family, expected in (("llama", True), ("qwen3_moe", False)):
        layer = adopt(small_model(family)).module.model.layers[0]
        assert _Block(layer, _Mode()).has_dependents == expected


def test_kernels_are_dependents_in_decode_steps_of_few_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[bool] = []

    def uncompiled(function: Callable[..., Any], *, options: dict[str, Any], **_: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            ran.append(options.get("triton.enable_pdl", False))
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(torch, "compile", uncompiled)
    monkeypatch.setattr(dependents, "are_known", lambda _: True)
    monkeypatch.setattr(dependents, "MAX_TOKENS", 4)
    config = EngineConfig(page_size=16, num_blocks=64, max_batch_tokens=64, compile=True)
    with Engine(small_model("llama"), config=config) as engine:
        for rows, expected in ((3, True), (4, True), (5, False)):
            for number in range(rows):
                params = SamplingParams(max_tokens=3, temperature=0)
                engine.add_request([1 + number, 2], params)
            engine.step()
            assert set(ran) == {False}  # prompts
            ran.clear()
            engine.step()
            assert set(ran) == {expected}
            list(engine.stream())
            ran.clear()


def traced(function: Callable[..., Any], *args: Any) -> list[Any]:
    """Returns the operators of a function's graph behind the pass; checks that it computes the
    same."""
    graph = make_fx(function, tracing_mode="fake")(*args)
    AddResidual()(graph.graph)
    graph.recompile()
    torch.testing.assert_close(graph(*args), function(*args))
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


def test_sum_with_the_residual_is_the_product_s_where_nothing_else_needs_that() -> None:
    x, w, r = torch.randn(1, 3, 8), torch.randn(8, 8), torch.randn(1, 3, 8)
    assert traced(lambda x, w, r: linear(x, w, None) + r, x, w, r) == [linear_add]
    assert traced(lambda x, w, r: r + linear(x, w, None), x, w, r) == [linear_add]
    assert linear_add not in traced(lambda x, w, r: linear(x, w, None) + r[:, :1], x, w, r)
    assert linear_add not in traced(lambda x, w, r: linear(x, w, None) + 1, x, w, r)
    assert linear_add not in traced(lambda x, w, r: linear(x, w, None) + r.double(), x, w, r)
    assert linear_add not in traced(
        lambda x, w, r: torch.add(linear(x, w, None), r, alpha=2), x, w, r
    )

    def twice(x: Any, w: Any, r: Any) -> Any:
        out = linear(x, w, None)
        return out + r, out * 2

    assert linear_add not in traced(twice, x, w, r)
    both = traced(lambda x, w, r: linear(x, w, None) + linear(r, w, None), x, w, r)
    assert both == [linear, linear_add]


def test_gate_is_the_product_s_where_nothing_else_needs_a_part() -> None:
    x, w = torch.randn(1, 3, 8), torch.randn(12, 8)

    def gated(x: Any, w: Any) -> Any:
        gate, up = linear(x, w, None).split([6, 6], dim=-1)
        return nn.functional.silu(gate) * up

    def turned(x: Any, w: Any) -> Any:
        gate, up = linear(x, w, None).split([6, 6], dim=-1)
        return up * nn.functional.silu(gate)

    def swapped(x: Any, w: Any) -> Any:
        up, gate = linear(x, w, None).split([6, 6], dim=-1)
        return nn.functional.silu(gate) * up

    def uneven(x: Any, w: Any) -> Any:
        gate, up = linear(x, w, None).split([4, 8], dim=-1)
        return nn.functional.silu(gate).repeat(1, 1, 2) * up

    def needed(x: Any, w: Any) -> Any:
        gate, up = linear(x, w, None).split([6, 6], dim=-1)
        return nn.functional.silu(gate) * up + gate

    def other(x: Any, w: Any) -> Any:
        gate, up = linear(x, w, None).split([6, 6], dim=-1)
        return nn.functional.relu(gate) * up

    def with_bias(x: Any, w: Any) -> Any:
        gate, up = linear(x, w, w[:, 0]).split([6, 6], dim=-1)
        return nn.functional.silu(gate) * up

    for function, expected in (
        (gated, True), (turned, True), (swapped, False), (uneven, False), (needed, False),
        (other, False), (with_bias, False),
    ):  # fmt: skip
        graph = torch.fx.symbolic_trace(Wrapped(function))
        Gate()(graph.graph)
        graph.recompile()
        torch.testing.assert_close(graph(x, w), function(x, w))
        targets = [node.target for node in graph.graph.nodes]
        assert (gated_linear in targets) == expected, function.__name__


class Wrapped(nn.Module):
    """A function for `symbolic_trace`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any, w: Any) -> Any:
        return self.function(x, w)


@pytest.mark.compiled
def test_dependent_steps_give_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[Any] = Counter()
    apply = AddResidual.__call__

    def counting(self: AddResidual, graph: Any) -> None:
        apply(self, graph)
        seen.update(node.target for node in graph.nodes)

    model = small_model("llama")
    config = EngineConfig(
        page_size=16, num_blocks=64, max_batch_tokens=64, compile=True, fuse_projections=True
    )
    with Engine(model, config=config) as engine:
        expected = [list(output.token_ids) for output in run(engine, 3, temperature=0)]
    assert not seen
    monkeypatch.setattr(AddResidual, "__call__", counting)
    monkeypatch.setattr(dependents, "are_known", lambda _: True)
    with (
        torch._inductor.config.patch(force_disable_caches=True),
        Engine(model, config=config) as engine,
    ):
        assert [list(output.token_ids) for output in run(engine, 3, temperature=0)] == expected
    assert seen[gated_linear] == 1
    assert seen[linear_add] == 2  # of the attention and of the MLP
