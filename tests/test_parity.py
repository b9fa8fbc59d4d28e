"""Greedy outputs equal transformers' own `generate`, token for token, in fp32."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

import cbfn
from cbfn import EngineConfig, Request, Runner, SamplingParams, scheduler
from cbfn.step import compose
from tests.conftest import FAMILIES, greedy_alone, small_model

NEW_TOKENS = 20
LENGTHS = (1, 3, 15, 16, 17, 35, 40, 64)  # around pages, and around and beyond the window of 16
VALUES = ((4, 16, 64), (8, 64, 8192), ("tight", "roomy"), ("fifo", "prefill_first"), (True, False))
# half of all settings, such that any three values meet in one of them
SETTINGS = [
    setting
    for setting in product(*VALUES)
    if sum(values.index(value) for values, value in zip(VALUES, setting, strict=True)) % 2 == 0
]


@cache
def reference(family: str) -> tuple[Any, list[list[int]], list[list[int]]]:
    """Returns a model, prompts, and what `generate` makes of each alone."""
    model = small_model(family)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 128, (n,), generator=generator).tolist() for n in LENGTHS]
    prompts.append(prompts[-1][:32] + prompts[0])  # shares pages with the longest one
    return model, prompts, [greedy_alone(model, prompt, NEW_TOKENS) for prompt in prompts]


def check(family: str, setting: tuple[Any, ...], compile: bool = False) -> None:
    page_size, budget, cache_size, policy, sharing = setting
    model, prompts, expected = reference(family)
    config = EngineConfig(
        page_size=page_size,
        num_blocks=max(112 // page_size, 3) if cache_size == "tight" else None,
        max_batch_tokens=budget,
        max_requests_per_batch=5,
        scheduler=policy,
        allow_block_sharing=sharing,
        compile=compile,
    )
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0)
    outputs = cbfn.generate(model, prompts, params, config=config)
    assert [output.error for output in outputs] == [None] * len(prompts)
    assert [list(output.token_ids) for output in outputs] == expected


@pytest.mark.usefixtures("without_annotation_checks")
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3"])
@pytest.mark.parametrize("policy", ["fifo", "prefill_first"])
def test_small_models_equal_generate_under_every_setting(family: str, policy: str) -> None:
    for setting in SETTINGS:
        if setting[3] == policy:
            check(family, setting)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ("llama", "qwen3")])
def test_other_families_equal_generate(family: str) -> None:
    for setting in [(4, 8, "tight", "fifo", True), (16, 64, "roomy", "prefill_first", False)]:
        check(family, setting)


@pytest.mark.compiled
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_compiled_step_equals_generate(family: str) -> None:
    check(family, (16, 64, "tight", "fifo", True), compile=True)


@pytest.mark.compiled
def test_whole_step_compiles_as_one_graph() -> None:
    model = small_model("llama")
    prompts = [[1, 2, 3], [4] * 20, [5, 6]]
    step = torch.compile(compose(), fullgraph=True)
    runner = Runner(model, EngineConfig(page_size=16, num_blocks=16, compile=False), step=step)
    state = scheduler.init(runner.cache_spec, runner.config)
    for index, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=6, temperature=0)
        state = scheduler.submit(state, Request(str(index), prompt, params))
    answers = {}
    with torch._dynamo.config.patch(recompile_limit=32):
        while state.ids:
            state, plan = scheduler.schedule(state)
            state, outputs = scheduler.commit(state, plan, runner.collect(runner.launch(plan)))
            answers |= {o.request_id: list(o.token_ids) for o in outputs}
    alone = {str(i): greedy_alone(model, prompt, 6) for i, prompt in enumerate(prompts)}
    assert answers == alone
