"""The type checker behind the jaxtyping hook of the tests.

beartype checks every annotated function of cbfn in plain calls. Inside `torch.compile` the raw
function runs: checks do not trace. It lives outside the package, because what is hooked is checked.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintForwardRefException

_CHECKED = beartype(conf=BeartypeConf(is_pep484_tower=True))


def checker(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` with its arguments and result checked, except while compiling."""
    checked = _CHECKED(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and torch.compiler.is_compiling():
            return function(*args, **kwargs)
        return checked(*args, **kwargs)

    return call
