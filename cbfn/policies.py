"""Policies: in which order requests are offered to the scheduler.

A policy is a pure function of the state that yields request ids; the scheduler takes them one by
one until a budget is spent. What a policy leaves out does not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain, islice
from typing import TYPE_CHECKING

from cbfn.types import RequestId

if TYPE_CHECKING:
    from cbfn.state import BatchState

Policy = Callable[["BatchState"], Iterable[RequestId]]


def fifo(state: BatchState) -> Iterable[RequestId]:
    """Returns decoding, then prefilling, then waiting requests, each in order of arrival."""
    return chain(state.decoding, state.prefilling, state.waiting)


def prefill_first(state: BatchState) -> Iterable[RequestId]:
    """Returns prefilling and waiting requests before decoding ones: rows fill up soonest.

    A decoding request that `max_requests_per_batch` admissions have overtaken goes first, so no
    stream of short prompts can hold it back: at most that many more fit in one step, which bounds
    the admissions that overtake it by twice `max_requests_per_batch`.
    """
    # more waiting requests than free rows would only be passed over
    newcomers = islice(state.waiting, state.num_free_rows)
    return chain(state.overtaken, state.prefilling, newcomers, state.decoding)


NAMED: dict[str, Policy] = {"fifo": fifo, "prefill_first": prefill_first}
