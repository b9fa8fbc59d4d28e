"""`commit`: the values of a launch enter the state, and the news is handed out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Bool

from cbfn import offload, prefix, sequence
from cbfn.ending import end_active, end_waiting, forget, waiting_output
from cbfn.outputs import End, Outputs
from cbfn.prefix import chunk_key
from cbfn.state import BatchState, Waiting
from cbfn.types import SLIDING, Plan, RequestOutput, RequestStatus, StepResult


def commit(
    state: BatchState, plan: Plan | None, result: StepResult | None, now: float = 0.0
) -> tuple[BatchState, Outputs]:
    """Returns the state with the results of `plan`, and one output for each request with news.

    Plans commit in the order of their launch. A row whose request ended after the plan was made is
    stray: its token is dropped. A row whose request was preempted since still delivers its token.
    A result with an error fails the requests of the plan's rows, those whose KV it was to bring
    back, and nobody else. An invalid row fails its own request, and none of its KV is published.
    `plan=None` is allowed at any time and hands out what waits.

    Raises ValueError for a plan out of order, or a result that does not fit its plan.
    """
    if plan is None:
        if result is not None:
            raise ValueError("commit: expected result=None with plan=None")
        return _hand_out(state, [], np.zeros(0, np.int32), {}, now)
    if not state.uncommitted or state.uncommitted[0] is not plan:
        expected = state.uncommitted[0].step if state.uncommitted else "no plan at all"
        raise ValueError(f"commit: plans commit in order, expected {expected}, got {plan.step}")
    s = state.sequences
    seats = plan.inputs.seats
    alive = (s.serial[seats] == plan.serials) & (s.epoch[seats] == plan.epochs)
    waits = np.array([int(serial) in state.entries for serial in plan.serials[~alive]], bool)
    kept = alive.copy()  # all but stray rows: behind a failure those may hold anything
    kept[~alive] = waits
    tokens = _check_result(state, plan, result, kept)
    invalid = None if result is None else result.invalid
    state = replace(state, uncommitted=state.uncommitted[1:])
    ready: list[RequestOutput] = []
    if not alive.all():
        state, ready = _commit_preempted(state, plan, tokens, result, np.flatnonzero(~alive), now)
    rows = np.flatnonzero(alive)
    if tokens is None:
        assert result is not None
        state, lost = offload.lose(state, plan)
        failed = np.union1d(seats[rows], np.array(lost, np.int32)).astype(np.int32)
        return _fail(state, ready, failed, result.error, now)
    bad = rows[:0]
    if invalid is not None:
        rows, bad = rows[~invalid[rows]], rows[invalid[rows]]
    state = _publish(state, plan, rows)
    rows = rows[plan.samples[rows]]
    state, ends = _append(state, seats[rows], tokens[rows], now)
    if len(bad):
        ends |= {len(rows) + i: _invalid(plan, row) for i, row in enumerate(bad.tolist())}
        rows = np.append(rows, bad)
    state, outputs = _hand_out(state, ready, seats[rows], ends, now)
    return _slide(state, plan, alive), outputs


def _check_result(
    state: BatchState, plan: Plan, result: StepResult | None, kept: np.ndarray
) -> np.ndarray | None:
    """Returns the sampled tokens [B], or None for a launch that failed."""
    if result is None:
        raise ValueError(f"commit: expected a StepResult for step {plan.step}, got None")
    if result.error is not None:
        return None
    tokens = result.token_ids
    if not isinstance(tokens, np.ndarray) or tokens.shape != (len(plan), 1):
        got = tokens.shape if isinstance(tokens, np.ndarray) else type(tokens).__name__
        raise ValueError(
            f"StepResult.token_ids: expected an array of shape ({len(plan)}, 1), got {got}"
        )
    if result.invalid is not None:
        kept = kept & ~_check_invalid(result.invalid, len(plan))
    sampling = plan.samples & kept
    if result.num_tokens is not None and (result.num_tokens[sampling] != 1).any():
        raise ValueError(
            f"StepResult.num_tokens: expected 1 for rows that sample, got {result.num_tokens}"
        )
    sampled = tokens[sampling, 0]
    top = state.spec.vocab_size or 2**31
    if len(sampled) and (sampled.min() < 0 or sampled.max() >= top):
        raise ValueError(f"StepResult.token_ids: expected ids in [0, {top}), got {sampled}")
    return tokens[:, 0]


def _check_invalid(invalid: Any, num_rows: int) -> Bool[np.ndarray, "B"]:
    """Returns it. Raises ValueError unless it is a boolean for each row."""
    if isinstance(invalid, np.ndarray) and (invalid.shape, invalid.dtype) == ((num_rows,), bool):
        return invalid
    raise ValueError(
        f"StepResult.invalid: expected None or an array of {num_rows} booleans, got {invalid!r:.80}"
    )


def _append(
    state: BatchState, seats: np.ndarray, tokens: np.ndarray, now: float
) -> tuple[BatchState, dict[int, End]]:
    """Returns the state with one more token for each seat, and the ends that this brings."""
    if not len(seats):
        return state, {}
    s = state.sequences
    lengths = s.num_generated[seats]
    logs, token_list = s.log[seats], tokens.tolist()
    columns = {"num_generated": lengths + 1, "last_token": tokens, "last_token_at": now}
    for row, (log, length, token) in enumerate(
        zip(logs.tolist(), lengths.tolist(), token_list, strict=True)
    ):
        generated = log.generated
        if len(generated) == length:  # as `log.append` does; this loop is hot
            generated.append(token)
        else:  # another state has gone on from there
            logs[row] = log.append(length, token)
            columns["log"] = logs
    if not lengths.all():
        columns["first_token_at"] = np.where(lengths == 0, now, s.first_token_at[seats])
    s = sequence.update(s, seats, **columns)
    stopped = (s.stop_ids[seats] == tokens[:, None]).any(axis=1)
    full = s.num_known[seats] >= s.limit[seats]
    ends = {
        row: _token_end(s.request[seats[row]], token_list[row], bool(stopped[row]))
        for row in np.flatnonzero(stopped | full).tolist()
    }
    generated = state.num_generated_tokens + len(seats)
    return replace(state, sequences=s, num_generated_tokens=generated), ends


def _token_end(request: object, token: int, stopped: bool) -> End:
    if not stopped:
        return End(RequestStatus.FINISHED, "length")
    params = request.sampling_params  # type: ignore[attr-defined]
    is_eos = not params.ignore_eos and token in request.eos_token_ids  # type: ignore[attr-defined]
    return End(RequestStatus.FINISHED, "stop", None if is_eos else token)


def _hand_out(
    state: BatchState,
    ready: list[RequestOutput],
    seats: np.ndarray,
    ends: dict[int, End],
    now: float,
) -> tuple[BatchState, Outputs]:
    """Returns the state without the seats that ended, and the outputs of this commit."""
    outputs = Outputs((*state.ended, *ready), state.sequences, seats, ends, now)
    over = [output.request_id for output in (*state.ended, *ready) if output.status.ended]
    if ends:
        gone = seats[list(ends)]
        over += state.sequences.request_id[gone].tolist()
        state = end_active(state, gone)
    if over:
        state = forget(state, over)
    return replace(state, ended=()) if state.ended else state, outputs


def _fail(
    state: BatchState,
    ready: list[RequestOutput],
    seats: np.ndarray,
    error: BaseException | None,
    now: float,
) -> tuple[BatchState, Outputs]:
    ends = {row: _failure(error) for row in range(len(seats))}
    return _hand_out(state, ready, seats, ends, now)


def _failure(error: BaseException | None) -> End:
    return End(RequestStatus.FAILED, "error", error=error)


def _invalid(plan: Plan, row: int) -> End:
    """Returns the end of a request whose logits have no token."""
    position = int(plan.starts[row] + plan.num_tokens[row])
    error = FloatingPointError(
        f"request {plan.request_ids[row]!r}: the logits for the token at position {position} hold "
        "NaN, or nothing but -inf, or +inf where a token is drawn. Check the model's weights, its "
        "dtype (fp16 overflows beyond 65,504; try bf16 or fp32), and the tokens of the prompt"
    )
    return _failure(error)


def _commit_preempted(
    state: BatchState,
    plan: Plan,
    tokens: np.ndarray | None,
    result: StepResult | None,
    rows: np.ndarray,
    now: float,
) -> tuple[BatchState, list[RequestOutput]]:
    """Returns the state where requests preempted in flight have their tokens, and their outputs."""
    outputs = []
    for row in rows.tolist():
        entry = state.entries.get(int(plan.serials[row]))
        if entry is None or entry.epoch != plan.epochs[row] + 1:
            continue
        if tokens is None:
            assert result is not None
            end: End | None = _failure(result.error)
        elif result is not None and result.invalid is not None and result.invalid[row]:
            end = _invalid(plan, row)
        elif plan.samples[row]:
            entry, end = _append_waiting(entry, int(tokens[row]), now)
            generated = state.num_generated_tokens + 1
            state = replace(state, num_generated_tokens=generated)
        else:
            continue
        outputs.append(waiting_output(entry, entry.num_generated, end))
        if end is None:
            state = replace(state, entries=state.entries.set(entry.serial, entry))
        else:
            state = end_waiting(state, entry.serial)
    return state, outputs


def _append_waiting(entry: Waiting, token: int, now: float) -> tuple[Waiting, End | None]:
    first = now if entry.times.first_token is None else entry.times.first_token
    entry = replace(
        entry,
        log=entry.log.append(entry.num_generated, token),
        num_generated=entry.num_generated + 1,
        in_flight=False,
        times=entry.times._replace(first_token=first, last_token=now),
    )
    params = entry.request.sampling_params
    eos = () if params.ignore_eos else entry.request.eos_token_ids
    stopped = token in eos or token in params.stop_token_ids
    full = entry.num_known >= entry.limit
    return entry, _token_end(entry.request, token, stopped) if stopped or full else None


def _publish(state: BatchState, plan: Plan, rows: np.ndarray) -> BatchState:
    """Returns the state where chunks that this plan filled are known to the prefix cache.

    Rows with a token may have filled one with NaN: where the last token of a row sees none of it,
    behind a sliding window. Sharing it is right all the same. KV is a function of the tokens up to
    its own (no backend lets a line reach an earlier query), so whoever shares the chunk has these
    very tokens, and would compute the same NaN.
    """
    if not state.cache.enabled:
        return state
    spec, s, seats = state.spec, state.sequences, plan.inputs.seats
    ends = plan.starts + plan.num_tokens
    rows = rows[s.weights[seats[rows]] == state.weight_version]
    keys, chunks = [], []
    for t in spec.attention_types:
        size, per_chunk = spec.chunk_tokens(t), spec.blocks_per_chunk(t)
        first = np.maximum(plan.starts // size, s.first[t][seats])
        for row in rows[(ends // size > first)[rows]].tolist():
            seat, log = seats[row], s.log[seats[row]]
            columns = np.arange(first[row], ends[row] // size, dtype=np.int32)
            chunks += s.tables[t].get(np.full(len(columns), seat), columns).tolist()
            keys += [
                chunk_key(
                    t, log.digest(state.cache.root, spec.page_size, (column + 1) * per_chunk - 1)
                )
                for column in columns.tolist()
            ]
    return replace(state, cache=prefix.publish(state.cache, keys, chunks)) if keys else state


def _slide(state: BatchState, plan: Plan, alive: np.ndarray) -> BatchState:
    """Returns the state where sliding chunks that no later step of a request reads are released."""
    spec, s = state.spec, state.sequences
    if SLIDING not in spec.attention_types:
        return state
    seats = plan.inputs.seats
    alive = alive & (s.serial[seats] == plan.serials)
    ends = plan.starts + plan.num_tokens
    visible = np.maximum(ends - spec.sliding_window + 1, 0) // spec.chunk_tokens(SLIDING)
    rows = np.flatnonzero(alive & (visible > s.first[SLIDING][seats]))
    if not len(rows):
        return state
    sequences, chunks = sequence.drop(s, SLIDING, seats[rows], visible[rows].astype(np.int32))
    return replace(state, sequences=sequences, cache=prefix.release(state.cache, chunks))
