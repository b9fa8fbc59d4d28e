"""What is known of one request at one moment, and how it travels to other processes and files."""

from __future__ import annotations

import enum
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from cbfn import checks
from cbfn.tokens import TokenIds, Tokens, plain_ids

FINISH_REASONS = ("stop", "length", "cancelled", "deadline", "error")


class RequestStatus(enum.Enum):
    """Where a request stands; `ended` is True for the last three, which are never left."""

    PENDING = "pending", False
    PREFILLING = "prefilling", False
    DECODING = "decoding", False
    FINISHED = "finished", True
    CANCELLED = "cancelled", True
    FAILED = "failed", True

    ended: bool

    def __new__(cls, value: str, ended: bool) -> RequestStatus:
        status = object.__new__(cls)
        status._value_ = value
        status.ended = ended
        return status


class RequestTimes(NamedTuple):
    """Seconds on the caller's clock; None for what has not happened."""

    arrival: float
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None


NEVER = RequestTimes(0.0)


@runtime_checkable
class TextSource(Protocol):
    """What decodes the tokens of one request; see `cbfn.text`."""

    def text(self, token_ids: list[int], num_tokens: int, final: bool) -> str:
        """Returns the text of the first tokens: all of it, or what is certain."""

    def new_text(self, text: str, token_ids: list[int], before: int) -> str:
        """Returns what `text` adds to the certain text of the first `before` tokens."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """The texts of an output, as a copy of it holds them."""

    text: str
    new_text: str = ""


class _LazyIds:
    """A field of token ids: a list that is made when it is read first.

    Until then the output's `__dict__` holds, under the same name with an underscore, where they
    come from: an object whose `ids(length)` gives them, and their number (None: all of them).
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name, self.place = name, f"_{name}"

    def __get__(self, output: Any, owner: type | None = None) -> Any:
        if output is None:  # the field's default, which the prompt has none of
            if self.name == "prompt_token_ids":
                raise AttributeError(self.name)
            return ()
        values = vars(output)
        if self.place not in values:
            return values.setdefault(self.name, TokenIds())
        log, length = values[self.place]
        ids = values[self.name] = log.ids(length)
        return ids


class _LazyDecoded:
    """The field `decoded`: None without a source of text, else made when it is read."""

    def __get__(self, output: Any, owner: type | None = None) -> Any:
        if output is None or "_source" not in vars(output):
            return None
        return vars(output).setdefault("decoded", Decoded(output.text, output.new_text))


@dataclass(frozen=True)
class RequestOutput:
    """Everything known of one request at one moment; frozen and cumulative.

    `token_ids` holds the generated tokens, an ending EOS or stop token included, as a read-only
    list; it never changes afterwards. `stop_reason` is the stop token's id or the stop string that
    ended the request, None for the model's EOS. `samples` holds the children of a request with
    n > 1.

    A copy, a pickle and `dataclasses.replace` decode the text and keep it in `decoded`, as plain
    strings; an `error` that can not be pickled becomes a plain one with the same message.

    Raises ValueError for a finish reason without an ended status, or the reverse.
    """

    request_id: str
    prompt_token_ids: Sequence[int] = _LazyIds()  # type: ignore[assignment]
    token_ids: Sequence[int] = _LazyIds()  # type: ignore[assignment]
    status: RequestStatus = RequestStatus.PENDING
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: BaseException | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    times: RequestTimes = NEVER
    logprobs: Any = None
    prompt_logprobs: Any = None
    samples: tuple[RequestOutput, ...] = ()
    decoded: Decoded | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.text("RequestOutput.request_id", self.request_id)
        if self.finish_reason not in (None, *FINISH_REASONS):
            raise ValueError(
                f"RequestOutput.finish_reason: expected one of {FINISH_REASONS} or None, "
                f"got {self.finish_reason!r}"
            )
        if self.status.ended != (self.finish_reason is not None):
            raise ValueError(
                "RequestOutput.status: expected an end exactly where finish_reason is given, "
                f"got {self.status} and {self.finish_reason!r}"
            )
        values = vars(self)
        for name in ("prompt_token_ids", "token_ids"):
            ids = values[name]
            if isinstance(ids, Tokens):
                del values[name]
                values[f"_{name}"] = (ids, len(ids))
            elif not isinstance(ids, TokenIds):
                values[name] = TokenIds(plain_ids(ids))
        if values["decoded"] is None:
            del values["decoded"]  # in its place the class answers

    def follow(self, output: RequestOutput) -> None:
        """Makes `new_text` begin where that of an older output does, which was not handed out."""
        before = vars(output).get("_before", 0)
        if "_before" in vars(self):
            vars(self)["_before"] = before

    @staticmethod
    def build(values: dict[str, Any]) -> RequestOutput:
        """Returns an output of values that the core vouches for: unchecked, absent ones default.

        A step builds one for each of its rows, and `__init__` would be most of the step's cost.
        """
        output = object.__new__(RequestOutput)
        object.__setattr__(output, "__dict__", values)
        return output

    @property
    def text(self) -> str:
        """The generated text, without an ending EOS or stop token; decoded when it is asked for.

        While the request runs it is what is certain: each text starts with the one before, and
        the last one with all of them. Raises ValueError where no tokenizer is at hand.
        """
        return self._text()

    @property
    def new_text(self) -> str:
        """What `text` adds to the output of this request that was handed out before.

        Raises ValueError where no tokenizer is at hand.
        """
        text, values = self._text(), vars(self)
        if "decoded" in values:
            return values["decoded"].new_text
        return values["_source"].new_text(text, self.token_ids, values.get("_before", 0))

    def _text(self) -> str:
        values = vars(self)
        if "decoded" in values:
            return values["decoded"].text
        if "_text_" not in values:
            if "_source" not in values:
                raise ValueError(
                    f"RequestOutput.text: request {self.request_id!r} has no tokenizer"
                )
            by_token = self.finish_reason == "stop" and not isinstance(self.stop_reason, str)
            ids = self.token_ids
            values["_text_"] = values["_source"].text(
                ids, len(ids) - by_token, final=self.status.ended
            )
        return values["_text_"]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data that `json.dumps` takes; `text` is None without a tokenizer, `error`
        as `error_record` gives it."""
        has_text = "_source" in vars(self) or "decoded" in vars(self)
        return {
            "request_id": self.request_id,
            "prompt_token_ids": list(self.prompt_token_ids),
            "token_ids": list(self.token_ids),
            "text": self.text if has_text else None,
            "status": self.status.value,
            "finish_reason": self.finish_reason,
            "stop_reason": _plain(self.stop_reason),
            "error": None if self.error is None else error_record(self.error),
            "num_prompt_tokens": len(self.prompt_token_ids),
            "num_tokens": len(self.token_ids),
            "num_cached_tokens": _plain(self.num_cached_tokens),
            "num_preemptions": _plain(self.num_preemptions),
            "times": _plain(self.times),
            "logprobs": _plain(self.logprobs),
            "prompt_logprobs": _plain(self.prompt_logprobs),
            "samples": [sample.to_dict() for sample in self.samples],
        }

    def __reduce__(self) -> tuple[Any, ...]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["error"] = portable(self.error)
        if values["decoded"] is None:
            del values["decoded"]
        return RequestOutput.build, (values,)


RequestOutput.decoded = _LazyDecoded()  # type: ignore[assignment]  # beside the field's default


_FIELD = re.compile(
    r"""(?:request\ (?:'[^']*'|"[^"]*"):\ )?  # who, as the scheduler says it
    ([A-Za-z_]\w*(?:\.\w+|\[[^\]]*\])*):\ (.+)""",
    re.VERBOSE | re.DOTALL,
)


def error_record(error: BaseException | str) -> dict[str, str | None]:
    """Returns an error as plain data: `field`, which it is about or None, and `message`.

    A string is taken for the message of one of our own errors.

    >>> error_record("SamplingParams.top_p: expected a finite number in (0, 1], got 2")
    {'field': 'SamplingParams.top_p', 'message': 'expected a finite number in (0, 1], got 2'}
    >>> error_record(KeyError("x"))
    {'field': None, 'message': "KeyError: 'x'"}
    """
    text = str(error)
    if isinstance(error, (str, ValueError)) and (found := _FIELD.fullmatch(text)):
        return {"field": found[1], "message": found[2]}
    if isinstance(error, str) or type(error).__module__.partition(".")[0] == "cbfn":
        return {"field": None, "message": text}
    return {"field": None, "message": f"{type(error).__name__}: {text}" if text else repr(error)}


def portable(error: BaseException | None) -> BaseException | None:
    """Returns an error that can be pickled: itself, or a built-in one with the same message."""
    if error is None:
        return None
    candidates = [error]
    for kind in type(error).__mro__:
        if kind.__module__ == "builtins" and issubclass(kind, BaseException):
            try:
                candidates.append(kind(str(error)))
            except Exception:  # UnicodeDecodeError and others want more than a message
                continue
    for candidate in candidates:
        try:
            copy = pickle.loads(pickle.dumps(candidate))
            if type(copy) is type(candidate) and str(copy) == str(error):
                return candidate
        except Exception:  # exceptions are programs, and raise what they like
            continue
    return RuntimeError(str(error))


def _plain(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, enum.Enum):
        return _plain(value.value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if isinstance(value, (Sequence, set, frozenset)) and not isinstance(value, (str, bytes)):
        return [_plain(item) for item in value]
    if isinstance(value, (np.ndarray, np.generic)) or hasattr(value, "tolist"):
        return value.tolist()
    return value if isinstance(value, (bool, int, float, str)) else str(value)
