"""Checks of single values, with errors that name the field, the value and what was expected."""

from __future__ import annotations

import math
import operator
import pickle
import sys
from collections.abc import Iterable
from typing import Any


def describe_range(low: float | None, high: float | None, low_open: bool = False) -> str:
    """Returns the allowed range in words: `>= 0`, `in (0, 1]`, or an empty string for no bound."""
    sign = ">" if low_open else ">="
    if low is not None and high is not None:
        return f" in {'(' if low_open else '['}{_plain(low)}, {_plain(high)}]"
    if low is not None:
        return f" {sign} {_plain(low)}"
    return f" <= {_plain(high)}" if high is not None else ""


def _plain(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


def integer(field: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """Returns `value` as a Python int. Raises ValueError for anything else or out of range."""
    expected = "an integer" + describe_range(low, high)
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{field}: expected {expected}, got {value!r}") from None
    in_range = (low is None or number >= low) and (high is None or number <= high)
    if isinstance(value, bool) or not in_range:
        raise ValueError(f"{field}: expected {expected}, got {value!r}")
    return number


def real(
    field: str,
    value: Any,
    low: float | None = None,
    high: float | None = None,
    low_open: bool = False,
) -> float:
    """Returns `value` as a finite float (an int is fine). Raises ValueError otherwise."""
    expected = "a finite number" + describe_range(low, high, low_open)
    if isinstance(value, (str, bytes, bool)):
        raise ValueError(f"{field}: expected {expected}, got {value!r}")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{field}: expected {expected}, got {value!r}") from None
    too_low = low is not None and (number <= low if low_open else number < low)
    if not math.isfinite(number) or too_low or (high is not None and number > high):
        raise ValueError(f"{field}: expected {expected}, got {value!r}")
    return number


def boolean(field: str, value: Any) -> bool:
    """Returns `value`. Raises ValueError unless it is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{field}: expected True or False, got {value!r}")
    return value


def text(field: str, value: Any) -> str:
    """Returns `value`. Raises ValueError unless it is a non-empty string."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{field}: expected a non-empty string, got {value!r}")
    return value


def texts(field: str, value: Any) -> tuple[str, ...]:
    """Returns one string or an iterable of non-empty strings as a tuple."""
    items = (value,) if isinstance(value, str) else _iterate(field, value, "strings")
    return tuple(text(field, item) for item in items)


def token_ids(field: str, value: Any) -> tuple[int, ...]:
    """Returns an iterable of non-negative token ids as a tuple of ints."""
    return tuple(integer(field, item, 0, 2**31 - 1) for item in _iterate(field, value, "token ids"))


def _iterate(field: str, value: Any, what: str) -> Iterable[Any]:
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        return value
    raise ValueError(f"{field}: expected a sequence of {what}, got {value!r}")


def picklable(field: str, function: Any) -> None:
    """Raises PicklingError for a function that can not be pickled, and says what can.

    With a library that pickles functions by value (cloudpickle, as Ray uses it) all can.
    """
    if any(name.rpartition(".")[2] in ("cloudpickle", "dill") for name in sys.modules):
        return
    try:
        pickle.dumps(function)
    except Exception as error:  # AttributeError, PicklingError and TypeError, by version and kind
        raise pickle.PicklingError(
            f"{field}: expected a name or a function that a module has, to be pickled; "
            f"got {function!r:.80}. Define it with `def` in a module"
        ) from error
