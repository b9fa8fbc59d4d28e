"""Files of prompts and files of answers, one JSON value a line.

Each line of the prompts that is not blank leaves one record in the file of answers:

    {"id": ..., "index": ..., **output.to_dict()}   without `request_id`
    {"id": ..., "index": ..., "error": {"field": ..., "message": ...}, "finish_reason": "error"}

`index` is the number of the line, counted from 1, blank lines too. `id` is the line's own id as
text, its number where it names none, and null where it cannot be read.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import IO, Any

from cbfn.config import SamplingParams
from cbfn.types import RequestOutput, error_record

_SAMPLING_FIELDS = {field.name for field in fields(SamplingParams)}
_FIELDS = ("id", "prompt", "messages", *(field.name for field in fields(SamplingParams)))
_NOT_UTF8 = "not UTF-8: expected a file in UTF-8; save the input in that encoding"


@dataclass(frozen=True, slots=True)
class Job:
    """One line of the input: an id, a prompt (text, token ids or chat messages), parameters."""

    line: int
    id: str
    prompt: str | list[int] | list[dict[str, Any]]
    is_chat: bool
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is no job, and why; `id` is None where it cannot be read."""

    line: int
    id: str | None
    error: ValueError


def open_prompts(path: Path) -> IO[str]:
    """Returns an open file of prompts; bytes that are not UTF-8 are found when their line is read.

    A byte order mark is skipped. Lines end with a line feed, perhaps behind a carriage return.
    """
    return path.open(encoding="utf-8-sig", errors="surrogateescape", newline="\n")


def is_blank(line: str) -> bool:
    """Returns True for a line of the white space of JSON, or nothing."""
    return not line.strip(" \t\r\n")


def read_jobs(lines: Iterable[str], defaults: SamplingParams) -> Iterator[Job | BadLine]:
    """Yields a job for each line that is not blank, or a `BadLine` where it is none.

    A line is a JSON string, or an object with `prompt` (text or token ids) or `messages`, perhaps
    an `id` (the line's number otherwise), and any field of SamplingParams for this line. The first
    line with an id has it, even if that line is bad.
    """
    used: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if is_blank(line):
            continue
        job_id: str | None = None
        try:
            value = _read_json(line)
            job_id = _own_id(number, value)
            _check_text(line, value)
            first = used.setdefault(job_id, number) if job_id is not None else number
            if first != number:
                raise ValueError(
                    f"id: expected an id for this line alone; {job_id!r} is the id of line {first}"
                )
            yield _job(number, job_id, value, defaults)
        except ValueError as error:
            yield BadLine(number, job_id, error)
        except RecursionError:
            yield BadLine(number, job_id, ValueError("expected fewer levels of nesting"))


def _read_json(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        if not _is_text(line):
            raise ValueError(_NOT_UTF8) from None
        raise ValueError(f"not JSON: {error}; got {line.strip():.60}") from None


def _own_id(number: int, value: Any) -> str | None:
    """Returns the id of a line, its number without one, None for what cannot be an id."""
    job_id = value.get("id", number) if isinstance(value, dict) else number
    is_id = isinstance(job_id, (str, int)) and not isinstance(job_id, bool) and job_id != ""
    return str(job_id) if is_id and _is_text(str(job_id)) else None


def _check_text(line: str, value: Any) -> None:
    """Raises ValueError for a line, or for what it stands for, that UTF-8 cannot write."""
    if not _is_text(line):
        raise ValueError(_NOT_UTF8)
    for name, part in value.items() if isinstance(value, dict) else [("prompt", value)]:
        if not _is_text(json.dumps({name: part}, ensure_ascii=False)):
            field = f"{name}: " if _is_text(name) else ""
            raise ValueError(
                f"{field}not UTF-8: expected no half of a surrogate pair (\\ud800 to \\udfff)"
            )


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _job(number: int, job_id: str | None, value: Any, defaults: SamplingParams) -> Job:
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, dict):
        raise ValueError(f"expected a string or an object, got {json.dumps(value):.60}")
    if job_id is None:
        raise ValueError(f"id: expected a string or a whole number, got {value['id']!r:.60}")
    for name in sorted(set(value) - set(_FIELDS)):
        near = get_close_matches(name, _FIELDS, 1)
        hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(_FIELDS)}"
        label = f"{name}: unknown field" if name.isidentifier() else f"unknown field {name!r:.60}"
        raise ValueError(f"{label}; {hint}")
    if "prompt" in value and "messages" in value:
        raise ValueError("messages: expected either prompt or messages, got both")
    if "prompt" not in value and "messages" not in value:
        raise ValueError("prompt: expected either prompt or messages, got neither")
    is_chat = "messages" in value
    prompt = _check_messages(value["messages"]) if is_chat else _check_prompt(value["prompt"])
    given = {name: value[name] for name in _SAMPLING_FIELDS & set(value)}
    if isinstance(given.get("logit_bias"), Mapping):
        given["logit_bias"] = {_token(key): bias for key, bias in given["logit_bias"].items()}
    return Job(number, job_id, prompt, is_chat, replace(defaults, **given))


def _check_prompt(prompt: Any) -> Any:
    is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not prompt or not (isinstance(prompt, str) or is_ids):
        raise ValueError(f"prompt: expected text or token ids, not empty, got {prompt!r:.60}")
    return prompt


def _check_messages(messages: Any) -> Any:
    good = isinstance(messages, list) and messages
    if not good or not all(
        isinstance(m, dict) and "role" in m and "content" in m for m in messages
    ):
        raise ValueError(
            f"messages: expected a list of objects with role and content, got {messages!r:.60}"
        )
    return messages


def _token(key: str) -> int:
    try:
        return int(key)
    except ValueError:
        raise ValueError(f"logit_bias: expected token ids as keys, got {key!r}") from None


def answer_record(line: int, job_id: str, output: RequestOutput) -> dict[str, Any]:
    """Returns the record of an output, whether it succeeded or failed."""
    values = output.to_dict()
    del values["request_id"]
    return {"id": job_id, "index": line, **values}


def failed_record(line: int, job_id: str | None, error: ValueError) -> dict[str, Any]:
    """Returns the record of a line that cannot run; the field is named as the line names it."""
    known = error_record(str(error).removeprefix(f"request {job_id!r}: "))
    field = known["field"]
    if field is not None:
        field = re.sub(r"^SamplingParams\.", "", field)
        field = re.sub(r"^(Request\.)?prompt_token_ids\b", "prompt", field)
    values = {"error": known | {"field": field}, "finish_reason": "error"}
    return {"id": job_id, "index": line, **values}


def write_record(file: IO[str], record: Mapping[str, Any]) -> None:
    """Writes and flushes a record as one whole line, so that an interrupt leaves whole lines."""
    line = json.dumps(record, ensure_ascii=False)
    try:
        line.encode(getattr(file, "encoding", None) or "utf-8")
    except UnicodeEncodeError:  # a terminal of another encoding
        line = json.dumps(record)
    file.write(line + "\n")
    file.flush()


def answered_ids(path: Path) -> set[str]:
    """Returns the ids that a file of answers has an answer for; a failed record is none.

    Raises ValueError naming the line for one that is no record. Only the last line may be
    incomplete.
    """
    return {job_id for _, job_id in _records(path) if job_id is not None}


def keep_answers(path: Path) -> None:
    """Leaves the answers in a file, without failed records and an incomplete last line.

    The file is replaced as a whole: an interrupt leaves the old one or the new one.
    """
    if not path.is_file():
        return
    path = path.resolve()  # a link stays a link
    kept = sum(len(line) for line, job_id in _records(path) if job_id is not None)
    if kept == path.stat().st_size:
        return
    scratch = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with scratch.open("wb") as file:
            file.writelines(line for line, job_id in _records(path) if job_id is not None)
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(path, scratch)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def _records(path: Path) -> Iterator[tuple[bytes, str | None]]:
    """Yields the whole lines of a file of answers, and the id that each answers, if any."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return  # the writer was interrupted within it
            try:
                record = json.loads(line)
                job_id = record["id"]
                failed = record.get("finish_reason") == "error"
                if job_id is None and not failed:
                    raise ValueError
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ValueError(
                    f"{path}, line {number}: expected a record with an id, as cbfn generate "
                    f"writes it, got {line.decode(errors='replace').strip():.60}"
                ) from None
            yield line, None if failed else str(job_id)
