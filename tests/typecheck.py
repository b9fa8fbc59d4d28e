"""The type checker behind the jaxtyping hook of the tests.

beartype checks arrays and tensors wherever they cross the edge of a cbfn function or dataclass.
Functions without any are left alone: the doors of the library do their own checks, with their own
errors. Inside `torch.compile` the raw function runs, since checks do not trace. This module lies
outside the package, because what is hooked is checked.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype

_CHECKED = beartype(conf=BeartypeConf(is_pep484_tower=True))


def checker(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` with its arguments and result checked if it has arrays among them."""
    hints = " ".join(map(str, getattr(function, "__annotations__", {}).values()))
    if "ndarray" not in hints and "Tensor" not in hints:
        return function
    checked = _CHECKED(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and torch.compiler.is_compiling():
            return function(*args, **kwargs)
        return checked(*args, **kwargs)

    return call


@contextmanager
def unchecked() -> Iterator[None]:
    """No annotation is checked within."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)
