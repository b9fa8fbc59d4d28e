"""A lock that a thread may take again while it has it, and at which nobody is passed over."""

from __future__ import annotations

from threading import RLock, get_ident


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
        self._depth = 0

    def __enter__(self) -> None:
        me = get_ident()
        if self._owner == me:
            self._inside.acquire()
        else:
            with self._gate:
                self._inside.acquire()
            self._owner = me
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
        self._inside.release()
