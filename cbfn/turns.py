"""A lock that a thread may take again while it has it, and at which nobody is passed over."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from threading import RLock, local
from typing import Any, Concatenate, ParamSpec, TypeVar

S = TypeVar("S", bound=Any)
P = ParamSpec("P")
R = TypeVar("R")


class Turns:
    """A lock that serves threads in the order in which they come.

    With `threading.RLock` a thread that leaves and comes back at once passes those that wait. Here
    threads wait at a gate. The one that holds the gate is next; a thread that comes back waits
    behind it. A thread may enter again while it is inside, and so may a signal handler, even while
    its thread waits.
    """

    def __init__(self) -> None:
        self._gate = RLock()
        self._inside = RLock()
        self._local = local()  # of each thread: its calls that are not over, the first one outside

    def enter(self, call: object) -> None:
        """Waits for its turn; `call` is a new object, for `leave`."""
        calls = self._calls()
        calls.append(call)
        if len(calls) > 1:
            self._inside.acquire()
        else:
            with self._gate:
                self._inside.acquire()

    def leave(self, call: object) -> None:
        """Ends what `enter(call)` began, even where an exception cut either short.

        It does nothing the second time: called in two nested `finally` clauses, it is complete
        whatever line Ctrl-C comes at.
        """
        calls = self._calls()
        if calls[:1] == [call]:  # before the call is over: a handler must find the gate open
            self._release()
        if call in calls:
            del calls[calls.index(call) :]
        if not calls:  # what a handler has acquired in between
            self._release()

    def __enter__(self) -> None:
        self.enter(object())

    def __exit__(self, *_: object) -> None:
        self.leave(self._calls()[-1])

    def _calls(self) -> list[object]:
        calls: list[object] = vars(self._local).setdefault("calls", [])
        return calls

    def _release(self) -> None:
        """Gives back all that this thread has acquired."""
        for lock in (self._inside, self._gate):
            with suppress(RuntimeError):  # it has nothing more
                while True:
                    lock.release()


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
