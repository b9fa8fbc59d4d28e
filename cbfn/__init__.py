"""cbfn: continuous-batching LLM generation from a pure scheduler and compiled step functions.

Public names are imported on first use, so that the scheduling core runs without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from cbfn.version import __version__ as __version__

if TYPE_CHECKING:
    from cbfn.config import EngineConfig, SamplingParams
    from cbfn.engine import Engine
    from cbfn.generating import generate
    from cbfn.model import ModelNotSupported
    from cbfn.runner import Runner, Ticket
    from cbfn.types import (
        CacheSpec,
        EngineStats,
        InvariantViolation,
        Plan,
        Request,
        RequestOutput,
        RequestRejected,
        RequestStatus,
        SchedulerStalled,
        StepResult,
    )

_HOMES = {
    "cbfn.config": ("EngineConfig", "SamplingParams"),
    "cbfn.engine": ("Engine",),
    "cbfn.generating": ("generate",),
    "cbfn.model": ("ModelNotSupported",),
    "cbfn.runner": ("Runner", "Ticket"),
    "cbfn.types": (
        "CacheSpec",
        "EngineStats",
        "InvariantViolation",
        "Plan",
        "Request",
        "RequestOutput",
        "RequestRejected",
        "RequestStatus",
        "SchedulerStalled",
        "StepResult",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "CacheSpec",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "InvariantViolation",
    "ModelNotSupported",
    "Plan",
    "Request",
    "RequestOutput",
    "RequestRejected",
    "RequestStatus",
    "Runner",
    "SamplingParams",
    "SchedulerStalled",
    "StepResult",
    "Ticket",
    "generate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'cbfn' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
