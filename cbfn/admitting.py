"""Admission: waiting requests get a seat, with what is known of their KV."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cbfn import sequence
from cbfn.prefix import Hit
from cbfn.sequence import Sequences
from cbfn.state import BatchState, Waiting

_MASK_64 = 2**64 - 1
_NO_CHUNKS = np.zeros(0, np.int32)


@dataclass(slots=True)
class Admission:
    """A waiting request that gets a seat in this step; its KV is known, or `entry.saved`."""

    entry: Waiting
    seat: int
    hit: Hit
    num_tokens: int


# that fp32 holds; sampling draws from it as from any hotter one
_HOTTEST = float(np.finfo(np.float32).max)


def occupy(state: BatchState, admitted: list[Admission], now: float) -> Sequences:
    """Returns the table in which the admitted requests have their seats and their hits."""
    spec, entries = state.spec, [a.entry for a in admitted]
    requests = [e.request for e in entries]
    params = [r.sampling_params for r in requests]
    seats = np.array([a.seat for a in admitted], np.int32)
    lengths = [e.num_known for e in entries]
    stops = [() if p.ignore_eos else r.eos_token_ids for p, r in zip(params, requests, strict=True)]
    stops = [(*eos, *p.stop_token_ids) for eos, p in zip(stops, params, strict=True)]
    sequences = sequence.widen_stop_ids(state.sequences, max(map(len, stops)))
    width = sequences.stop_ids.shape[1]
    objects = np.empty((2, len(entries)), object)
    objects[0, :] = requests
    objects[1, :] = [e.log for e in entries]
    missing = float("nan")
    sequences = sequence.occupy(
        sequences,
        seats,
        first={t: np.array([a.hit.first[t] for a in admitted]) for t in spec.attention_types},
        request=objects[0],
        log=objects[1],
        request_id=[r.request_id for r in requests],
        serial=[e.serial for e in entries],
        epoch=[e.epoch for e in entries],
        prompt_len=[len(r.prompt_token_ids) for r in requests],
        prefill_len=[_prefill_len(e) for e in entries],
        limit=[e.limit for e in entries],
        stop_ids=[(*ids, *[-1] * (width - len(ids))) for ids in stops],
        temperature=[min(p.temperature, _HOTTEST) for p in params],
        top_k=[max(p.top_k, 0) for p in params],
        top_p=[p.top_p for p in params],
        min_p=[p.min_p for p in params],
        seed=np.array([_seed(state, e) for e in entries], np.uint64).view(np.int64),
        num_cached=[a.entry.num_cached if a.entry.epoch else a.hit.num_tokens for a in admitted],
        weights=[e.saved.weights if e.saved else state.weight_version for e in entries],
        last_planned=state.num_admissions,
        scheduled_at=[now if e.times.scheduled is None else e.times.scheduled for e in entries],
        num_tokens=lengths,
        num_computed=[a.hit.num_tokens for a in admitted],
        num_generated=[e.num_generated for e in entries],
        last_token=[
            e.log.generated[e.num_generated - 1] if e.num_generated else 0 for e in entries
        ],
        first_token_at=[missing if (at := e.times.first_token) is None else at for e in entries],
        last_token_at=[missing if (at := e.times.last_token) is None else at for e in entries],
    )
    for t in spec.attention_types:
        held = [_NO_CHUNKS if a.entry.saved else a.hit.chunks[t] for a in admitted]
        counts = np.array([len(chunks) for chunks in held])
        sequences = sequence.hold(sequences, t, seats, counts, np.concatenate(held))
    return sequences


def _prefill_len(entry: Waiting) -> int:
    """Returns how many tokens a request computes before its next one: those it has, as a rule.

    One that comes back with the KV of all tokens but the last goes on decoding.
    """
    known = entry.num_known
    computed = entry.saved.hit.num_tokens if entry.saved is not None else 0
    return computed if computed >= known - 1 else known


def _seed(state: BatchState, entry: Waiting) -> int:
    """Returns the request's own seed, or one drawn from the engine's seed and its serial."""
    seed = entry.request.sampling_params.seed
    if seed is None:
        # an odd multiplier keeps serials apart; the sampler mixes the bits
        seed = state.config.seed + (entry.serial + 1) * 0x9E3779B97F4A7C15
    return seed & _MASK_64


def leave_queue(state: BatchState, admitted: list[Admission]) -> BatchState:
    """Returns the state in which the admitted requests no longer wait."""
    queue, entries, seats = state.queue, state.entries.mutate(), state.seats.mutate()
    for admission in admitted:
        queue = queue.discard(admission.entry.serial)
        del entries[admission.entry.serial]
        seats[admission.entry.request.request_id] = admission.seat
    found = sum(a.hit.num_tokens for a in admitted if not a.entry.epoch)
    return replace(
        state,
        queue=queue,
        entries=entries.finish(),
        seats=seats.finish(),
        num_cached_tokens=state.num_cached_tokens + found,
    )
