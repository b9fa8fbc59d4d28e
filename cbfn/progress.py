"""Progress on stderr: a bar that is redrawn on a terminal, a line now and then in a file."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from threading import Lock
from typing import IO, Any

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 10.0
_LINE = "{n_fmt}/{total_fmt}{unit} [{elapsed}<{remaining}{postfix}]"


def bar(
    total: int | None = None,
    name: str = "",
    shown: bool = True,
    *,
    unit: str = "",
    over: Iterable[Any] | None = None,
) -> tqdm[Any]:
    """Returns a tqdm bar on stderr, which counts to `total`, or what is iterated with it.

    On a terminal, or in a notebook, it is redrawn in place. Elsewhere it writes whole lines: at the
    start, every `SECONDS_BETWEEN_LINES` at most, and at the end.

    Arguments:
        total: how many there are; None where that is not known.
        name: what is being done.
        shown: False for a bar that is never shown.
        unit: what is counted, in the plural.
        over: what to iterate.
    """
    options: dict[str, Any] = {"unit": f" {unit}" if unit else ""}
    if not shown or sys.stderr is None:
        options["disable"] = True  # named only here: otherwise TQDM_DISABLE counts
    if not is_live(sys.stderr):
        line = f"{name}: {_LINE}" if name else _LINE
        options |= {"file": _Lines(sys.stderr), "bar_format": line, "miniters": 1}
        if "TQDM_MININTERVAL" not in os.environ:
            options["mininterval"] = SECONDS_BETWEEN_LINES
    return tqdm(over, name or None, total, **options)


def is_live(file: Any) -> bool:
    """Returns True for what a carriage return goes back in: a terminal, a notebook."""
    in_notebook = type(file).__module__.startswith("ipykernel.")
    return in_notebook or (hasattr(file, "isatty") and file.isatty())


class _Lines:
    """A text file in which all that tqdm draws becomes a line of its own."""

    def __init__(self, file: IO[str]) -> None:
        self._file, self._last = file, ""

    def write(self, text: str) -> None:
        # a bar below another one moves the cursor up and down
        line = text.replace("\x1b[A", "").strip("\r\n ")
        if line and line != self._last:
            self._last = line
            self._file.write(f"{line}\n")

    def flush(self) -> None:
        self._file.flush()


@contextmanager
def hidden_bars() -> Iterator[None]:
    """A context in which transformers shows no bars of its own for reading and converting weights.

    Downloads still show theirs. What was set before is set again when the last thread leaves.
    """
    global _num_inside, _restore
    with _lock:
        if _num_inside == 0:
            _restore = _hide()
        _num_inside += 1
    try:
        yield
    finally:
        with _lock:
            _num_inside -= 1
            if _num_inside == 0:
                _restore()


_lock = Lock()
_num_inside = 0
_restore: Callable[[], None]


def _hide() -> Callable[[], None]:
    """Hides the bars of transformers, and returns what brings them back."""
    from transformers.utils import logging

    def hidden(factory: Any, args: Any, options: Any) -> Any:
        return factory(*args, **{**options, "disable": True})

    hook = logging.set_tqdm_hook(hidden)
    gguf: Any = None  # it knows of no hook, and may be gone in a later release
    with suppress(ImportError):
        gguf = import_module("transformers.modeling_gguf_pytorch_utils")
    shown = getattr(gguf, "tqdm", None)
    if shown is not None:
        gguf.tqdm = lambda *args, **options: hidden(shown, args, options)

    def restore() -> None:
        logging.set_tqdm_hook(hook)
        if shown is not None:
            gguf.tqdm = shown

    return restore
