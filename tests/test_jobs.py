"""Lines of prompts become jobs or are named as bad; files of answers can be taken up again."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from cbfn.config import SamplingParams
from cbfn.jobs import BadLine, Job, answer_line, answered_ids, read_jobs, write_line
from cbfn.types import Decoded, RequestOutput, RequestStatus, Tokens

DEFAULTS = SamplingParams(max_tokens=32, temperature=0.0)


def read(*lines: Any) -> list[Job | BadLine]:
    """Returns what lines are read as; what is no text is written as JSON."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    return list(read_jobs(texts, DEFAULTS))


def one(line: Any) -> Job:
    (job,) = read(line)
    assert isinstance(job, Job), job
    return job


def reason(line: Any) -> str:
    bad, good = read(line, {"prompt": "fine"})
    assert isinstance(good, Job)
    assert isinstance(bad, BadLine)
    assert bad.line == 1
    return bad.reason


def test_text_is_a_prompt() -> None:
    assert one('"Hello,\\nyou"') == Job(1, "1", "Hello,\nyou", False, DEFAULTS)
    assert one({"prompt": "Hello"}) == Job(1, "1", "Hello", False, DEFAULTS)


def test_token_ids_are_a_prompt() -> None:
    assert one({"prompt": [3, 0, 2**30]}).prompt == [3, 0, 2**30]


def test_messages_are_a_chat() -> None:
    messages = [{"role": "user", "content": "Hello"}]
    job = one({"messages": messages})
    assert job.is_chat
    assert job.prompt == messages


@pytest.mark.parametrize(
    ("given", "expected"), [("a b", "a b"), (7, "7"), (0, "0"), ("7", "7"), ("ü", "ü")]
)
def test_id_is_kept_as_text(given: Any, expected: str) -> None:
    assert one({"prompt": "x", "id": given}).id == expected


def test_line_number_is_the_id_of_a_line_without_one() -> None:
    jobs = read('"a"', "", "  \n", '"b"', {"prompt": "c", "id": "own"}, '"d"')
    assert [(job.line, job.id) for job in jobs] == [(1, "1"), (4, "4"), (5, "own"), (6, "6")]


def test_sampling_fields_hold_for_their_line() -> None:
    fields = {
        "max_tokens": 3,
        "temperature": 0.5,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 11,
        "stop": "\n",
        "stop_token_ids": [4, 5],
        "ignore_eos": True,
        "logit_bias": {"17": 2.5},
    }
    first, second = read({"prompt": "x", **fields}, '"y"')
    assert first.params == SamplingParams(**(fields | {"logit_bias": {17: 2.5}}))
    assert second.params == DEFAULTS
    assert one({"prompt": "x", "max_tokens": None}).params.max_tokens is None
    assert one({"prompt": "x", "max_tokens": 3}).params.temperature == 0.0


BAD: dict[str, tuple[Any, str]] = {
    "no JSON": ("{'prompt': 'x'}", "not JSON"),
    "cut off": ('{"prompt": "x"', "not JSON"),
    "two values": ('"a" "b"', "not JSON"),
    "nested too deeply": ("[" * 100_000, "not JSON"),
    "huge number": ("1" * 5000, "4300 digits"),
    "number": ("7", "expected a string or an object, got 7"),
    "list": ('["a", "b"]', "expected a string or an object"),
    "null": ("null", "expected a string or an object"),
    "empty text": ('""', "expected text or token ids, not empty, got ''"),
    "no tokens": ({"prompt": []}, "not empty"),
    "fractions": ({"prompt": [1.0]}, "expected text or token ids"),
    "booleans": ({"prompt": [True]}, "expected text or token ids"),
    "texts": ({"prompt": ["a"]}, "expected text or token ids"),
    "object as prompt": ({"prompt": {"a": 1}}, "expected text or token ids"),
    "null as prompt": ({"prompt": None}, "expected text or token ids"),
    "neither": ({"id": "a"}, "expected either prompt or messages"),
    "both": ({"prompt": "x", "messages": []}, "expected either prompt or messages"),
    "no messages": ({"messages": []}, "expected a list of objects with role and content"),
    "text as messages": ({"messages": "Hello"}, "expected a list of objects"),
    "message without role": ({"messages": [{"content": "x"}]}, "role and content"),
    "message without content": ({"messages": [{"role": "user"}]}, "role and content"),
    "unknown field": ({"prompt": "x", "max_new_tokens": 3}, r"unknown fields ['max_new_tokens']"),
    "empty id": ({"prompt": "x", "id": ""}, "id: expected a string or a number, got ''"),
    "null as id": ({"prompt": "x", "id": None}, "id: expected a string or a number"),
    "boolean as id": ({"prompt": "x", "id": True}, "id: expected a string or a number"),
    "fraction as id": ({"prompt": "x", "id": 1.5}, "id: expected a string or a number"),
    "list as id": ({"prompt": "x", "id": ["a"]}, "id: expected a string or a number"),
    "temperature": ({"prompt": "x", "temperature": -1}, "SamplingParams.temperature"),
    "NaN": ('{"prompt": "x", "temperature": NaN}', "SamplingParams.temperature"),
    "infinity": ('{"prompt": "x", "temperature": 1e999}', "SamplingParams.temperature"),
    "text as number": ({"prompt": "x", "max_tokens": "3"}, "SamplingParams.max_tokens"),
    "list as number": ({"prompt": "x", "top_p": [0.5]}, "SamplingParams.top_p"),
    "object as seed": ({"prompt": "x", "seed": {}}, "SamplingParams.seed"),
    "number as stop": ({"prompt": "x", "stop": 3}, "SamplingParams.stop"),
    "bias of no token": ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias: expected token ids"),
    "bias list": ({"prompt": "x", "logit_bias": [1]}, "SamplingParams.logit_bias"),
    "half a character": ('"\\ud800"', "not UTF-8"),
    "half a character in the id": ('{"prompt": "x", "id": "\\udc00"}', "not UTF-8"),
    "bytes that are no text": (b'"\xff\xfe"'.decode(errors="surrogateescape"), "not UTF-8"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_line_is_named_and_the_next_is_read(name: str) -> None:
    line, expected = BAD[name]
    assert expected in reason(line)


def test_id_used_twice_is_named_with_its_first_line() -> None:
    jobs = read(
        {"prompt": "x", "id": "a"}, {"prompt": "y", "id": "a"}, {"prompt": "z", "id": 4}, '""'
    )
    assert [type(job) for job in jobs] == [Job, BadLine, Job, BadLine]
    assert jobs[1] == BadLine(2, "id 'a' was used on line 1")
    clash = read({"prompt": "x", "id": 2}, '"y"')[1]
    assert clash == BadLine(2, "id '2' was used on line 1")


def test_lines_are_read_one_by_one() -> None:
    def lines() -> Any:
        yield '"a"'
        raise AssertionError("not asked for yet")

    assert isinstance(next(read_jobs(lines(), DEFAULTS)), Job)


def output(**values: Any) -> RequestOutput:
    ended = {"status": RequestStatus.FINISHED, "finish_reason": "length"}
    return RequestOutput("a", Tokens([1, 2]), Tokens([3, 4, 5]), **(ended | values))


def test_answer_is_one_line_of_json() -> None:
    line = answer_line("ü", output(decoded=Decoded("ein\nZwei\u2028日本 3")))
    assert line.endswith("\n")
    assert line.count("\n") == 1
    assert "日本" in line
    assert json.loads(line) == {
        "id": "ü",
        "text": "ein\nZwei\u2028日本 3",
        "finish_reason": "length",
        "num_prompt_tokens": 2,
        "num_tokens": 3,
    }


def test_answer_without_a_tokenizer_has_the_tokens() -> None:
    answer = json.loads(answer_line("a", output()))
    assert answer["token_ids"] == [3, 4, 5]
    assert "text" not in answer


def test_answered_ids_are_read(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    assert answered_ids(path) == set()
    path.write_text("")
    assert answered_ids(path) == set()
    path.write_text('{"id": "a"}\n{"id": 7, "text": "x"}\n')
    assert answered_ids(path) == {"a", "7"}


@pytest.mark.parametrize("torn", ['{"id": "c"', '{"id": "c"}', "{", '{"id": "\xfc'])
def test_torn_last_line_is_cut_off(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b'{"id": "a"}\n{"id": "b"}\n' + torn.encode("latin-1"))
    assert answered_ids(path) == {"a", "b"}
    assert path.read_bytes() == b'{"id": "a"}\n{"id": "b"}\n'
    path.write_text(torn, encoding="latin-1")
    assert answered_ids(path) == set()
    assert path.read_bytes() == b""


@pytest.mark.parametrize("line", ["no JSON", "{}", "[1]", '"a"', ""])
def test_whole_line_that_is_no_answer_is_an_error_and_stays(tmp_path: Path, line: str) -> None:
    path = tmp_path / "out.jsonl"
    text = f'{{"id": "a"}}\n{line}\n{{"id": "b"}}\n{{"id":'
    path.write_text(text)
    with pytest.raises(ValueError, match=r"out.jsonl, line 2: expected an answer with an id"):
        answered_ids(path)
    assert path.read_text() == text


def test_written_line_is_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with path.open("a", encoding="utf-8") as file:
        for number in range(1, 4):
            write_line(file, answer_line(str(number), output(decoded=Decoded("ä"))))
            assert path.read_bytes().count(b"\n") == number
    assert answered_ids(path) == {"1", "2", "3"}


def test_line_is_written_in_one_call() -> None:
    calls = []

    class Recorder(io.StringIO):
        def write(self, text: str) -> int:
            calls.append(text)
            return len(text)

    write_line(Recorder(), "whole\n")
    assert calls == ["whole\n"]
