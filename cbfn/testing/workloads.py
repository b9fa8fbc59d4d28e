"""A whole run as one value: requests, when they arrive, and which are cancelled when."""

from __future__ import annotations

from dataclasses import dataclass

from cbfn.config import EngineConfig
from cbfn.testing.functions import Functions
from cbfn.testing.loop import CheckedLoop
from cbfn.types import CacheSpec, Request


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that arrive at turns of the loop, in order.

    Arguments:
        spec, config: of the cache and the engine.
        requests: with ids of their own.
        arrivals: the turn before which each request is submitted, ascending.
        cancels: pairs of a turn and an index into `requests`.
        depth: launches left in flight after each turn, 0 or 1.
    """

    spec: CacheSpec
    config: EngineConfig
    requests: tuple[Request, ...]
    arrivals: tuple[int, ...]
    cancels: tuple[tuple[int, int], ...] = ()
    depth: int = 0


def run(
    workload: Workload,
    functions: Functions | None = None,
    *,
    depth: int | None = None,
    config: EngineConfig | None = None,
) -> CheckedLoop:
    """Returns the loop that ran a workload to its end.

    `depth` and `config` take the place of the workload's own. Raises InvariantViolation where the
    scheduler breaks a rule, or a request does not get the tokens that it gets alone.
    """
    depth = workload.depth if depth is None else depth
    loop = CheckedLoop(workload.spec, config or workload.config, functions or Functions())
    last = max((*workload.arrivals, *(turn for turn, _ in workload.cancels)), default=0)
    for turn in range(last + 1):
        for request, arrival in zip(workload.requests, workload.arrivals, strict=True):
            if arrival == turn:
                loop.submit(request)
        for at, index in workload.cancels:
            if at == turn:
                loop.cancel(workload.requests[index].request_id)
        loop.turn(depth)
    loop.drain(depth)
    return loop
