"""The whole state of the scheduling core, as one immutable value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from immutables import Map

from cbfn.config import EngineConfig
from cbfn.ordered import OrderedInts
from cbfn.pages import Pool
from cbfn.policies import Policy
from cbfn.prefix import Hit, PrefixCache
from cbfn.sequence import Sequences, TokenLog
from cbfn.types import CacheSpec, Move, Plan, Request, RequestId, RequestOutput, RequestTimes


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """The KV of a waiting request in host memory.

    Arguments:
        hit: how many tokens, and the host chunks of them that layers still see.
        weights: version of the weights that computed it.
    """

    hit: Hit
    weights: int


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """A request without a seat: not admitted yet, or preempted.

    Arguments:
        serial: its number, in order of arrival.
        limit: tokens at which it ends with "length".
        epoch: how often it was preempted.
        log, num_generated: its tokens, of the log's generated ones the first `num_generated`.
        in_flight: True while a token of it is in an uncommitted plan; it is not planned before.
        num_cached: prompt tokens that the first admission found cached.
        times: what has happened to it so far.
        saved: its KV in host memory, if it is there.
    """

    request: Request
    serial: int
    limit: int
    epoch: int
    log: TokenLog
    num_generated: int
    in_flight: bool
    num_cached: int
    times: RequestTimes
    saved: Saved | None = None

    @property
    def num_known(self) -> int:
        return len(self.request.prompt_token_ids) + self.num_generated


@dataclass(frozen=True, slots=True, eq=False)
class BatchState:
    """Everything the scheduler knows. Made by `scheduler.init`, changed by its functions only.

    Arguments:
        cache: the pool of chunks and what is known of their content.
        host: the pool of host chunks.
        moves: copies between the two that the next plan carries, of requests that have ended too.
        sequences: the active requests, in seats.
        queue: serials of the waiting requests.
        entries: the waiting requests by serial.
        ids: serial of every request whose terminal output has not been handed out.
        seats: seat of every active request.
        uncommitted: launched plans, oldest first.
        ended: terminal outputs that the next commit hands out.
    """

    spec: CacheSpec
    config: EngineConfig
    policy: Policy
    cache: PrefixCache
    host: Pool
    sequences: Sequences
    moves: tuple[Move, ...] = ()
    queue: OrderedInts = OrderedInts()
    entries: Map[int, Waiting] = Map()
    ids: Map[RequestId, int] = Map()
    seats: Map[RequestId, int] = Map()
    uncommitted: tuple[Plan, ...] = ()
    ended: tuple[RequestOutput, ...] = ()
    weight_version: int = 0
    next_serial: int = 0
    next_step: int = 0
    num_admissions: int = 0
    num_preemptions: int = 0
    num_offloads: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0

    @property
    def decoding(self) -> Sequence[RequestId]:
        """Active requests whose prompt is computed, in order of arrival."""
        ids: list[RequestId] = self.sequences.request_id[self.decoding_seats].tolist()
        return ids

    @property
    def decoding_seats(self) -> np.ndarray:
        """Their seats, in the same order."""
        s = self.sequences
        decoding = s.num_computed[s.order] >= s.prefill_len[s.order]
        return s.order[decoding & self._unfinished]

    @property
    def prefilling(self) -> Sequence[RequestId]:
        """Active requests with a part of the prompt to compute, in order of arrival."""
        s = self.sequences
        return self._ids(s.num_computed[s.order] < s.prefill_len[s.order])

    @property
    def waiting(self) -> Sequence[RequestId]:
        """Requests that hold no memory, in order of arrival."""
        return _WaitingIds(self)

    @property
    def overtaken(self) -> Sequence[RequestId]:
        """Active requests left out of plans while a batch's worth of others was admitted."""
        s = self.sequences
        late = self.num_admissions - s.last_planned[s.order] >= self.config.row_budget
        return self._ids(late & self._unfinished)

    @property
    def num_active(self) -> int:
        """Active requests with work to be planned."""
        return int(np.count_nonzero(self._unfinished))

    @property
    def num_free_rows(self) -> int:
        """Rows that active requests leave to waiting ones."""
        return max(self.config.row_budget - self.num_active, 0)

    def request(self, request_id: RequestId) -> Request:
        """Returns an unfinished request. Raises KeyError for any other id."""
        seat = self.seats.get(request_id)
        if seat is not None:
            request: Request = self.sequences.request[seat]
            return request
        return self.entries[self.ids[request_id]].request

    @property
    def _unfinished(self) -> np.ndarray:
        """For the seats in order of arrival: True unless all tokens are planned already."""
        s = self.sequences
        return s.num_tokens[s.order] < s.limit[s.order]

    def _ids(self, chosen: np.ndarray) -> Sequence[RequestId]:
        ids: list[RequestId] = self.sequences.request_id[self.sequences.order[chosen]].tolist()
        return ids


class _WaitingIds(Sequence[RequestId]):
    __slots__ = ("_entries", "_queue")

    def __init__(self, state: BatchState) -> None:
        self._queue = state.queue
        self._entries = state.entries

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[RequestId]:
        for serial in self._queue:
            yield self._entries[serial].request.request_id

    def __reversed__(self) -> Iterator[RequestId]:
        for serial in reversed(self._queue):
            yield self._entries[serial].request.request_id

    @overload
    def __getitem__(self, index: int) -> RequestId: ...
    @overload
    def __getitem__(self, index: slice) -> list[RequestId]: ...
    def __getitem__(self, index: int | slice) -> RequestId | list[RequestId]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._entries[self._queue[index]].request.request_id

    def __contains__(self, request_id: object) -> bool:
        return any(request_id == mine for mine in self)
