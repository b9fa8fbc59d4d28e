"""`schedule`: from a state to the next plan, on counts alone."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

import numpy as np

from cbfn import offload, policies, prefix, sequence, sizing
from cbfn.admitting import Admission, leave_queue, occupy
from cbfn.ending import preempt
from cbfn.pages import frozen
from cbfn.prefix import PrefixCache
from cbfn.sequence import Sequences
from cbfn.state import BatchState
from cbfn.types import CacheSpec, Plan, PlanInputs, RequestId


def schedule(state: BatchState, now: float = 0.0) -> tuple[BatchState, Plan | None]:
    """Returns the state and the plan of the next launch, or None where nothing can run now.

    Requests are taken in the policy's order until the token, row or chunk budget is spent. Active
    requests that get no chunk are stalled: from the newest to the oldest they are preempted until
    the demand of the rest is met, sparing those in the plan and the last active one. If nothing
    could be planned, this repeats until something can.

    Raises ValueError where two plans are uncommitted already, or where the policy yields an id
    that is no unfinished request.
    """
    if len(state.uncommitted) > 1:
        raise ValueError(
            f"schedule: at most one plan may be uncommitted, expected a commit of step "
            f"{state.uncommitted[0].step} first"
        )
    while True:
        draft = _Draft(state)
        draft.fill()
        plan = None
        if draft.seats or draft.admitted:
            state, plan = _build(draft, now)
        relieved = _relieve(state, draft)
        if plan is not None:
            return _with_moves(relieved, plan)
        if relieved is state:
            return state, None
        state = relieved


def _with_moves(state: BatchState, plan: Plan) -> tuple[BatchState, Plan]:
    """Returns the state and the plan just built, which carries what was preempted behind it."""
    if state.moves:
        plan = replace(plan, moves_beside=plan.moves_beside + state.moves)
        state = replace(state, uncommitted=(*state.uncommitted[:-1], plan), moves=())
    return state, plan


@dataclass(slots=True)
class _Draft:
    """The plan in the making: what is taken so far, and what is left of the budgets."""

    state: BatchState
    cache: PrefixCache = field(init=False)
    seats: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    taken: set[int] = field(default_factory=set)
    stalled: list[int] = field(default_factory=list)
    free_seats: Iterator[int] | None = None
    tokens_left: int = field(init=False)
    rows_left: int = field(init=False)
    chunks_left: int = field(init=False)
    num_active: int = field(init=False)

    def __post_init__(self) -> None:
        state = self.state
        self.cache = state.cache
        self.tokens_left = state.config.token_budget
        self.rows_left = state.config.row_budget
        self.chunks_left = state.cache.pool.num_available
        self.num_active = state.num_active

    def fill(self) -> None:
        """Takes requests in the policy's order until a budget is spent."""
        state, s = self.state, self.state.sequences
        todo = np.where(s.num_tokens < s.limit, s.num_tokens - s.num_computed, 0)
        room = _room(state) - s.num_computed
        todo_of, room_of = todo.tolist(), room.tolist()
        seat_of, seats, counts = state.seats.get, self.seats, self.counts
        if state.policy is policies.fifo and self._take_decoding(todo, room):
            order: Iterator[RequestId] = chain(state.prefilling, state.waiting)
        else:
            offered = state.policy(state)
            if not isinstance(offered, Iterable):
                raise ValueError(f"policy: expected ids of unfinished requests, got {offered!r}")
            order = iter(offered)
        admitting = True
        tokens_left, rows_left = self.tokens_left, self.rows_left  # local: this loop is hot
        while tokens_left and rows_left:
            request_id = next(order, None)
            if request_id is None:
                break
            seat = seat_of(request_id)
            if seat is None:
                self.tokens_left, self.rows_left = tokens_left, rows_left
                admitting = self._admit(request_id, admitting)
                tokens_left, rows_left = self.tokens_left, self.rows_left
                continue
            count = todo_of[seat]
            if not count:
                continue
            todo_of[seat] = 0  # offered again, it is passed over
            if count > tokens_left:
                count = tokens_left
            if count > room_of[seat]:
                count = self._fit(seat, count)
                if not count:
                    self.stalled.append(seat)
                    continue
            seats.append(seat)
            counts.append(count)
            tokens_left -= count
            rows_left -= 1

    def _take_decoding(self, todo: np.ndarray, room: np.ndarray) -> bool:
        """Takes all decoding requests at once, where the budgets hold a token of each of them, as
        they mostly do; else none. Returns whether it did."""
        seats = self.state.decoding_seats
        if len(seats) > min(self.tokens_left, self.rows_left) or (todo[seats] != 1).any():
            return False
        crossing = seats[room[seats] < 1]
        needed = sum(_next_demand(self.state, seat) for seat in crossing.tolist())
        if needed > self.chunks_left:
            return False
        self.chunks_left -= needed
        self.tokens_left -= len(seats)
        self.rows_left -= len(seats)
        self.seats += seats.tolist()
        self.counts += [1] * len(seats)
        return True

    def _fit(self, seat: int, count: int) -> int:
        """Returns how many of `count` tokens the chunks that are left allow, and takes those."""
        s = self.state.sequences
        start = int(s.num_computed[seat])
        held = {t: int(end[seat]) for t, end in s.end.items()}
        return self._take(start, count, held)

    def _take(self, start: int, count: int, held: dict[str, int]) -> int:
        spec = self.state.spec

        def needed(tokens: int) -> int:
            return sum(
                max(sizing.ceil_div(start + tokens, spec.chunk_tokens(t)) - end, 0)
                for t, end in held.items()
            )

        if needed(count) > self.chunks_left:
            count = bisect_right(range(count + 1), self.chunks_left, key=needed) - 1
        self.chunks_left -= needed(count)
        return count

    def _admit(self, request_id: RequestId, admitting: bool) -> bool:
        """Gives a waiting request a seat if it may have one. Returns whether a later one may.

        The first that can not be admitted ends the admissions of the step: nobody slips past it.
        """
        state = self.state
        serial = state.ids.get(request_id)
        entry = state.entries.get(serial) if serial is not None else None
        if entry is None:
            raise ValueError(f"policy: expected ids of unfinished requests, got {request_id!r}")
        if entry.serial in self.taken:
            return admitting
        if not admitting or entry.in_flight or self.num_active >= state.config.row_budget:
            return False
        length = entry.num_known
        if entry.saved is not None:
            if offload.is_busy(state, entry.serial):
                return False
            hit = entry.saved.hit
            idle = sum(map(len, hit.chunks.values()))
            if idle > self.chunks_left:  # of requests whose last token is in flight
                return False
        else:
            digest = partial(entry.log.digest, self.cache.root, state.spec.page_size)
            hit = prefix.match(self.cache, digest, length)
            idle = prefix.num_idle(self.cache, hit)
        if self.num_active:
            spec, budget = state.spec, state.config.token_budget
            margin = math.ceil(state.config.margin * self.cache.pool.num_usable)
            whole = sizing.resident_chunks(spec, length, budget) - sum(
                map(len, hit.chunks.values())
            )
            if whole + idle + margin > self.chunks_left:
                return False
        self.chunks_left -= idle
        held = {t: hit.first[t] + len(hit.chunks[t]) for t in hit.chunks}
        count = self._take(hit.num_tokens, min(length - hit.num_tokens, self.tokens_left), held)
        if not count:
            self.chunks_left += idle
            return False
        self.taken.add(entry.serial)
        self.admitted.append(Admission(entry, self._free_seat(), hit, count))
        self.num_active += 1
        if entry.saved is None:
            self.cache = prefix.claim(self.cache, hit)
            self.tokens_left -= count
            self.rows_left -= 1
        return True

    def _free_seat(self) -> int:
        if self.free_seats is None:
            free = np.flatnonzero(self.state.sequences.serial < 0)
            self.free_seats = iter(free.tolist())
        return next(self.free_seats)


def _room(state: BatchState) -> np.ndarray:
    """Returns for each seat how many tokens its chunks hold, of the type that runs out first."""
    spec, s = state.spec, state.sequences
    rooms = [s.end[t] * spec.chunk_tokens(t) for t in spec.attention_types]
    return rooms[0] if len(rooms) == 1 else np.minimum(*rooms)


def _build(draft: _Draft, now: float) -> tuple[BatchState, Plan]:
    """Returns the state in which the draft is planned, and its plan."""
    state = draft.state
    num_admissions = state.num_admissions + len(draft.admitted)
    sequences, cache = state.sequences, draft.cache
    restored = [a for a in draft.admitted if a.entry.saved is not None]
    fresh = [a for a in draft.admitted if a.entry.saved is None]
    beside = bool(draft.seats or fresh)  # else nothing would run while their KV comes back
    rows = fresh if beside else _within(state.config.token_budget, restored)
    seats = np.array(draft.seats + [a.seat for a in rows], np.int32)
    counts = np.array(draft.counts + [a.num_tokens for a in rows], np.int32)
    if counts.max() > 1:  # rows of one token first: decode kernels take them as they are
        order = np.argsort(counts > 1, kind="stable")
        seats, counts = seats[order], counts[order]
    if draft.admitted:
        sequences = occupy(state, draft.admitted, now)
        state = leave_queue(state, draft.admitted)
    state, sequences, cache, loads = offload.load(
        state, sequences, cache, [a.entry for a in restored], [a.seat for a in restored]
    )
    starts = sequences.num_computed[seats]
    ends = starts + counts
    sequences, cache = _hold_new(state.spec, sequences, cache, seats, ends)
    num_tokens = sequences.num_tokens[seats]
    known = sequences.prompt_len[seats] + sequences.num_generated[seats]
    samples = ends == num_tokens
    serials, epochs = sequences.serial[seats], sequences.epoch[seats]
    sequences = sequence.update(
        sequences,
        seats,
        num_computed=ends,
        num_tokens=num_tokens + samples,
        last_planned=num_admissions,
    )
    plan = Plan(
        step=state.next_step,
        request_ids=tuple(sequences.request_id[seats].tolist()),
        serials=frozen(serials),
        epochs=frozen(epochs),
        starts=frozen(starts),
        num_tokens=frozen(counts),
        samples=frozen(samples),
        pending=frozen(ends > known),
        inputs=PlanInputs(state.spec, sequences, frozen(seats)),
        moves_before=state.moves if beside else state.moves + loads,
        moves_beside=loads if beside else (),
    )
    state = replace(
        state,
        sequences=sequences,
        cache=cache,
        uncommitted=(*state.uncommitted, plan),
        moves=(),
        next_step=state.next_step + 1,
        num_admissions=num_admissions,
    )
    return state, plan


def _within(budget: int, admitted: list[Admission]) -> list[Admission]:
    """Returns those that get tokens of `budget` in turn, cut to what is left."""
    rows = []
    for admission in admitted:
        admission.num_tokens = min(admission.num_tokens, budget)
        budget -= admission.num_tokens
        rows += [admission] if admission.num_tokens else []
    return rows


def _hold_new(
    spec: CacheSpec,
    sequences: Sequences,
    cache: PrefixCache,
    seats: np.ndarray,
    ends: np.ndarray,
) -> tuple[Sequences, PrefixCache]:
    """Returns the table and the cache in which `seats[i]` has the chunks for `ends[i]` tokens."""
    needed = {
        t: -(-ends // spec.chunk_tokens(t)) - sequences.end[t][seats] for t in spec.attention_types
    }
    growing = {t: np.flatnonzero(more > 0) for t, more in needed.items()}
    totals = [int(needed[t][rows].sum()) for t, rows in growing.items()]
    if not any(totals):
        return sequences, cache
    allocated = prefix.allocate(cache, totals)
    assert allocated is not None, "the draft took no more than there is"
    cache, parts = allocated
    for (attention_type, rows), chunks in zip(growing.items(), parts, strict=True):
        counts = needed[attention_type][rows]
        sequences = sequence.hold(sequences, attention_type, seats[rows], counts, chunks)
    return sequences, cache


def _relieve(state: BatchState, draft: _Draft) -> BatchState:
    """Returns the state in which stalled requests were preempted until the others can go on."""
    s = state.sequences
    stalled = sorted(draft.stalled, key=lambda seat: int(s.serial[seat]))
    demand = [_next_demand(state, seat) for seat in stalled]
    num_active = draft.num_active
    while stalled and num_active > 1 and sum(demand) > state.cache.pool.num_available:
        state = preempt(state, stalled.pop())
        demand.pop()
        num_active -= 1
    return state


def _next_demand(state: BatchState, seat: int) -> int:
    """Returns the chunks that a seat needs for one more token."""
    spec, s = state.spec, state.sequences
    next_end = int(s.num_computed[seat]) + 1
    return sum(
        max(sizing.ceil_div(next_end, spec.chunk_tokens(t)) - int(s.end[t][seat]), 0)
        for t in spec.attention_types
    )
