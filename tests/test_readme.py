"""What the README shows runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import greedy_alone, small_model, word_tokenizer

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)


def block_with(text: str) -> str:
    """Returns the one example that contains `text`."""
    (block,) = (b for b in BLOCKS if text in b)
    return block


def run(text: str, **names: Any) -> dict[str, Any]:
    exec(compile(block_with(text), "README.md", "exec"), names)
    return names


def test_every_example_is_run_here():
    shown = ["from cbfn.demo import", "engine.stream()", "runner.launch(plan)", "machines"]
    assert [block_with(text) for text in shown] == BLOCKS


def test_ten_lines_answer_three_prompts(capsys: pytest.CaptureFixture[str]):
    run("from cbfn.demo import")
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("length 0 ") for line in lines) == 3


def test_stream_prints_the_text_as_it_comes(capsys: pytest.CaptureFixture[str]):
    import cbfn

    tokenizer = word_tokenizer()
    run("engine.stream()", cbfn=cbfn, model=small_model("llama"), tokenizer=tokenizer)
    words = capsys.readouterr().out.split(" ")
    assert 95 < len(words) <= 100  # special tokens are no text
    assert {*words} <= {*tokenizer.get_vocab()}


def test_custom_loop_gives_the_tokens_of_each_request_alone():
    model = small_model("llama")
    prompts = [[1, 2, 3], [4] * 40, [5, 6]]
    answers = run("runner.launch(plan)", model=model, prompts=prompts)["answers"]
    alone = {str(i): greedy_alone(model, prompt, 32) for i, prompt in enumerate(prompts)}
    assert {name: list(tokens) for name, tokens in answers.items()} == alone


def test_machine_of_the_readme_finds_nothing_wrong_with_fifo():
    from hypothesis import HealthCheck, settings

    from cbfn import policies

    names = run("machines", my_policy=policies.fifo, __name__="readme")
    machine = names["TestMine"]
    machine.TestCase.settings = settings(
        max_examples=20, deadline=None, suppress_health_check=list(HealthCheck)
    )
    machine("runTest").debug()
