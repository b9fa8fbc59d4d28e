"""Few graphs serve all sizes, and later compilations are errors."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from cbfn import Engine, EngineConfig, RequestOutput, SamplingParams, dependents
from cbfn.compiling import CompiledStep, _Block, _Mode, _OfLines
from cbfn.compiling import _Bound as Bound
from cbfn.model import adopt
from cbfn.step import ComposedStep, carry_over, compose
from tests.conftest import small_model


def run(engine: Engine, count: int, **params: Any) -> list[RequestOutput]:
    for number in range(count):
        prompt = [1 + number] * (3 + 5 * number)
        engine.add_request(prompt, SamplingParams(max_tokens=5, **params))
    return [output for output in engine.stream() if output.status.ended]


WHOLE_PROGRAM = re.compile(
    r"debug_barrier|tl\.(sum|reduce|xor_sum)\("
    r"|_helpers\.(max2|min2|any|prod|welford|online_softmax_reduce|\w+_with_index)\("
)


def read_back(source: str) -> set[str]:
    """Returns the pointers through which a Triton kernel of inductor loads what another of its
    threads may not have stored yet: behind the loop that stored it, with no barrier between.

    A reduction of the program is a barrier where a row is spread over all warps, as inductor's
    settings for contiguous rows have it. Looks at loads and stores as inductor writes them, on one
    line each, and takes pointers of different names to be different.
    """
    rows_are_spread = "ReductionHint.INNER" in source
    stored, earlier, found = set[str](), set[str](), set[str]()
    for line in source.splitlines():
        outside = len(line) - len(line.lstrip()) <= 4
        if outside and WHOLE_PROGRAM.search(line) and (rows_are_spread or "debug_" in line):
            stored, earlier = set(), set()
        if outside:
            earlier |= stored
        if match := re.search(r"tl\.store\((\w+)", line):
            stored.add(match[1])
        elif (match := re.search(r"tl\.load\((\w+)", line)) and match[1] in earlier:
            found.add(match[1])
    return found


PASSES = """
@triton_heuristics.reduction(reduction_hint=ReductionHint.{hint})
def kernel(in_ptr0, in_out_ptr0, out_ptr1, R0_BLOCK):
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        tmp0 = tl.load(in_ptr0 + (r0_1), r0_mask)
        tl.store(in_out_ptr0 + (r0_1), tmp0, r0_mask)
        _tmp1_next, _at_next = triton_helpers.maximum_with_index(_tmp1, _at, tmp0, r0_1)
    {between}
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        tmp2 = tl.load(in_out_ptr0 + (r0_1), r0_mask)
        tl.store(out_ptr1 + (r0_1), tmp2, r0_mask)
"""


@pytest.mark.parametrize(
    ("between", "hint", "found"),
    [
        ("tmp3 = tl.load(in_ptr1 + (x0), xmask)", "INNER", {"in_out_ptr0"}),
        ("tmp3 = triton_helpers.maximum(tmp1, tmp2)", "INNER", {"in_out_ptr0"}),
        ("tmp3 = triton_helpers.max2(_tmp1, 1)[:, None]", "INNER", set()),
        ("tmp3_val, tmp3_idx = triton_helpers.max_with_index(_tmp1, _at, 1)", "INNER", set()),
        ("tmp3 = tl.sum(_tmp1, 1)[:, None]", "INNER", set()),
        ("tmp3 = tl.sum(_tmp1, 1)[:, None]", "DEFAULT", {"in_out_ptr0"}),
        ("tl.debug_barrier()", "DEFAULT", set()),
    ],
)
def test_reading_back_what_other_threads_stored_is_found(
    between: str, hint: str, found: set[str]
) -> None:
    assert read_back(PASSES.format(between=between, hint=hint)) == found


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


@pytest.mark.compiled
def test_carry_over_compiles_once_for_all_sizes() -> None:
    compiled = _OfLines(carry_over, _Mode())
    for tokens, rows in ((9, 4), (4, 4), (64, 33), (2, 2), (300, 4)):
        ids = torch.arange(tokens, dtype=torch.int32)
        previous = torch.arange(rows) + 1000
        index = torch.arange(-1, tokens - 1, dtype=torch.int32) % (rows + 1) - 1
        assert torch.equal(compiled(ids, previous, index), carry_over(ids, previous, index))
        compiled.mode.frozen = True


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_carry_over_is_compiled_on_a_gpu_where_it_is_ours(device: str) -> None:
    model = replace(adopt(small_model("llama")), device=torch.device(device))
    step = CompiledStep(compose(), model)._step
    assert isinstance(step, ComposedStep)
    assert isinstance(step.carry_over, _OfLines) == (device == "cuda")
    own = CompiledStep(compose(carry_over=lambda ids, *_: ids), model)._step
    assert isinstance(own, ComposedStep)
    assert not isinstance(own.carry_over, _OfLines)


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
