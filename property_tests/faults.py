"""Faults planted in the core: a line of one function is another one for a while."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from textwrap import dedent
from typing import Any, NamedTuple


class Edit(NamedTuple):
    """In one function the text `old`, which occurs once, becomes `new`."""

    function: Callable[..., Any]
    old: str
    new: str


@contextmanager
def planted(*edits: Edit) -> Iterator[None]:
    """Runs with edited functions. Raises ValueError where `old` is not written there, or not once.

    Their code objects are exchanged and not their names, so whoever imported or wrapped them has
    the fault too.
    """
    sources: dict[Any, str] = {}
    for edit in edits:
        function = inspect.unwrap(edit.function)
        source = sources.get(function) or _source(function)
        if source.count(edit.old) != 1:
            raise ValueError(
                f"{function.__qualname__} has {edit.old!r} {source.count(edit.old)} times, "
                "expected once: plant the fault anew"
            )
        sources[function] = source.replace(edit.old, edit.new)
    edited = {function: _code(function, source) for function, source in sources.items()}
    originals = {function: function.__code__ for function in edited}
    try:
        for function, code in edited.items():
            function.__code__ = code
        yield
    finally:
        for function, code in originals.items():
            function.__code__ = code


def _source(function: Any) -> str:
    source = dedent(inspect.getsource(function))
    return source[source.index("def ") :]  # decorators stay as they are


def _code(function: Any, source: str) -> Any:
    names: dict[str, Any] = {}
    # postponed annotations are inherited from this module: shapes are not evaluated
    code = compile(source, f"<{function.__qualname__} with a fault>", "exec")
    exec(code, function.__globals__, names)
    return names[function.__name__].__code__
