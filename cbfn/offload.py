"""The KV of preempted requests in host memory: what is kept there, and how it comes back.

A preempted request's chunks are copied to host chunks, if enough are free, and copied back when it
is admitted again, so that nothing is computed twice. Plans carry the copies as moves, which run in
their order: after the step before the plan's, and `moves_before` before the plan's own. A request
whose chunks come back has its first row in the next plan, so that the copy runs beside the step;
only where nothing else is left to run it has one in the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from cbfn import pages, prefix, sequence
from cbfn.pages import Chunks
from cbfn.prefix import Hit, PrefixCache
from cbfn.sequence import Sequences
from cbfn.state import BatchState, Saved, Waiting
from cbfn.types import Move, Plan


def save(state: BatchState, seat: int) -> tuple[BatchState, Saved | None]:
    """Returns the state that moves to the host what a seat still needs of its KV, and what that is;
    None without room."""
    s, spec = state.sequences, state.spec
    num_computed = int(s.num_computed[seat])
    # with a step in flight, chunks that have just left the window are still held
    first = {
        t: max(int(s.first[t][seat]), prefix.first_chunk(spec, t, num_computed)) for t in s.tables
    }
    held = {t: _held(s, t, seat, first[t]) for t in s.tables}
    counts = [len(chunks) for chunks in held.values()]
    allocated = pages.allocate(state.host, counts) if sum(counts) else None
    if allocated is None:
        return state, None
    host, parts = allocated
    hit = Hit(num_computed, first, dict(zip(held, parts, strict=True)))
    move = Move(
        to_host=True,
        device=np.concatenate(list(held.values())),
        host=np.concatenate(parts),
        serial=int(s.serial[seat]),
        epoch=int(s.epoch[seat]) + 1,
    )
    state = replace(state, host=host, moves=(*state.moves, move))
    return state, Saved(hit, int(s.weights[seat]))


def is_busy(state: BatchState, serial: int) -> bool:
    """Returns whether an uncommitted plan computes or moves KV of a request: if it fails, what was
    saved behind it is worth nothing."""
    return any(
        serial in plan.serials or any(move.serial == serial for move in plan.moves)
        for plan in state.uncommitted
    )


def load(
    state: BatchState,
    sequences: Sequences,
    cache: PrefixCache,
    entries: Sequence[Waiting],
    seats: Sequence[int],
) -> tuple[BatchState, Sequences, PrefixCache, tuple[Move, ...]]:
    """Returns state, table and cache where seats hold chunks for what was saved, and the moves.

    The host chunks are free afterwards: whatever is moved to them later is moved later.
    """
    moves = []
    for entry, seat in zip(entries, seats, strict=True):
        saved = entry.saved
        assert saved is not None
        allocated = prefix.allocate(cache, [len(chunks) for chunks in saved.hit.chunks.values()])
        assert allocated is not None, "the draft took no more than there is"
        cache, parts = allocated
        for attention_type, chunks in zip(saved.hit.chunks, parts, strict=True):
            at, counts = np.array([seat], np.int32), np.array([len(chunks)])
            sequences = sequence.hold(sequences, attention_type, at, counts, chunks)
        host = np.concatenate(list(saved.hit.chunks.values()))
        moves.append(Move(False, np.concatenate(parts), host, entry.serial, entry.epoch))
        state = drop(state, entry)
    return state, sequences, cache, tuple(moves)


def drop(state: BatchState, entry: Waiting) -> BatchState:
    """Returns the state in which a request's host chunks are free."""
    if entry.saved is None:
        return state
    host, _ = pages.release(state.host, np.concatenate(list(entry.saved.hit.chunks.values())))
    return replace(state, host=host)


def drop_all(state: BatchState) -> BatchState:
    """Returns the state in which nothing is kept on the host: all is computed again."""
    for entry in [e for e in state.entries.values() if e.saved is not None]:
        state = _without(state, entry)
    return state


def lose(state: BatchState, plan: Plan) -> tuple[BatchState, list[int]]:
    """Returns the state behind a launch that failed, and the seats whose chunks never came back.

    Waiting requests whose chunks the plan moved, either way, are computed again.
    """
    seats = []
    for move in plan.moves:
        entry = state.entries.get(move.serial)
        if entry is not None and entry.saved is not None:
            state = _without(state, entry)
        elif not move.to_host:
            s = state.sequences
            here = s.order[(s.serial[s.order] == move.serial) & (s.epoch[s.order] == move.epoch)]
            seats += here.tolist()
    return state, seats


def _without(state: BatchState, entry: Waiting) -> BatchState:
    state = drop(state, entry)
    return replace(state, entries=state.entries.set(entry.serial, replace(entry, saved=None)))


def _held(sequences: Sequences, attention_type: str, seat: int, first: int) -> Chunks:
    columns = np.arange(first, int(sequences.end[attention_type][seat]), dtype=np.int32)
    return sequences.tables[attention_type].get(np.full(len(columns), seat), columns)
