"""A generation loop that checks everything: what is planned, read, written and handed out.

The device is a `KVMemory`, the model a hash. `CheckedLoop` knows the rules of a scheduler from
outside, from plans and outputs alone, so it works for any implementation of the functions; of
cbfn's own `BatchState` it also looks inside.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cbfn.config import EngineConfig
from cbfn.plan import Bucket, PackedBatch, layout, pack
from cbfn.state import BatchState
from cbfn.testing import inside
from cbfn.testing.fingerprint import fingerprint
from cbfn.testing.followed import (
    Ending,
    Followed,
    Launched,
    broken,
    check_carry,
    check_overtaking,
    indexed,
    misfit,
    picked,
    plan_digest,
)
from cbfn.testing.functions import Functions
from cbfn.testing.memory import KVMemory
from cbfn.testing.oracles import run_alone
from cbfn.types import (
    CacheSpec,
    InvariantViolation,
    Plan,
    Request,
    RequestId,
    RequestOutput,
    RequestRejected,
    RequestStatus,
)


@dataclass
class CheckedLoop:
    """Drives a scheduler's functions and raises InvariantViolation where they break a rule.

    Arguments:
        spec, config: given to `init`.
        functions: the scheduler under test.
        check_every: transitions between two checks of the whole state.

    `counts` says how many steps were launched, and in how many of them something rare happened.
    `history` has all calls but those of `branch`, `committed` the last commit of a plan: the state
    before it, the launch, those behind it, and the time.
    """

    spec: CacheSpec
    config: EngineConfig
    functions: Functions = field(default_factory=Functions)
    check_every: int = 1
    state: Any = field(init=False)
    memory: KVMemory = field(init=False)
    live: dict[RequestId, Followed] = field(default_factory=dict)
    over: list[Followed] = field(default_factory=list)
    launched: deque[Launched] = field(default_factory=deque)
    last: Launched | None = None
    counts: Counter[str] = field(default_factory=Counter)
    now: float = 0.0
    history: list[tuple[Any, ...]] = field(default_factory=list)
    committed: tuple[Any, Launched, tuple[Launched, ...], float] | None = None
    _kept: list[tuple[Any, bytes]] = field(default_factory=list)
    _serials: dict[int, Followed] = field(default_factory=dict)
    _slots: list[np.ndarray] = field(default_factory=lambda: [np.zeros(0, np.int32)] * 2)
    _transitions: int = 0

    def __post_init__(self) -> None:
        self.memory = KVMemory(self.spec)
        self.state = self.functions.init(self.spec, self.config)
        self.functions.check_state(self.state)

    # what a caller does

    def submit(self, request: Request) -> bool:
        """Returns whether the request was taken; checks that it was refused only for a reason."""
        reason = self._refusal(request)
        # a full queue can not be told from a state of another type
        hidden = self.config.max_queue_size and not isinstance(self.state, BatchState)
        try:
            state = self.functions.submit(self.state, request)
        except RequestRejected as error:
            if reason is None and not hidden:
                raise InvariantViolation(f"submit: a sound request was refused: {error}") from error
            return False
        if reason is not None:
            broken("submit", f"request {request.request_id!r} was taken, although {reason}")
        expected = run_alone([request], self.spec)[request.request_id]
        length = len(request.prompt_token_ids)
        followed = Followed(request, expected, length, number=len(self.live) + len(self.over))
        self.live[request.request_id] = followed
        self.memory.register(request)
        self._move(state, "submit", request)
        return True

    def submit_nonsense(self) -> None:
        """Prompts that no model can take are refused in the caller, one by one."""
        for prompt in ((), (-1,), (0, self.spec.vocab_size or 2**31)):
            try:
                self.functions.submit(self.state, Request("nonsense", prompt))
            except RequestRejected:
                continue
            broken("submit", f"a prompt of the token ids {prompt} was taken")

    def cancel(self, request_id: RequestId) -> bool:
        """Returns whether the request was unfinished."""
        followed = self.live.get(request_id)
        state = self.functions.cancel(self.state, request_id)
        if followed is None or followed.ending is not None:
            self._check_unchanged(state, f"cancel of {request_id!r}")
            return False
        followed.ending = Ending(followed.given, RequestStatus.CANCELLED, "cancelled")
        self.counts["cancel"] += 1
        self.counts["cancel in flight"] += followed.in_flight > 0
        self._move(state, "cancel", request_id)
        return True

    def finish(
        self,
        request_id: RequestId,
        num_tokens: int,
        finish_reason: str = "stop",
        stop_reason: str | None = None,
    ) -> bool:
        """Returns whether the request was unfinished."""
        followed = self.live.get(request_id)
        arguments = (request_id, num_tokens, finish_reason, stop_reason)
        if followed is not None and followed.ending is None and num_tokens > followed.given:
            try:
                self.functions.finish(self.state, *arguments)
            except ValueError:
                return False
            broken("finish", f"{followed.name} ends with {num_tokens} of {followed.given} tokens")
        state = self.functions.finish(self.state, *arguments)
        if followed is None or followed.ending is not None:
            self._check_unchanged(state, f"finish of {request_id!r}")
            return False
        followed.ending = Ending(num_tokens, RequestStatus.FINISHED, finish_reason, stop_reason)
        self._move(state, "finish", *arguments)
        return True

    def weights_updated(self) -> None:
        """New weights; nothing may be in flight."""
        assert not self.launched
        self.memory.weight_version += 1
        self._move(self.functions.weights_updated(self.state), "weights_updated")

    def launch(
        self,
        failed: bool = False,
        padding: tuple[int, int] = (0, 0),
        invalid: Sequence[int] = (),
    ) -> Plan | None:
        """Schedules and runs the next step, whose results stay on the device until `collect`.

        `invalid` picks rows, modulo their number, whose logits are no numbers.
        """
        self.now += 1.0
        before = self.state
        after, plan = self.functions.schedule(before, now=self.now)
        if self._transitions % 4 == 0:
            self._check_same_again(before, plan)
        if isinstance(after, BatchState):
            preempted = inside.check_schedule(before, after, plan)
            self.counts["preemption"] += bool(preempted)
            self.counts["preemption in flight"] += any(
                f.in_flight for f in self.live.values() if f.serial in preempted
            )
        if plan is None:
            self._move(after, "schedule", self.now, None)
            self._check_progress()
            return None
        rows = self._check_plan(plan)
        packed = self._pack(plan, padding)
        check_carry(packed, plan, rows, self.last)
        pool = after.cache.pool if isinstance(after, BatchState) else None
        previous = self.last.token_ids if self.last else None
        bad = picked(invalid, len(plan))
        tokens = self.memory.launch(packed, plan, previous, pool=pool, failed=failed, invalid=bad)
        self._plan_rows(plan, rows, packed)
        self.counts["offload"] += any(move.to_host for move in plan.moves)
        self.counts["restore"] += any(not move.to_host for move in plan.moves)
        self.last = Launched(plan, tokens, failed, tuple(rows), bad)
        self.launched.append(self.last)
        self.counts["failed step"] += failed
        self.counts["invalid row"] += bad is not None and not failed
        self._move(after, "schedule", self.now, plan_digest(plan))
        return plan

    def collect(self) -> list[RequestOutput]:
        """Commits the oldest launch and checks what is handed out."""
        launched = self.launched.popleft()
        self.now += 0.25
        result = launched.result()
        before = self.state
        state, outputs = self.functions.commit(before, launched.plan, result, now=self.now)
        if isinstance(before, BatchState):
            inside.check_commit(before, state)
            self.counts["window release"] += inside.window_moved(before, state)
        is_ours = launched.failed and isinstance(before, BatchState)
        lost = inside.lost(before, launched.plan) if is_ours else set()
        self._take_outputs(outputs, launched, lost)
        self.committed = (before, launched, tuple(self.launched), self.now)
        self._move(state, "commit", result, self.now)
        return list(outputs)

    def disturb_order(self) -> None:
        """With two steps in flight no third is planned, nor the newer one committed first."""
        older, newer = self.launched
        try:
            self.functions.schedule(self.state, now=self.now)
        except ValueError:
            pass
        else:
            broken("pipeline", f"two steps are in flight, and one behind {newer.plan.step} is made")
        try:
            self.functions.commit(self.state, newer.plan, newer.result(), now=self.now)
        except ValueError:
            return
        broken("pipeline", f"step {newer.plan.step} is committed before step {older.plan.step}")

    def flush(self) -> list[RequestOutput]:
        """Hands out what waits, without a plan."""
        state, outputs = self.functions.commit(self.state, None, None, now=self.now)
        self._take_outputs(outputs, None, set())
        self._move(state, "commit", None, self.now)
        return list(outputs)

    def turn(self, depth: int = 0, **how: Any) -> bool:
        """One turn with `depth` launches left in flight, made as `launch` is told; returns whether
        it did anything."""
        plan = self.launch(**how) if len(self.launched) < 2 else None
        if len(self.launched) > (depth if plan is not None else 0):
            self.collect()
            return True
        if plan is None and any(f.ending for f in self.live.values()):
            self.flush()
            return True
        return plan is not None

    def drain(self, depth: int = 0, padding: tuple[int, int] = (0, 0)) -> None:
        """Runs until every request has ended; raises where that takes too long.

        Every request needs at most one step for each of its tokens, and those that are computed
        again after a preemption are allowed for generously.
        """
        work = sum(f.expected.limit for f in self.live.values())
        bound = 50 + 4 * work
        for _ in range(bound):
            if not self.live and not self.launched:
                break
            self.turn(depth, padding=padding)
        else:
            broken(
                "starvation",
                f"after {bound} steps for {work} tokens unfinished are {sorted(self.live)}",
            )
        self.check_at_rest()

    def check_at_rest(self) -> None:
        """Nothing is left behind once every request has ended; no output has changed since."""
        self.check_kept()
        if self.live or self.launched:
            return
        self.flush()
        if isinstance(self.state, BatchState):
            inside.check_at_rest(self.state)

    # what is checked

    def check_kept(self) -> None:
        """Old states, and outputs handed out, are as they were."""
        for state, digest in self._kept:
            if fingerprint(state) != digest:
                broken("old states", "one has changed after a later transition")
        for followed in (*self.over, *self.live.values()):
            followed.check_outputs()

    def _move(self, state: Any, *call: Any) -> None:
        """Takes the next state, that a call gave; now and then keeps the one before, to compare it
        later."""
        self._transitions += 1
        self.history.append(call)
        if self._transitions % 5 == 1:
            self._kept.append((self.state, fingerprint(self.state)))
            del self._kept[: -4 if len(self._kept) > 8 else 0]
        self.state = state
        if self._transitions % self.check_every == 0:
            self.functions.check_state(self.state)

    def _refusal(self, request: Request) -> str | None:
        """Returns why a request has to be refused."""
        if request.request_id in self.live:
            return "its id is in use"
        limit = self.config.max_queue_size
        if limit and isinstance(self.state, BatchState) and len(self.state.waiting) >= limit:
            return f"{limit} requests wait"
        return misfit(request, self.spec)

    def _check_unchanged(self, state: Any, call: str) -> None:
        if state is not self.state and fingerprint(state) != fingerprint(self.state):
            broken("ended requests", f"the state has changed by {call}, which is over or unknown")

    def _check_same_again(self, before: Any, plan: Plan | None) -> None:
        again = self.functions.schedule(before, now=self.now)[1]
        if (again is None) != (plan is None):
            broken("determinism", "the same call gives a plan once, and none once")
        if plan is not None and again is not None and plan_digest(plan) != plan_digest(again):
            broken("determinism", f"the same call gives two plans for step {plan.step}")

    def _check_progress(self) -> None:
        if self.launched or any(f.ending for f in self.live.values()):
            return
        if self.live:
            broken("progress", f"nothing is planned, and there is work: {sorted(self.live)}")

    def _check_plan(self, plan: Plan) -> list[Followed]:
        """Budgets hold, and every row goes on where its request stopped."""
        rows, tokens = len(plan), int(plan.num_tokens.sum())
        if not rows:
            broken("plan", f"step {plan.step} is empty, expected None")
        if tokens > self.config.token_budget:
            broken("token budget", f"step {plan.step} has {tokens} of {self.config.token_budget}")
        if rows > self.config.row_budget:
            broken("row budget", f"step {plan.step} has {rows} of {self.config.row_budget} rows")
        if len(set(plan.request_ids)) < rows or len(set(plan.serials.tolist())) < rows:
            broken("plan", f"step {plan.step} has a request twice: {plan.request_ids}")
        followed: list[Followed] = []
        for row, request_id in enumerate(plan.request_ids):
            f = self.live.get(request_id)
            if f is None or f.over:
                raise InvariantViolation(f"plan: {request_id!r} is over, step {plan.step} has it")
            f.check_row(plan, row)
            if self._serials.setdefault(int(plan.serials[row]), f) is not f:
                broken("serial", f"{f.name} has serial {plan.serials[row]}, which is another's")
            followed.append(f)
        check_overtaking(plan, followed, self.live.values(), self.config)
        return followed

    def _pack(self, plan: Plan, padding: tuple[int, int]) -> PackedBatch:
        """Packs a plan into one of two buffers, which still has what was in it before."""
        bucket = Bucket(int(plan.num_tokens.sum()) + padding[0], len(plan) + padding[1])
        slot, words = self.counts["steps"] % 2, layout(bucket, self.spec).num_words
        if len(self._slots[slot]) < words:
            self._slots[slot] = np.full(words, 7, np.int32)
        return pack(plan, bucket, self.last.plan if self.last else None, out=self._slots[slot])

    def _plan_rows(self, plan: Plan, rows: list[Followed], packed: PackedBatch) -> None:
        """Moves the counts on, and notes what is rare about this step."""
        self.counts["steps"] += 1
        counts = dict.fromkeys(("prefix hit", "chunked prefill", "resume in chunks"), False)
        for row, f in enumerate(rows):
            start, epoch = int(plan.starts[row]), int(plan.epochs[row])
            if epoch != f.epoch and start:
                counts["prefix hit"] = True
            if not plan.samples[row]:
                counts["chunked prefill"] = True
                counts["resume in chunks"] |= epoch > 0 and f.given > 0
            f.take_row(plan, row)
        self.counts.update({name: int(seen) for name, seen in counts.items()})
        self.counts["carry"] += bool((packed.carry_index >= 0).any())

    def _take_outputs(
        self, outputs: Sequence[RequestOutput], launched: Launched | None, lost: set[RequestId]
    ) -> None:
        """Exactly the requests with news have an output, and each output follows the last.

        `lost` are those that a failed launch was to bring back from the host.
        """
        grown, failed, stray = launched.land() if launched else ({}, {}, False)
        self.counts["stray row"] += stray
        failed |= {i: self.live[i] for i in lost if not self.live[i].over}
        ending = {i: f for i, f in self.live.items() if f.ending is not None}
        items = indexed(outputs)
        got, due = Counter(o.request_id for o in items), {**ending, **failed, **grown}
        if got != Counter(due.keys()):
            broken("outputs", f"{sorted(got.elements())} have news, expected {sorted(due)}")
        for output in items:
            f = due[output.request_id]
            f.given += output.request_id in grown
            f.take_output(output, launched.cause if launched and f.request_id in failed else None)
            if f.terminal is not None:
                del self.live[f.request_id]
                self.over.append(f)
