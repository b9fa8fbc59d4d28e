"""Prompts as people have them: texts, lists, tensors, and what tokenizers return.

A field is what errors call a prompt: `prompt`, or `prompts[3]`. Tensors are known by their `shape`
and `dtype`, so nothing here imports torch.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Protocol

import numpy as np
from jaxtyping import Int32

MAX_TOKEN_ID = 2**31 - 1
_ONE_BY_ONE = "pass each as a prompt of its own"


class ArrayLike(Protocol):
    """A tensor or an array, on any device."""

    @property
    def shape(self) -> Any: ...
    @property
    def dtype(self) -> Any: ...


Prompt = str | Sequence[int] | ArrayLike | Mapping[str, Any]


def listed(prompts: Any) -> list[Any]:
    """Returns the prompts of what `generate` is called with, one entry for each.

    Taken are iterables of prompts, integer tensors and arrays [prompts, T], and mappings with
    `input_ids` and perhaps an `attention_mask`, whose padding is cut off. A row that has no valid
    mask gives a ValueError in its place; `tokenized` raises it.

    Raises ValueError for what is no list of prompts.
    """
    expected = "prompts: expected a list of prompts, got"
    if isinstance(prompts, str):
        raise ValueError(f"{expected} the string {prompts!r:.60}; did you mean [prompts]?")
    if isinstance(prompts, Mapping):
        rows, is_one = _encoded("prompts", prompts)
        if is_one and rows:
            raise ValueError(f"{expected} one prompt: {_show(prompts)}; did you mean [prompts]?")
        return rows
    if _is_array(prompts):
        return _array_rows(prompts)
    if _is_encoding(prompts):
        raise ValueError(f"{expected} one prompt: {_show(prompts)}; did you mean [prompts]?")
    if hasattr(prompts, "dtypes"):  # iterating over a data frame gives the names of its columns
        raise ValueError(f"{expected} a {type(prompts).__name__}; pass one of its columns")
    if isinstance(prompts, (bytes, bytearray, memoryview)):
        raise ValueError(f"{expected} {_show(prompts)}; decode it, and pass a list")
    if isinstance(prompts, Set):
        raise ValueError(f"{expected} a set or the keys of a dict: {_show(prompts)}; pass a list")
    if not isinstance(prompts, Iterable):
        raise ValueError(f"{expected} {_show(prompts)}; pass a list of texts or of token ids")
    prompts = list(prompts)
    if prompts and all(map(_is_integer, prompts)):
        raise ValueError(f"{expected} one prompt: {_show(prompts)}; did you mean [prompts]?")
    return prompts


def tokenized(field: str, prompt: Any, tokenizer: Any = None) -> Int32[np.ndarray, "T"]:
    """Returns the token ids of one prompt, read-only; texts go through the tokenizer.

    Raises ValueError for what is no prompt, and for a text that the tokenizer does not take.
    """
    if isinstance(prompt, ValueError):  # `listed` has found it
        raise prompt
    if not isinstance(prompt, str):
        return token_ids(field, prompt)
    if tokenizer is None:
        raise ValueError(
            f"{field}: expected token ids without a tokenizer, got the text {prompt!r:.60}; "
            "pass tokenizer=... beside the model"
        )
    try:
        ids = tokenizer(prompt).input_ids
    except Exception as error:  # lone surrogates, for one
        raise ValueError(f"{field}: the tokenizer refused {prompt!r:.60}: {error}") from error
    if not len(ids):
        raise ValueError(
            f"{field}: expected at least one token id, got none: the tokenizer makes none of "
            f"{prompt!r:.60}"
        )
    return token_ids(field, ids)


def token_ids(field: str, prompt: Any) -> Int32[np.ndarray, "T"]:
    """Returns one prompt of token ids as a read-only copy.

    Taken are sequences of integers, integer tensors and arrays [T] or [1, T], and what a tokenizer
    returns for one text. Raises ValueError that names the field, the value and what was expected.
    """
    if isinstance(prompt, Mapping):
        prompt = _only_row(field, prompt)
    elif _is_encoding(prompt):
        prompt = _without_padding(field, prompt.ids, prompt.attention_mask)
    ids = _from_array(field, prompt) if _is_array(prompt) else _from_sequence(field, prompt)
    if not len(ids):
        raise ValueError(f"{field}: expected at least one token id, got none")
    if ids.min() < 0 or ids.max() > MAX_TOKEN_ID:
        position = int(np.argmax((ids < 0) | (ids > MAX_TOKEN_ID)))
        raise _out_of_range(field, position, ids[position])
    ids = ids.astype(np.int32)
    ids.flags.writeable = False
    return ids


def _from_array(field: str, prompt: Any) -> np.ndarray:
    """Returns the ids of a tensor or an array [T] or [1, T]; their range is not checked."""
    if len(prompt.shape) == 2 and prompt.shape[0] != 1:
        raise ValueError(
            f"{field}: expected one prompt, got {prompt.shape[0]} rows: {_show(prompt)}; "
            f"{_ONE_BY_ONE}"
        )
    if len(prompt.shape) not in (1, 2) or not _has_integers(prompt):
        hint = f"; did you mean [{prompt!r}]?" if _is_integer(prompt) else ""
        raise ValueError(
            f"{field}: expected token ids, a one-dimensional sequence of integers, "
            f"got {_show(prompt)}{hint}"
        )
    return _on_host(field, prompt).reshape(-1)


def _from_sequence(field: str, prompt: Any) -> np.ndarray:
    """Returns the ids of a sequence; their range is not checked."""
    if not _is_sequence(prompt):
        raise _no_prompt(field, prompt)
    try:
        items = prompt if isinstance(prompt, (list, tuple)) else prompt[:]
    except TypeError:  # a deque
        items = list(prompt)
    try:
        ids = np.array(items)
    except (TypeError, ValueError, RuntimeError):  # ragged lists; tensors of a GPU
        return _one_by_one(field, items)
    if ids.size == 0 and len(items) == 0:
        return ids
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        return _one_by_one(field, items)
    for position in np.flatnonzero(ids >> 1 == 0).tolist():  # True and False count as 1 and 0
        if not _is_token(items[position]):
            raise _no_token(field, position, items)
    return ids


def _one_by_one(field: str, items: Sequence[Any]) -> np.ndarray:
    """Returns the ids of a sequence that numpy takes for something else. Raises for the first item
    that is no id."""
    for position, item in enumerate(items):
        if not _is_token(item):
            raise _no_token(field, position, items)
        if not 0 <= (token := operator.index(item)) <= MAX_TOKEN_ID:
            raise _out_of_range(field, position, token)
    return np.array([operator.index(item) for item in items])


def _only_row(field: str, prompt: Mapping[str, Any]) -> Any:
    """Returns the ids of the one row that a tokenizer's output has."""
    rows, _ = _encoded(field, prompt)
    if len(rows) > 1:
        raise ValueError(f"{field}: expected one prompt, got {len(rows)} rows; {_ONE_BY_ONE}")
    if rows and isinstance(rows[0], ValueError):
        raise rows[0]
    return rows[0] if rows else []


def _encoded(field: str, encoding: Mapping[str, Any]) -> tuple[list[Any], bool]:
    """Returns the rows of a tokenizer's output, and whether it is one row and no list of rows.

    A row whose mask is not valid is a ValueError.
    """
    ids, mask = encoding.get("input_ids"), encoding.get("attention_mask")
    if ids is None:
        raise ValueError(
            f"{field}: expected a prompt or a mapping with input_ids, got {_show(encoding)}"
            f"{_chat_hint(encoding)}"
        )
    rows, is_one = _rows(f"{field}.input_ids", ids)
    if mask is None:
        return rows, is_one
    masks, _ = _rows(f"{field}.attention_mask", mask)
    if len(masks) != len(rows):
        raise ValueError(
            f"{field}.attention_mask: expected {len(rows)} rows, one for each of input_ids, "
            f"got {len(masks)}"
        )
    several = field == "prompts"
    found: list[Any] = []
    for index, (row, row_mask) in enumerate(zip(rows, masks, strict=True)):
        try:
            name = f"{field}[{index}]" if several else field
            found.append(_without_padding(name, row, row_mask))
        except ValueError as error:
            found.append(error)
    return found, is_one


def _rows(field: str, value: Any) -> tuple[list[Any], bool]:
    """Returns the rows of a matrix or of a ragged list, and whether it is one row on its own."""
    if _is_array(value) and not _has_objects(value):
        if len(value.shape) not in (1, 2):
            raise ValueError(f"{field}: expected one row, or rows of ids, got {_show(value)}")
        matrix = _on_host(field, value)
        return list(np.atleast_2d(matrix)), matrix.ndim == 1
    if not _is_sequence(value):
        raise ValueError(f"{field}: expected one row, or rows of ids, got {_show(value)}")
    rows = list(value)
    if all(isinstance(item, (bool, int, float)) or _ndim(item) == 0 for item in rows):
        return ([rows] if rows else []), True
    return rows, False


def _without_padding(field: str, row: Any, mask: Any) -> Any:
    """Returns the part of a row for which the mask is 1."""
    if not (_is_sequence(row) or _is_array(row)):
        raise _no_prompt(field, row)
    row = _on_host(field, row) if _is_array(row) else row
    ones = _on_host(field, mask) if _is_array(mask) else np.array(mask)
    name = f"{field}: attention_mask"
    if ones.shape != (len(row),):
        raise ValueError(
            f"{name}: expected {len(row)} numbers, one for each token of input_ids, "
            f"got {ones.size if ones.ndim else mask!r:.60}"
        )
    wrong = [number for number in ones.tolist() if number not in (0, 1)]
    if wrong:
        raise ValueError(f"{name}: expected 1 for tokens and 0 for padding, got {wrong[0]!r}")
    kept = np.flatnonzero(ones)
    if not len(kept):
        raise ValueError(f"{name}: expected a 1 for at least one token, got only zeros")
    first, end = int(kept[0]), int(kept[-1]) + 1
    if end - first != len(kept):
        hole = first + int(np.argmin(ones[first:end]))
        raise ValueError(
            f"{name}: expected padding on the left or on the right only, "
            f"got a hole: 0 at position {hole}, between ones"
        )
    return row[first:end]


def _array_rows(prompts: Any) -> list[Any]:
    """Returns the rows of an integer matrix, or the entries of an array of objects or texts."""
    if len(prompts.shape) == 1 and _has_objects(prompts):
        return list(prompts)
    if len(prompts.shape) == 2 and _has_integers(prompts):
        return list(_on_host("prompts", prompts))
    problem = "prompts: expected a list of prompts, got"
    if len(prompts.shape) == 1 and _has_integers(prompts):
        raise ValueError(f"{problem} one prompt: {_show(prompts)}; did you mean [prompts]?")
    raise ValueError(
        f"{problem} {_show(prompts)}; a tensor or an array of prompts has integers, a row for each"
    )


def _on_host(field: str, value: Any) -> np.ndarray:
    if isinstance(value, np.ma.MaskedArray):
        raise ValueError(
            f"{field}: expected an array without a mask, got a masked one; pass its .compressed() "
            "ids, or input_ids with an attention_mask"
        )
    try:
        return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    except Exception as error:  # whatever a library raises for sparse, lazy, nested tensors
        raise ValueError(
            f"{field}: {_show(value)} cannot be copied to the host ({error}); pass a list"
        ) from error


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _ndim(value: Any) -> int | None:
    return len(value.shape) if _is_array(value) else None


def _dtype(value: Any) -> str:
    return str(value.dtype).rpartition(".")[2].lstrip("<>=|").lower()


def _has_integers(value: Any) -> bool:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.dtype.kind in "iu"
    return _dtype(value).startswith(("int", "uint"))


def _has_objects(value: Any) -> bool:
    """Returns whether an array holds anything but numbers: numpy's and pandas' objects, texts."""
    return getattr(value.dtype, "kind", "") in ("O", "U", "T")


def _is_sequence(value: Any) -> bool:
    indexed = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    return indexed and not isinstance(value, (str, bytes, bytearray, memoryview, Mapping))


def _is_encoding(value: Any) -> bool:
    """Returns whether this is what a tokenizer of the library `tokenizers` returns."""
    return hasattr(value, "ids") and hasattr(value, "attention_mask")


def _is_integer(value: Any) -> bool:
    """Returns whether this is one integer, True and False among them."""
    return isinstance(value, int) or (_ndim(value) == 0 and _has_integers(value))


def _is_token(value: Any) -> bool:
    """Returns whether this is one integer that may be a token id."""
    if _is_array(value):
        return _ndim(value) == 0 and _has_integers(value)
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _show(value: Any) -> str:
    """Returns a value in words, on one line."""
    if _is_array(value) and len(value.shape):
        kind = "a tensor" if hasattr(value, "detach") else "an array"
        return f"{kind} of shape {list(value.shape)} and dtype {_dtype(value)}"
    if isinstance(value, Mapping):
        return f"{type(value).__name__} with the keys {list(value)!r:.60}"
    return " ".join(f"{value!r:.60}".split())


def _chat_hint(value: Any) -> str:
    if isinstance(value, Mapping) and {"role", "content"} <= set(value):
        return "; turn messages into a prompt with tokenizer.apply_chat_template"
    return ""


def _no_prompt(field: str, prompt: Any) -> ValueError:
    hint = ""
    if _is_integer(prompt):
        hint = f"; did you mean [{prompt!r}]?"
    elif isinstance(prompt, (bytes, bytearray, memoryview)):
        hint = "; decode it"
    elif isinstance(prompt, Set):
        hint = "; a set has no order"
    elif isinstance(prompt, (Iterator, Iterable)) and not isinstance(prompt, str):
        hint = "; pass a list of what it yields"
    return ValueError(
        f"{field}: expected text or token ids, a one-dimensional sequence of integers, "
        f"got {_show(prompt)}{hint}"
    )


def _no_token(field: str, position: int, items: Sequence[Any]) -> ValueError:
    item, hint = items[position], _chat_hint(items[position])
    if isinstance(item, str) or (_is_sequence(item) and _ndim(item) != 0):
        looks_like = f"this looks like a list of prompts; {_ONE_BY_ONE}"
        hint = f"; did you mean {field}[0]?" if len(items) == 1 else f"; {looks_like}"
    return ValueError(
        f"{field}[{position}]: expected a token id, an integer, got {_show(item)}{hint}"
    )


def _out_of_range(field: str, position: int, token: int) -> ValueError:
    return ValueError(f"{field}[{position}]: expected a token id in [0, 2**31), got {token}")
