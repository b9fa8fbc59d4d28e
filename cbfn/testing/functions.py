"""The functions of a scheduler, as one value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cbfn import scheduler


@dataclass(frozen=True, slots=True)
class Functions:
    """The functions of a scheduler; by default cbfn's own."""

    init: Callable[..., Any] = scheduler.init
    submit: Callable[..., Any] = scheduler.submit
    cancel: Callable[..., Any] = scheduler.cancel
    finish: Callable[..., Any] = scheduler.finish
    schedule: Callable[..., Any] = scheduler.schedule
    commit: Callable[..., Any] = scheduler.commit
    weights_updated: Callable[..., Any] = scheduler.weights_updated
    check_state: Callable[..., None] = scheduler.check_invariants
