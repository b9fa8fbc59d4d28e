"""Checks that look inside cbfn's own `BatchState`."""

from __future__ import annotations

import math

import numpy as np

from cbfn.state import BatchState
from cbfn.types import SLIDING, InvariantViolation, Plan, RequestId


def check_schedule(before: BatchState, after: BatchState, plan: Plan | None) -> set[int]:
    """Returns the serials of the requests that `schedule` preempted.

    Raises InvariantViolation where it took the wrong ones, or admitted what it should not.
    """
    old, new = before.sequences, after.sequences
    epochs_before, epochs_after = (
        dict(zip(s.serial[s.order].tolist(), s.epoch[s.order].tolist(), strict=True))
        for s in (old, new)
    )
    victims = {s for s, epoch in epochs_before.items() if epochs_after.get(s) != epoch}
    if after.num_preemptions - before.num_preemptions < len(victims):
        _broken("preemption", f"serials {victims} lost their seats without a preemption")
    for serial in victims - set(epochs_after):
        entry = after.entries.get(serial)
        if entry is None or entry.epoch <= epochs_before[serial]:
            _broken("preemption", f"serial {serial} does not wait with a higher epoch")
    if plan is None:
        if victims and after.num_active < 1:
            _broken("preemption", "the last active request was preempted")
        return victims
    planned = set(plan.serials.tolist())
    for serial, epoch in zip(plan.serials.tolist(), plan.epochs.tolist(), strict=True):
        if epochs_after.get(serial) != epoch:
            _broken("preemption", f"serial {serial} was preempted, and the plan has a row of it")
    _check_victims(after, plan, victims - planned, planned)
    admitted = [s for s in planned if s not in epochs_before or s in victims]
    _check_admissions(before, after, admitted)
    return victims


def _check_victims(after: BatchState, plan: Plan, victims: set[int], planned: set[int]) -> None:
    """Those preempted are newer than all that stalled beside them."""
    config, s = after.config, after.sequences
    tokens = int(plan.num_tokens.sum())
    if tokens >= config.token_budget or len(plan) >= config.row_budget or not victims:
        return  # who stalled can not be told from who came too late
    unfinished = s.order[s.num_tokens[s.order] < s.limit[s.order]]
    # one whose KV comes back beside this step has its first row in the next
    returning = {move.serial for move in plan.moves_beside if not move.to_host}
    stalled = set(s.serial[unfinished].tolist()) - planned - returning
    if isinstance(config.scheduler, str) and stalled and max(stalled) > min(victims):
        _broken("preemption", f"serials {victims} were preempted before the newest of {stalled}")


def _check_admissions(before: BatchState, after: BatchState, admitted: list[int]) -> None:
    """Nobody slips past an earlier arrival, and the safety margin stays free."""
    if not admitted or not isinstance(after.config.scheduler, str):
        return
    # one that was preempted in this very step stands behind what was admitted before it
    passed = [s for s in after.queue if s < max(admitted) and s in before.entries]
    if passed:
        _broken("order", f"serials {admitted} were admitted, {passed} came earlier and wait")
    config, pool = after.config, after.cache.pool
    if config.scheduler == "fifo" and (before.num_active or len(admitted) > 1):
        margin = math.ceil(config.margin * pool.num_usable)
        if pool.num_available < margin:
            _broken("margin", f"{pool.num_available} chunks are left, {margin} were to stay free")


def check_commit(before: BatchState, after: BatchState) -> None:
    """Raises InvariantViolation where KV that older weights computed became known as the new's."""
    s = before.sequences
    fresh = after.cache.pool.published & ~before.cache.pool.published
    for seat in s.order[s.weights[s.order] != before.weight_version].tolist():
        for t, table in s.tables.items():
            held = table.columns(np.array([seat]), int(s.end[t][seat]))
            if fresh[held].any():
                _broken("published", f"KV of weight version {s.weights[seat]} has a new key")


def lost(state: BatchState, plan: Plan) -> set[RequestId]:
    """Returns the requests whose KV a plan brings back, where they still wait for it."""
    s = state.sequences
    keys = {(move.serial, move.epoch) for move in plan.moves if not move.to_host}
    return {
        s.request_id[seat]
        for seat in s.order.tolist()
        if (int(s.serial[seat]), int(s.epoch[seat])) in keys
    }


def window_moved(before: BatchState, after: BatchState) -> bool:
    """Returns whether a request that stays active let go of sliding chunks."""
    if SLIDING not in before.spec.attention_types:
        return False
    old, new = before.sequences, after.sequences
    stayed = (old.serial == new.serial) & (old.serial >= 0)
    return bool((new.first[SLIDING] > old.first[SLIDING])[stayed].any())


def check_at_rest(state: BatchState) -> None:
    """Raises InvariantViolation unless all chunks are free or cached and nothing is remembered."""
    pool, s = state.cache.pool, state.sequences
    if pool.num_owned or pool.num_free + pool.num_cached != pool.num_usable:
        _broken("at rest", f"{pool.num_owned} chunks are owned by nobody")
    if state.host.num_owned:
        _broken("at rest", f"{state.host.num_owned} host chunks are owned by nobody")
    if len(state.queue) or state.entries or state.ids or state.seats or state.ended:
        _broken("at rest", f"the state remembers requests: {list(state.ids)}")
    if np.any(s.serial >= 0) or len(s.order):
        _broken("at rest", f"seats {np.flatnonzero(s.serial >= 0)} are taken")


def _broken(rule: str, what: str) -> None:
    raise InvariantViolation(f"{rule}: {what}")
