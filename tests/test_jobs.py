"""Lines of prompts become jobs or are named as bad; files of answers can be taken up again."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from cbfn.config import SamplingParams
from cbfn.jobs import (
    BadLine,
    Job,
    answer_record,
    answered_ids,
    failed_record,
    keep_answers,
    open_prompts,
    read_jobs,
    write_record,
)
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


def bad(line: Any) -> BadLine:
    """Returns what a bad line is read as; the line behind it is fine."""
    found, good = read(line, {"prompt": "fine"})
    assert isinstance(good, Job)
    assert isinstance(found, BadLine)
    assert found.line == 1
    return found


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
    "nested too deeply": ("[" * 100_000, "expected fewer levels of nesting"),
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
    "unknown field": (
        {"prompt": "x", "max_new_tokens": 3},
        "max_new_tokens: unknown field; did you mean max_tokens?",
    ),
    "empty id": ({"prompt": "x", "id": ""}, "id: expected a string or a whole number, got ''"),
    "null as id": ({"prompt": "x", "id": None}, "id: expected a string or a whole number"),
    "boolean as id": ({"prompt": "x", "id": True}, "id: expected a string or a whole number"),
    "fraction as id": ({"prompt": "x", "id": 1.5}, "id: expected a string or a whole number"),
    "list as id": ({"prompt": "x", "id": ["a"]}, "id: expected a string or a whole number"),
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
    assert expected in str(bad(line).error)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"prompt": "x", "id": "a", "temperature": -1}, "a"),
        ({"prompt": "x", "id": 7, "unknown": 1}, "7"),
        ({"prompt": ""}, "1"),
        ("7", "1"),
        ('{"prompt": "\\ud800", "id": "a"}', "a"),
        (b'{"prompt": "\xff", "id": "a"}'.decode(errors="surrogateescape"), "a"),
        ({"prompt": "x", "id": 1.5}, None),
        ('{"prompt": "x", "id": "\\udc00"}', None),
        ("{'prompt': 'x'}", None),
        ("[" * 100_000, None),
    ],
)
def test_bad_line_keeps_the_id_that_can_be_read(line: Any, expected: str | None) -> None:
    assert bad(line).id == expected


def test_id_used_twice_is_named_with_its_first_line() -> None:
    jobs = read(
        {"prompt": "x", "id": "a"}, {"prompt": "y", "id": "a"}, {"prompt": "z", "id": 4}, '"w"'
    )
    assert [type(job) for job in jobs] == [Job, BadLine, Job, BadLine]
    for found, name, first in ((jobs[1], "a", 1), (jobs[3], "4", 3)):
        assert isinstance(found, BadLine)
        assert found.id == name
        assert str(found.error).startswith("id: ")
        assert str(found.error).endswith(f"{name!r} is the id of line {first}")


def test_bad_line_has_its_id_for_itself() -> None:
    # otherwise a run with the line mended would take the answer of the second for the first
    jobs = read({"prompt": "x", "id": "a", "top_k": "no"}, {"prompt": "y", "id": "a"})
    assert [type(job) for job in jobs] == [BadLine, BadLine]


def test_only_value_errors_come_of_lines() -> None:
    values = [None, True, -1, 10**30, 1e308, "", "x", [], [1], ["a"], [None], {}, {"1": None}]
    for name in (*SamplingParams.__dataclass_fields__, "prompt", "messages", "id"):
        for value in values:
            (found,) = read({"prompt": "x", "id": "a", name: value})
            if isinstance(found, BadLine):
                record = failed_record(found.line, found.id, found.error)
                write_record(io.StringIO(), record)


def test_line_ends_with_a_line_feed_alone(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt":\r"a"}\r\n\r\n"b\xc2\x85\xe2\x80\xa8c"\n\xc2\xa0\n')
    with open_prompts(path) as file:
        first, second, third = read_jobs(file, DEFAULTS)
    assert isinstance(first, Job)
    assert isinstance(second, Job)
    assert (first.line, first.prompt, second.line, second.prompt) == (1, "a", 3, "b\x85\u2028c")
    assert isinstance(third, BadLine)  # a space that is none of JSON's is not blank
    assert third.line == 4


def test_lines_are_read_one_by_one() -> None:
    def lines() -> Any:
        yield '"a"'
        raise AssertionError("not asked for yet")

    assert isinstance(next(read_jobs(lines(), DEFAULTS)), Job)


def output(**values: Any) -> RequestOutput:
    ended = {"status": RequestStatus.FINISHED, "finish_reason": "length"}
    return RequestOutput("a", Tokens([1, 2]), Tokens([3, 4, 5]), **(ended | values))


def line_of(record: dict[str, Any], encoding: str = "utf-8") -> str:
    """Returns what a record is written as."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n")
    write_record(file, record)
    buffer: Any = file.buffer
    return str(buffer.getvalue().decode(encoding))


def test_answer_is_the_output_with_id_and_index_in_one_line_of_json() -> None:
    text = "ein\nZwei\u2028日本 3"
    found = output(decoded=Decoded(text))
    line = line_of(answer_record(7, "ü", found))
    assert line.endswith("\n")
    assert line.count("\n") == 1
    assert "日本" in line
    answer = json.loads(line)
    assert list(answer)[:2] == ["id", "index"]
    assert "request_id" not in answer
    given = json.loads(json.dumps(found.to_dict()))
    assert given.pop("request_id") == "a"
    assert answer == {"id": "ü", "index": 7, **given}
    assert (answer["id"], answer["index"], answer["text"]) == ("ü", 7, text)
    assert (answer["token_ids"], answer["num_prompt_tokens"]) == ([3, 4, 5], 2)


def test_answer_without_a_tokenizer_has_the_tokens() -> None:
    answer = json.loads(line_of(answer_record(1, "a", output())))
    assert answer["token_ids"] == [3, 4, 5]
    assert answer["text"] is None


def test_output_that_failed_keeps_its_tokens_beside_the_error() -> None:
    failed = {"status": RequestStatus.FAILED, "finish_reason": "error"}
    record = answer_record(3, "a", output(**failed, error=RuntimeError("bad weather")))
    assert record["error"] == {"field": None, "message": "RuntimeError: bad weather"}
    assert (record["id"], record["index"], record["finish_reason"]) == ("a", 3, "error")
    assert record["token_ids"] == [3, 4, 5]


@pytest.mark.parametrize(
    ("error", "field", "message"),
    [
        ("SamplingParams.top_p: expected x, got 2", "top_p", "expected x, got 2"),
        ("Request.prompt_token_ids[1]: expected x", "prompt[1]", "expected x"),
        ("prompt_token_ids[1]: expected x", "prompt[1]", "expected x"),
        ("request 'a': a prompt of 9 tokens", None, "a prompt of 9 tokens"),
        ("not JSON: expecting ','", None, "not JSON: expecting ','"),
        ("messages: expected x", "messages", "expected x"),
    ],
)
def test_failed_record_names_the_field_as_the_line_does(
    error: str, field: str | None, message: str
) -> None:
    assert failed_record(2, "a", ValueError(error)) == {
        "id": "a",
        "index": 2,
        "error": {"field": field, "message": message},
        "finish_reason": "error",
    }


@pytest.mark.parametrize("text", ["日本", "\udc80"])
def test_record_is_written_to_files_of_any_encoding(text: str) -> None:
    for encoding in ("utf-8", "ascii", "cp1252"):
        assert json.loads(line_of({"text": text}, encoding)) == {"text": text}


FAILED = (
    '{"id": "c", "index": 3, "error": {"field": null, "message": "x"}, "finish_reason": "error"}\n'
)
NAMELESS = FAILED.replace('"c"', "null")


def test_answered_ids_are_read(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    assert answered_ids(path) == set()
    path.write_text("")
    assert answered_ids(path) == set()
    path.write_text('{"id": "a"}\n' + FAILED + '{"id": 7, "text": "x"}\n' + NAMELESS)
    assert answered_ids(path) == {"a", "7"}


@pytest.mark.parametrize("torn", ['{"id": "c"', '{"id": "c"}', "{", '{"id": "\xfc', ""])
def test_answers_are_kept_and_the_rest_is_not(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "out.jsonl"
    lines = ['{"id": "a"}\n', FAILED, NAMELESS, '{"id": "b", "index": 4, "error": null}\n']
    whole = "".join(lines).encode() + torn.encode("latin-1")
    path.write_bytes(whole)
    path.chmod(0o640)
    assert answered_ids(path) == {"a", "b"}
    assert path.read_bytes() == whole  # reading changes nothing
    keep_answers(path)
    assert path.read_text() == lines[0] + lines[3]
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]
    path.write_text(torn, encoding="latin-1")
    keep_answers(path)
    assert path.read_bytes() == b""


def test_interrupt_while_answers_are_kept_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "out.jsonl"
    path.write_text('{"id": "a"}\n' + FAILED)
    monkeypatch.setattr("os.fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        keep_answers(path)
    assert path.read_text() == '{"id": "a"}\n' + FAILED
    assert list(tmp_path.iterdir()) == [path]


def test_link_to_answers_stays_a_link(tmp_path: Path) -> None:
    path, link = tmp_path / "out.jsonl", tmp_path / "link"
    path.write_text('{"id": "a"}\n' + FAILED)
    link.symlink_to(path)
    keep_answers(link)
    assert link.is_symlink()
    assert path.read_text() == '{"id": "a"}\n'


def test_file_of_answers_alone_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text('{"id": "a"}\n')
    before = path.stat()
    keep_answers(path)
    assert path.stat().st_ino == before.st_ino
    keep_answers(tmp_path / "none")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "line", ["no JSON", "{}", "[1]", '"a"', "", '{"id": null}', '{"finish_reason": "error"}']
)
def test_whole_line_that_is_no_record_is_an_error_and_stays(tmp_path: Path, line: str) -> None:
    path = tmp_path / "out.jsonl"
    text = f'{{"id": "a"}}\n{line}\n{{"id": "b"}}\n{{"id":'
    path.write_text(text)
    for read_file in (answered_ids, keep_answers):
        with pytest.raises(ValueError, match=r"out.jsonl, line 2: expected a record with an id"):
            read_file(path)
    assert path.read_text() == text


def test_written_line_is_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with path.open("a", encoding="utf-8") as file:
        for number in range(1, 4):
            write_record(file, answer_record(number, str(number), output(decoded=Decoded("ä"))))
            assert path.read_bytes().count(b"\n") == number
    assert answered_ids(path) == {"1", "2", "3"}


def test_line_is_written_in_one_call() -> None:
    calls = []

    class Recorder(io.StringIO):
        def write(self, text: str) -> int:
            calls.append(text)
            return len(text)

    write_record(Recorder(), {"id": "a"})
    assert calls == ['{"id": "a"}\n']
