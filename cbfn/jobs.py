"""Files of prompts and files of answers, one JSON value a line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import IO, Any

from cbfn.config import SamplingParams
from cbfn.types import RequestOutput

_SAMPLING_FIELDS = {field.name for field in fields(SamplingParams)}


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
    """A line that is no job, and why."""

    line: int
    reason: str


def read_jobs(lines: Iterable[str], defaults: SamplingParams) -> Iterator[Job | BadLine]:
    """Yields a job for each line that is not blank, or a `BadLine` where it is none.

    A line is a JSON string, or an object with `prompt` (text or token ids) or `messages`, perhaps
    an `id` (the line's number otherwise), and any field of SamplingParams for this line.
    """
    used: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            job = _parse(number, line, defaults)
            if job.id in used:
                raise ValueError(f"id {job.id!r} was used on line {used[job.id]}")
        except ValueError as error:
            yield BadLine(number, str(error))
        else:
            used[job.id] = number
            yield job


def _parse(number: int, line: str, defaults: SamplingParams) -> Job:
    try:
        value = json.loads(line)
        json.dumps(value, ensure_ascii=False).encode()  # what cannot be written is no text
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    except UnicodeEncodeError as error:
        raise ValueError(f"not UTF-8: {error.reason}") from None
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, dict):
        raise ValueError(f"expected a string or an object, got {line.strip():.60}")
    unknown = set(value) - _SAMPLING_FIELDS - {"id", "prompt", "messages"}
    if unknown:
        raise ValueError(f"unknown fields {sorted(unknown)}")
    if ("prompt" in value) == ("messages" in value):
        raise ValueError("expected either prompt or messages")
    job_id = value.get("id", number)
    if not isinstance(job_id, (str, int)) or isinstance(job_id, bool) or job_id == "":
        raise ValueError(f"id: expected a string or a number, got {job_id!r}")
    is_chat = "messages" in value
    prompt = _check_messages(value["messages"]) if is_chat else _check_prompt(value["prompt"])
    given = {name: value[name] for name in _SAMPLING_FIELDS & set(value)}
    if isinstance(given.get("logit_bias"), Mapping):
        given["logit_bias"] = {_token(key): bias for key, bias in given["logit_bias"].items()}
    return Job(number, str(job_id), prompt, is_chat, replace(defaults, **given))


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


def answer_line(job_id: str, output: RequestOutput) -> str:
    """Returns the line that answers a job: with `text`, or `token_ids` without a tokenizer."""
    has_text = output.decoded is not None
    answer: dict[str, Any] = {
        "id": job_id,
        **({"text": output.text} if has_text else {"token_ids": list(output.token_ids)}),
        "finish_reason": output.finish_reason,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_tokens": len(output.token_ids),
    }
    return json.dumps(answer, ensure_ascii=False) + "\n"


def answered_ids(path: Path) -> set[str]:
    """Returns the ids that a file of answers holds; cuts off a last line that is incomplete.

    Raises ValueError naming the line for any other that is no answer.
    """
    done: set[str] = set()
    if not path.exists():
        return done
    with path.open("rb+") as file:
        end = 0
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                file.truncate(end)  # the writer was interrupted within it
                break
            end += len(line)
            try:
                done.add(str(json.loads(line)["id"]))
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{path}, line {number}: expected an answer with an id") from None
    return done


def write_line(file: IO[str], line: str) -> None:
    """Writes and flushes a whole line, so that an interrupt leaves whole lines."""
    file.write(line)
    file.flush()
