"""What a commit hands out: `RequestOutput`s that are built when they are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, overload

import numpy as np

from cbfn.requestoutput import TextSource
from cbfn.sequence import Sequences
from cbfn.types import RequestOutput, RequestStatus, RequestTimes

_times = partial(tuple.__new__, RequestTimes)  # what RequestTimes does, without a Python call


class End(NamedTuple):
    """How a request ended."""

    status: RequestStatus
    finish_reason: str
    stop_reason: int | str | None = None
    error: BaseException | None = None


class Outputs(Sequence[RequestOutput]):
    """The outputs of one commit, a sequence that builds each item on access.

    Arguments:
        ready: outputs that exist already, first in the sequence.
        sequences: the table right after the commit's values were entered.
        seats: the seats with news, the rest of the sequence.
        ends: for positions in `seats`, how that request ended.
        now: the commit's time.
        sources: what decodes the tokens of each request; None: outputs have no text.
    """

    def __init__(
        self,
        ready: tuple[RequestOutput, ...],
        sequences: Sequences,
        seats: np.ndarray,
        ends: Mapping[int, End],
        now: float,
        sources: Mapping[str, TextSource] | None = None,
    ) -> None:
        self._ready = ready
        self._sequences = sequences
        self._seats = seats
        self._ends = ends
        self._now = now
        self._sources = sources

    def with_text(self, sources: Mapping[str, TextSource]) -> Outputs:
        """Returns the same outputs, whose texts are made by the source of each request."""
        return Outputs(
            tuple(
                RequestOutput.build({**vars(output), "_source": sources[output.request_id]})
                for output in self._ready
            ),
            self._sequences,
            self._seats,
            self._ends,
            self._now,
            sources,
        )

    def __len__(self) -> int:
        return len(self._ready) + len(self._seats)

    def __iter__(self) -> Iterator[RequestOutput]:
        yield from self._ready
        for row, values in enumerate(zip(*self._columns, strict=True)):
            yield self._build(row, *values)

    @overload
    def __getitem__(self, index: int) -> RequestOutput: ...
    @overload
    def __getitem__(self, index: slice) -> list[RequestOutput]: ...
    def __getitem__(self, index: int | slice) -> RequestOutput | list[RequestOutput]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"output {index} of {len(self)}")
        row = index % len(self) - len(self._ready)
        if row < 0:
            return self._ready[row]
        return self._build(row, *(column[row] for column in self._columns))

    @cached_property
    def _columns(self) -> tuple[list[Any], ...]:
        s = self._sequences
        names = "request log num_generated num_cached epoch scheduled_at first_token_at"
        return tuple(getattr(s, name)[self._seats].tolist() for name in names.split())

    def _build(
        self,
        row: int,
        request: Any,
        log: Any,
        num_generated: int,
        num_cached: int,
        epoch: int,
        scheduled_at: float,
        first_token_at: float,
    ) -> RequestOutput:
        values = {  # with an underscore: where it comes from when it is read
            "request_id": request.request_id,
            "_prompt_token_ids": (request.prompt_token_ids, None),
            "_token_ids": (log, num_generated),
            "status": RequestStatus.DECODING,
            "num_cached_tokens": num_cached,
            "num_preemptions": epoch,
            "times": _times((request.arrival, scheduled_at, first_token_at, self._now)),
        }
        if self._sources is not None:
            values["_source"] = self._sources[request.request_id]
        if row in self._ends:
            values.update(self._ends[row]._asdict())
        return RequestOutput.build(values)
