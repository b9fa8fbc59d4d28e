"""The scheduler: pure functions from one `BatchState` to the next.

`schedule` plans on counts, `commit` brings the values. Between the two a plan is uncommitted; one
may be when the next is scheduled, so that batch N+1 is planned while batch N runs.

    state = init(spec, config)
    state = submit(state, request)
    state, plan = schedule(state)
    state, outputs = commit(state, plan, result)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np

from cbfn import offload, pages, policies, prefix, sequence, sizing
from cbfn.committing import commit
from cbfn.config import EngineConfig, SamplingParams
from cbfn.ending import end_active, end_waiting, preempt, terminal_output
from cbfn.invariants import check_invariants
from cbfn.outputs import End
from cbfn.scheduling import schedule
from cbfn.sequence import TokenLog
from cbfn.state import BatchState, Waiting
from cbfn.types import (
    NUM_NULL_CHUNKS,
    CacheSpec,
    EngineStats,
    Request,
    RequestId,
    RequestRejected,
    RequestStatus,
    RequestTimes,
)

__all__ = [
    "BatchState",
    "cancel",
    "check_invariants",
    "commit",
    "finish",
    "init",
    "schedule",
    "stats",
    "submit",
    "weights_updated",
]

# Parameters of the contract that no step function serves yet; any value but these is refused.
_UNSERVED = [
    "min_tokens",
    "n",
    "stop",
    "logprobs",
    "prompt_logprobs",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
]
_DEFAULTS = {f.name: f.default for f in fields(SamplingParams)}


def init(spec: CacheSpec, config: EngineConfig | None = None) -> BatchState:
    """Returns the state without any request."""
    config = config or EngineConfig()
    policy = config.scheduler
    return BatchState(
        spec=spec,
        config=config,
        policy=policies.NAMED[policy] if isinstance(policy, str) else policy,
        cache=prefix.init(spec, enabled=config.allow_block_sharing),
        host=pages.init(NUM_NULL_CHUNKS + spec.num_host_chunks),
        # a request whose last token is in flight keeps its seat and frees its row
        sequences=sequence.init(spec, 2 * config.row_budget),
    )


def submit(state: BatchState, request: Request) -> BatchState:
    """Returns the state with `request` waiting. Raises RequestRejected; the state stays usable.

    Refused: an id whose terminal output has not been handed out; a prompt with ids outside the
    vocabulary, or one that the cache or the model can not hold even alone (the prompt counts, not
    `max_tokens`); a full queue; a parameter that is not served.
    """
    name = f"request {request.request_id!r}"
    if request.request_id in state.ids:
        raise RequestRejected(
            f"{name}: the id is in use; expected one whose terminal output was handed out"
        )
    max_queue = state.config.max_queue_size
    if max_queue and len(state.queue) >= max_queue:
        raise RequestRejected(
            f"{name}: {len(state.queue)} requests wait already (max_queue_size={max_queue}); "
            "take a step first, or raise EngineConfig.max_queue_size"
        )
    _check_served(state, request)
    prompt = np.asarray(request.prompt_token_ids)
    _check_prompt(state.spec, name, prompt)
    longest = sizing.max_request_tokens(state.spec)
    params = request.sampling_params
    # the last token needs no KV, but it does need a position of the model
    limit = min(longest + 1, state.spec.max_model_len or longest + 1)
    if params.max_tokens is not None:
        limit = min(limit, len(prompt) + params.max_tokens)
    entry = Waiting(
        request=request,
        serial=state.next_serial,
        limit=limit,
        epoch=0,
        log=TokenLog(prompt),
        num_generated=0,
        in_flight=False,
        num_cached=0,
        times=RequestTimes(request.arrival),
    )
    return replace(
        state,
        queue=state.queue.add(entry.serial),
        entries=state.entries.set(entry.serial, entry),
        ids=state.ids.set(request.request_id, entry.serial),
        next_serial=state.next_serial + 1,
    )


def cancel(state: BatchState, request_id: RequestId) -> BatchState:
    """Returns the state in which the request has ended as CANCELLED with the tokens it has.

    Its terminal output is handed out by the next `commit`. An unknown or ended id changes nothing.
    """
    return _end(state, request_id, None, End(RequestStatus.CANCELLED, "cancelled"))


def finish(
    state: BatchState,
    request_id: RequestId,
    num_tokens: int,
    finish_reason: str,
    stop_reason: int | str | None = None,
) -> BatchState:
    """Returns the state in which the request has ended with its first `num_tokens` tokens.

    For ends that only the caller can see, such as stop strings. The terminal output is handed out
    by the next `commit`. An unknown or ended id changes nothing. Raises ValueError for more tokens
    than the request has, or for a reason other than "stop" and "length".
    """
    if finish_reason not in ("stop", "length"):
        raise ValueError(f'finish_reason: expected "stop" or "length", got {finish_reason!r}')
    end = End(RequestStatus.FINISHED, finish_reason, stop_reason)
    return _end(state, request_id, num_tokens, end)


def weights_updated(state: BatchState) -> BatchState:
    """Returns the state in which no KV computed before is ever shared with a later request.

    Requests that run keep theirs, or are preempted and compute it again: see
    `EngineConfig.after_weights_update`.
    """
    version = state.weight_version + 1
    cache = prefix.set_weight_version(state.cache, version)
    state = replace(state, cache=cache, weight_version=version)
    if state.config.after_weights_update == "recompute":
        for seat in state.sequences.order.tolist():
            state = preempt(state, seat, offloads=False)
        state = offload.drop_all(state)
    return state


def stats(state: BatchState, notes: Sequence[str] = ()) -> EngineStats:
    """Returns counts of the state."""
    pool = state.cache.pool
    return EngineStats(
        total_blocks=pool.num_usable,
        free_blocks=pool.num_free,
        cached_blocks=pool.num_cached,
        owned_blocks=pool.num_owned,
        num_waiting=len(state.queue),
        num_running=len(state.sequences.order),
        num_preemptions=state.num_preemptions,
        num_steps=state.next_step,
        num_cached_tokens=state.num_cached_tokens,
        num_generated_tokens=state.num_generated_tokens,
        host_blocks=state.host.num_usable,
        free_host_blocks=state.host.num_free,
        num_offloads=state.num_offloads,
        notes=tuple(notes),
    )


def _end(state: BatchState, request_id: RequestId, num_tokens: int | None, end: End) -> BatchState:
    serial = state.ids.get(request_id)
    seat = state.seats.get(request_id)
    if seat is not None:
        known = int(state.sequences.num_generated[seat])
    elif serial is not None and serial in state.entries:
        known = state.entries[serial].num_generated
    else:
        return state
    num_tokens = known if num_tokens is None else num_tokens
    if not 0 <= num_tokens <= known:
        raise ValueError(f"num_tokens: expected an integer in [0, {known}], got {num_tokens}")
    output = terminal_output(state, request_id, num_tokens, end)
    if seat is not None:
        state = end_active(state, np.array([seat], np.int32))
    else:
        assert serial is not None
        state = end_waiting(state, serial)
    return replace(state, ended=(*state.ended, output))


def _check_served(state: BatchState, request: Request) -> None:
    params = request.sampling_params
    for field in _UNSERVED:
        if getattr(params, field) != _DEFAULTS[field]:
            raise RequestRejected(
                f"SamplingParams.{field}: not served yet, expected {_DEFAULTS[field]!r}, "
                f"got {getattr(params, field)!r}; leave it out"
            )
    if request.deadline is not None:
        raise RequestRejected(
            f"Request.deadline: not served yet, got {request.deadline!r}; leave it out, and cancel "
            "the request when its time is over"
        )
    if request.priority and state.policy in policies.NAMED.values():
        raise RequestRejected(
            f"Request.priority: the policy {state.config.scheduler!r} does not look at it, "
            f"expected 0, got {request.priority}; a policy of your own may: "
            "EngineConfig(scheduler=my_policy)"
        )


def _check_prompt(spec: CacheSpec, name: str, prompt: np.ndarray) -> None:
    if spec.vocab_size is not None and prompt.max() >= spec.vocab_size:
        position = int(np.argmax(prompt >= spec.vocab_size))
        raise RequestRejected(
            f"{name}: prompt_token_ids[{position}]: expected a token id in "
            f"[0, {spec.vocab_size}), got {prompt[position]}"
        )
    if spec.max_model_len is not None and len(prompt) >= spec.max_model_len:
        raise RequestRejected(
            f"{name}: a prompt of {len(prompt)} tokens leaves no room for a new one; the model "
            f"takes {spec.max_model_len} tokens; shorten the prompt"
        )
    longest = sizing.max_request_tokens(spec)
    if len(prompt) > longest:
        raise RequestRejected(
            f"{name}: a prompt of {len(prompt)} tokens can never fit; the cache holds {longest} "
            f"tokens of one request ({spec.usable_chunks} chunks); shorten the prompt, or raise "
            "EngineConfig.num_blocks or max_memory_percent"
        )
