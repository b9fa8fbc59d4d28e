"""Token ids as they are handed out: views that cost nothing, and the lists that they turn into."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, overload

import numpy as np


class TokenIds(list[int]):
    """A read-only list of token ids.

    It is a real list for all that asks for one (`json`, tokenizers, tensors), is hashed by what it
    holds, and equals any sequence or array with the same ids. `+` and slices give plain lists.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, list):
            return list.__eq__(self, other)
        if not isinstance(other, (Sequence, np.ndarray)) or isinstance(other, str):
            return NotImplemented
        if isinstance(other, np.ndarray) and other.ndim != 1:
            return False
        return len(self) == len(other) and list.__eq__(self, [*other])

    def __ne__(self, other: object) -> bool:
        equal = self.__eq__(other)
        return equal if equal is NotImplemented else not equal

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self))

    def __add__(self, other: Any) -> list[Any]:
        return [*self, *other] if isinstance(other, (list, Tokens)) else NotImplemented

    def __radd__(self, other: Any) -> list[Any]:
        return [*other, *self] if isinstance(other, (list, Tokens)) else NotImplemented

    def __iadd__(self, other: Any) -> Any:  # the name gets a new list, as with a tuple
        return [*self, *other]

    def __imul__(self, number: Any) -> Any:  # type: ignore[misc]
        return list(self) * number

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return TokenIds, (list(self),)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("token ids that were handed out are read-only; change a copy: list(...)")

    append = extend = insert = remove = pop = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = _refuse


class Tokens(Sequence[int]):
    """A read-only sequence of token ids: a view of the first `length` entries of a log.

    The log only ever grows behind the view, so the view never changes. It equals any sequence
    with the same ids; `numpy.asarray` copies it. A copy holds these ids alone.
    """

    __slots__ = ("_ids", "_length", "_log")

    def __init__(self, log: array[int] | Sequence[int] | np.ndarray, length: int | None = None):
        self._log = log
        self._length = len(log) if length is None else length
        self._ids: TokenIds | None = None

    def ids(self, length: int | None = None) -> TokenIds:
        """Returns the ids as a list, which is made on the first call.

        `length` is there for the sake of `TokenLog.ids`; a view has its own.
        """
        if self._ids is None:
            self._ids = TokenIds(plain_ids(self._log[: self._length]))
        return self._ids

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [int(self._log[i]) for i in range(*index.indices(self._length))]
        place = index + self._length if index < 0 else index
        if 0 <= place < self._length:
            return int(self._log[place])
        raise IndexError(f"token {index} of {self._length}")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._log[: self._length], dtype=np.int32 if dtype is None else dtype)

    def __add__(self, other: Any) -> list[Any]:
        return [*self, *other] if isinstance(other, (list, Tokens)) else NotImplemented

    def __radd__(self, other: Any) -> list[Any]:
        return [*other, *self] if isinstance(other, list) else NotImplemented

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (Sequence, np.ndarray)) or isinstance(other, str):
            return NotImplemented
        return len(other) == self._length and self[:] == list(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __reduce__(self) -> tuple[Callable[..., Tokens], tuple[Any, ...]]:
        return _copied, (np.array(self),)

    def __repr__(self) -> str:
        return f"Tokens({self[:]!r})"


def _copied(ids: np.ndarray) -> Tokens:
    ids.flags.writeable = False
    return Tokens(ids)


def plain_ids(values: Iterable[Any]) -> list[Any]:
    """Returns a list without the numbers, arrays and tensors of other libraries in it."""
    if hasattr(values, "tolist"):
        whole = values.tolist()
        return whole if isinstance(whole, list) else [whole]
    return [value.tolist() if hasattr(value, "tolist") else value for value in values]
