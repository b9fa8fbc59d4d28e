"""The rules that every state keeps, checked from scratch."""

from __future__ import annotations

from collections import Counter

import numpy as np

from cbfn import pages, prefix
from cbfn.sizing import ceil_div
from cbfn.state import BatchState
from cbfn.types import NUM_NULL_CHUNKS, SLIDING, InvariantViolation


def check_invariants(state: BatchState) -> None:
    """Raises InvariantViolation naming the first broken rule. Costs time in all that is there."""
    prefix.check(state.cache)
    _check_owners(state)
    _check_seats(state)
    _check_published(state)
    _check_requests(state)
    _check_host(state)


def _check_host(state: BatchState) -> None:
    """Every host chunk is free, or one waiting request's."""
    pages.check(state.host)
    owners = np.zeros(len(state.host.owners), np.int32)
    for entry in state.entries.values():
        if entry.saved is None:
            continue
        hit = entry.saved.hit
        for t, chunks in hit.chunks.items():
            np.add.at(owners, chunks, 1)
            end = ceil_div(hit.num_tokens, state.spec.chunk_tokens(t))
            if hit.first[t] + len(chunks) != end:
                _broken("host", f"serial {entry.serial} saved {len(chunks)} chunks of {t}")
    if not np.array_equal(owners, state.host.owners):
        _broken("host", f"host chunks have {state.host.owners} owners, not {owners}")


def _check_owners(state: BatchState) -> None:
    """Every chunk has as many owners as seats hold it."""
    s = state.sequences
    owners = np.zeros(state.spec.num_chunks, np.int32)
    for t, table in s.tables.items():
        for seat in s.order.tolist():
            first, end = int(s.first[t][seat]), int(s.end[t][seat])
            held = table.columns(np.array([seat]), end)[:, 0]
            if held[:first].any() or (held[first:] < NUM_NULL_CHUNKS).any():
                _broken("chunks", f"seat {seat} holds {held} in columns {first} to {end} of {t}")
            np.add.at(owners, held[first:], 1)
    if not np.array_equal(owners, state.cache.pool.owners):
        wrong = np.flatnonzero(owners != state.cache.pool.owners)
        _broken(
            "owners", f"chunks {wrong} have {state.cache.pool.owners[wrong]}, not {owners[wrong]}"
        )


def _check_seats(state: BatchState) -> None:
    """Counts agree with each other, and the chunks held with the counts."""
    s, spec = state.sequences, state.spec
    if not np.array_equal(np.sort(s.order), np.flatnonzero(s.serial >= 0)):
        _broken("order", f"{s.order} are not the occupied seats")
    if (np.diff(s.serial[s.order]) <= 0).any():
        _broken("order", f"serials {s.serial[s.order]} are not in order of arrival")
    if len(state.seats) != len(s.order):
        _broken("seats", f"{len(state.seats)} ids have a seat, {len(s.order)} seats are occupied")
    if state.num_active > state.config.row_budget:
        _broken("rows", f"{state.num_active} requests are active")
    in_flight = Counter(
        (int(p.serials[i]), int(p.epochs[i]))
        for p in state.uncommitted
        for i in np.flatnonzero(p.samples)
    )
    for request_id, seat in state.seats.items():
        name = f"request {request_id!r}"
        if s.request_id[seat] != request_id or state.ids.get(request_id) != s.serial[seat]:
            _broken("seats", f"{name} is not in seat {seat}")
        known = int(s.num_known[seat])
        flying = in_flight[int(s.serial[seat]), int(s.epoch[seat])]
        if s.num_tokens[seat] != known + flying:
            _broken(
                "counts",
                f"{name} has {s.num_tokens[seat]} tokens, {known} known and {flying} in flight",
            )
        if not 0 <= s.num_computed[seat] <= s.num_tokens[seat] <= s.limit[seat]:
            _broken("counts", f"{name}: computed {s.num_computed[seat]} of {s.num_tokens[seat]}")
        if len(s.log[seat].generated) < s.num_generated[seat]:
            _broken("log", f"{name} lost tokens")
        for t in spec.attention_types:
            if s.end[t][seat] != ceil_div(int(s.num_computed[seat]), spec.chunk_tokens(t)):
                _broken("chunks", f"{name} holds {s.end[t][seat]} columns of {t}")


def _check_published(state: BatchState) -> None:
    """A held chunk is published only with its own content, and only once it is computed."""
    s, spec, root = state.sequences, state.spec, state.cache.root
    uncommitted: dict[tuple[int, int], int] = {}
    for plan in reversed(state.uncommitted):
        for serial, epoch, start in zip(plan.serials, plan.epochs, plan.starts, strict=True):
            uncommitted[int(serial), int(epoch)] = int(start)
    for t in spec.attention_types:
        for seat in s.order.tolist():
            key = int(s.serial[seat]), int(s.epoch[seat])
            computed = uncommitted.get(key, int(s.num_computed[seat]))
            first, end = int(s.first[t][seat]), int(s.end[t][seat])
            for column in range(first, end):
                chunk = int(s.tables[t].get(np.array([seat]), np.array([column]))[0])
                known_as = state.cache.key_of.get(chunk)
                if known_as is None:
                    continue
                if (column + 1) * spec.chunk_tokens(t) > computed:
                    _broken("published", f"chunk {chunk} of seat {seat} is not computed yet")
                block = (column + 1) * spec.blocks_per_chunk(t) - 1
                mine = prefix.chunk_key(t, s.log[seat].digest(root, spec.page_size, block))
                if mine != known_as and s.weights[seat] == state.weight_version:
                    _broken("published", f"chunk {chunk} of seat {seat} has another's key")
            visible = prefix.first_chunk(spec, t, computed)
            if t == SLIDING and first > visible:
                _broken("window", f"seat {seat} let go column {first - 1}, which it still reads")


def _check_requests(state: BatchState) -> None:
    """Every request in use is in exactly one place."""
    if list(state.queue) != sorted(state.entries):
        _broken("queue", "its serials are not those of the waiting requests")
    places = [*state.seats, *(e.request.request_id for e in state.entries.values())]
    places += [output.request_id for output in state.ended]
    if len(places) != len(set(places)) or set(places) != set(state.ids):
        _broken("requests", f"{sorted(places)} are in a place, {sorted(state.ids)} are in use")
    if len(state.uncommitted) > 2:
        _broken("uncommitted", f"{len(state.uncommitted)} plans")
    for plan in state.uncommitted:
        if int(plan.num_tokens.sum()) > state.config.token_budget:
            _broken("token budget", f"step {plan.step} has {plan.num_tokens.sum()} tokens")
        if len(plan) > state.config.row_budget:
            _broken("row budget", f"step {plan.step} has {len(plan)} rows")
        if len(set(plan.serials.tolist())) != len(plan):
            _broken("plan", f"step {plan.step} has a request twice")


def _broken(rule: str, what: str) -> None:
    raise InvariantViolation(f"{rule}: {what}")
