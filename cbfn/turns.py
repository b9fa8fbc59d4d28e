"""A lock that a thread may take again while it has it, and at which nobody is passed over."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from threading import RLock, get_ident
from typing import Any, Concatenate, ParamSpec, TypeVar

S = TypeVar("S", bound=Any)
P = ParamSpec("P")
R = TypeVar("R")


class Turns:
    """A context that one thread at a time is in.

    `threading.RLock` lets a thread that leaves and comes back at once pass those that wait. Here
    all who come stand in line at a gate, whose holder is the next: who leaves stands behind it.
    Handlers of signals may come while their thread waits.
    """

    def __init__(self) -> None:
        self._gate = RLock()
        self._inside = RLock()
        self._owner: int | None = None
        self._calls: list[object] = []

    def enter(self, call: object) -> None:
        """Waits for its turn; `call` is a new object, for `leave`."""
        if self._owner != get_ident():
            with self._gate:
                self._inside.acquire()
            self._owner = get_ident()
        self._calls.append(call)

    def leave(self, call: object) -> None:
        """Ends what `enter(call)` began, even where an exception cut either short.

        It does nothing the second time: called in two nested `finally` clauses, it is complete
        whatever line Ctrl-C comes at.
        """
        if self._owner == get_ident():
            if call in self._calls:
                del self._calls[self._calls.index(call) :]
            if self._calls:
                return
            self._owner = None
        with suppress(RuntimeError):  # this thread does not hold it
            self._inside.release()

    def __enter__(self) -> None:
        self.enter(object())

    def __exit__(self, *_: object) -> None:
        self.leave(self._calls[-1])


def in_turn(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Returns a method of an object with `_turns`, for which other threads wait."""

    @wraps(method)
    def call(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        me, turns = object(), self._turns
        try:
            try:
                turns.enter(me)
                return method(self, *args, **kwargs)
            finally:
                turns.leave(me)
        finally:
            turns.leave(me)

    return call
