"""How requests leave: by an end, or by preemption back into the queue."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cbfn import offload, prefix, sequence
from cbfn.outputs import End
from cbfn.state import BatchState, Waiting
from cbfn.types import RequestId, RequestOutput, RequestTimes, Tokens


def end_active(state: BatchState, seats: np.ndarray) -> BatchState:
    """Returns the state without the active requests in `seats`; their chunks are released."""
    ids = state.sequences.request_id[seats].tolist()
    sequences, chunks = sequence.vacate(state.sequences, seats)
    by_id = state.seats.mutate()
    for request_id in ids:
        del by_id[request_id]
    cache = prefix.release(state.cache, chunks)
    return replace(state, sequences=sequences, cache=cache, seats=by_id.finish())


def end_waiting(state: BatchState, serial: int) -> BatchState:
    """Returns the state without a waiting request."""
    state = offload.drop(state, state.entries[serial])
    return replace(state, queue=state.queue.discard(serial), entries=state.entries.delete(serial))


def forget(state: BatchState, request_ids: list[RequestId]) -> BatchState:
    """Returns the state in which ids whose terminal output is handed out may be used again."""
    ids = state.ids.mutate()
    for request_id in request_ids:
        del ids[request_id]
    return replace(state, ids=ids.finish())


def preempt(state: BatchState, seat: int, offloads: bool = True) -> BatchState:
    """Returns the state in which an active request waits again, at its place of arrival.

    Its chunks are released, its tokens are kept. Their KV moves to the host, or is computed again
    later where the host has no room or `offloads` is False. A token in flight is still appended by
    its commit, and the request is not planned before that.
    """
    state, saved = offload.save(state, seat) if offloads else (state, None)
    s = state.sequences
    request = s.request[seat]
    known = int(s.prompt_len[seat] + s.num_generated[seat])
    entry = Waiting(
        request=request,
        serial=int(s.serial[seat]),
        limit=int(s.limit[seat]),
        epoch=int(s.epoch[seat]) + 1,
        log=s.log[seat],
        num_generated=int(s.num_generated[seat]),
        in_flight=bool(s.num_tokens[seat] > known),
        num_cached=int(s.num_cached[seat]),
        times=_times(state, seat),
        saved=saved,
    )
    state = end_active(state, np.array([seat], np.int32))
    return replace(
        state,
        queue=state.queue.add(entry.serial),
        entries=state.entries.set(entry.serial, entry),
        num_preemptions=state.num_preemptions + 1,
        num_offloads=state.num_offloads + (saved is not None),
    )


def terminal_output(
    state: BatchState, request_id: RequestId, num_tokens: int, end: End
) -> RequestOutput:
    """Returns the last output of an unfinished request, with its first `num_tokens` tokens."""
    seat = state.seats.get(request_id)
    if seat is None:
        entry = state.entries[state.ids[request_id]]
        return waiting_output(entry, num_tokens, end)
    s = state.sequences
    request = s.request[seat]
    return RequestOutput(
        request_id,
        request.prompt_token_ids,
        Tokens(s.log[seat].generated, num_tokens),
        **end._asdict(),
        num_cached_tokens=int(s.num_cached[seat]),
        num_preemptions=int(s.epoch[seat]),
        times=_times(state, seat),
    )


def waiting_output(entry: Waiting, num_tokens: int, end: End | None) -> RequestOutput:
    """Returns the output of a waiting request: its last one where `end` is given."""
    return RequestOutput(
        entry.request.request_id,
        entry.request.prompt_token_ids,
        Tokens(entry.log.generated, num_tokens),
        **(end._asdict() if end else {}),
        num_cached_tokens=entry.num_cached,
        num_preemptions=entry.epoch,
        times=entry.times,
    )


def _times(state: BatchState, seat: int) -> RequestTimes:
    s = state.sequences
    times = (s.scheduled_at[seat], s.first_token_at[seat], s.last_token_at[seat])
    known = (None if np.isnan(time) else float(time) for time in times)
    return RequestTimes(s.request[seat].arrival, *known)
