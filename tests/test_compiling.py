"""Few graphs serve all sizes, and later compilations are errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cbfn import Engine, EngineConfig, RequestOutput, SamplingParams
from cbfn.compiling import CompiledStep
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
