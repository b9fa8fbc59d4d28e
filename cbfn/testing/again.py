"""The same calls a second time: old states can be used again, and nothing depends on chance."""

from __future__ import annotations

from collections import deque

import numpy as np

from cbfn.testing.fingerprint import fingerprint
from cbfn.testing.followed import broken, plan_digest
from cbfn.testing.hashing import vocabulary
from cbfn.testing.loop import CheckedLoop
from cbfn.types import Plan, StepResult


def branch(loop: CheckedLoop, salt: int) -> None:
    """Commits the last committed step once more to the state it was committed to: with other
    tokens and some steps behind it, then with the same tokens.

    Raises InvariantViolation where the branch breaks a rule, or anybody notices it.
    """
    if loop.committed is None:
        return
    base, launched, in_flight, now = loop.committed
    digest = fingerprint(base)
    commit, result = loop.functions.commit, launched.result()
    true, outputs = commit(base, launched.plan, result, now=now)
    expected = fingerprint(true), fingerprint(list(outputs))
    vocab, plans = vocabulary(loop.spec), [later.plan for later in in_flight]
    other = StepResult((launched.token_ids[:, None] + 1 + salt) % vocab)
    state, _ = commit(base, launched.plan, other, now=now)
    for step in range(3):
        loop.functions.check_state(state)
        state, plan = loop.functions.schedule(state, now=now)
        plans += [plan] if plan is not None else []
        if plans:
            tokens = np.arange(len(plans[0]))[:, None] * salt + step
            state, _ = commit(state, plans.pop(0), StepResult(tokens % vocab), now=now)
    loop.functions.check_state(state)
    if fingerprint(base) != digest:
        broken("old states", "one has changed by a commit of other values")
    true, outputs = commit(base, launched.plan, result, now=now)
    if (fingerprint(true), fingerprint(list(outputs))) != expected:
        broken("old states", "the same commit gives another state behind a branch")


def replay(loop: CheckedLoop) -> None:
    """Makes all calls of a loop once more from the start.

    Raises InvariantViolation where they do not give the same plans.
    """
    functions, plans = loop.functions, deque[Plan]()
    state = functions.init(loop.spec, loop.config)
    for name, *arguments in loop.history:
        if name == "schedule":
            state, plan = functions.schedule(state, now=arguments[0])
            if (None if plan is None else plan_digest(plan)) != arguments[1]:
                broken("determinism", f"the same calls give another plan at {arguments[0]}")
            if plan is not None:
                plans.append(plan)
        elif name == "commit":
            result, now = arguments
            plan = None if result is None else plans.popleft()
            state, _ = functions.commit(state, plan, result, now=now)
        else:
            state = getattr(functions, name)(state, *arguments)
