"""The carry-over of sampled tokens from one batch to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from cbfn import scheduler
from cbfn.config import EngineConfig
from cbfn.plan import Bucket, PackedBatch, pack
from cbfn.testing.machines.base import Machine
from cbfn.testing.strategies import VOCAB_SIZE, cache_specs, engine_configs, in_order, requests
from cbfn.types import CacheSpec, InvariantViolation, Plan, Request, RequestRejected, StepResult

_TAMPERINGS = ("none", "lost", "another epoch", "another serial", "no sample")


class CarryOverMachine(Machine):
    """Every input token is the request's own, whether the host knows it or the device carries it.

    The rows of the batch before stand in any order, tokens have any value (0 often), and a batch
    that does not sample what is needed, or for another serial or epoch, is refused. Override `pack`
    and `carry_over` to test others.
    """

    __test__ = False

    def pack(self, plan: Plan, bucket: Bucket, previous: Plan | None) -> PackedBatch:
        return pack(plan, bucket, previous)

    def carry_over(
        self, input_ids: np.ndarray, previous_token_ids: np.ndarray, carry_index: np.ndarray
    ) -> np.ndarray:
        """Returns `input_ids` with the previous batch's tokens where `carry_index` >= 0."""
        carried = previous_token_ids[np.maximum(carry_index, 0)]
        return np.where(carry_index >= 0, carried, input_ids)

    @initialize(spec=cache_specs(), config=engine_configs())
    def start(self, spec: CacheSpec, config: EngineConfig) -> None:
        self.state = scheduler.init(spec, config)
        self.tokens: dict[int, list[int]] = {}  # by serial: all there are, in flight or not
        self.known: dict[int, int] = {}  # by serial: how many the host knows
        self.in_flight: list[tuple[Plan, np.ndarray]] = []
        self.previous: Plan | None = None  # the batch before, its rows in the device's order
        self.previous_token_ids = np.zeros(1, np.int32)
        self.current: Plan | None = None
        self.before: Plan | None = None

    @rule(several=st.lists(requests(), min_size=1, max_size=3))
    def submits(self, several: list[Request]) -> None:
        for request in several:
            serial = self.state.next_serial
            try:
                self.state = scheduler.submit(self.state, request)
            except RequestRejected:
                continue
            self.tokens[serial] = list(request.prompt_token_ids)
            self.known[serial] = len(request.prompt_token_ids)

    @rule(request_id=st.sampled_from("abcdefgh"))
    def cancels(self, request_id: str) -> None:
        self.state = scheduler.cancel(self.state, request_id)

    @rule(turns=st.integers(1, 6), salt=st.integers(0, 99), zeros=st.booleans())
    def runs(self, turns: int, salt: int, zeros: bool) -> None:
        """Launches, each while the one before is in flight; rows stand in any order."""
        for turn in range(turns):
            self._launch(Random(salt + turn), zeros)
            if len(self.in_flight) > 1 or (self.in_flight and self.current is None):
                self.collects()

    @precondition(lambda self: self.in_flight)
    @rule()
    def collects(self) -> None:
        plan, tokens = self.in_flight.pop(0)
        self.state, _ = scheduler.commit(self.state, plan, StepResult(tokens[:, None]))
        for row in np.flatnonzero(plan.samples).tolist():
            self.known[int(plan.serials[row])] += 1

    @precondition(lambda self: self.current is not None and self.current.pending.any())
    @rule(kind=st.sampled_from(_TAMPERINGS), pick=st.integers(0, 15))
    def is_refused_behind_another_batch(self, kind: str, pick: int) -> None:
        """The batch before does not have what one of the rows needs."""
        plan, before = self.current, self.before
        assert plan is not None
        pending = np.flatnonzero(plan.pending)
        serial = plan.serials[pending[pick % len(pending)]]
        previous = None if before is None else self._tampered(kind, before, serial)
        try:
            self.pack(plan, _bucket(plan), previous)
        except ValueError:
            return
        raise InvariantViolation(
            f"carry: step {plan.step} needs a token of serial {serial}, and was packed behind a "
            f"batch without it ({kind})"
        )

    def _tampered(self, kind: str, before: Plan, serial: int) -> Plan | None:
        row = int(np.flatnonzero(before.serials == serial)[0])
        mark = np.arange(len(before)) == row
        if kind == "none":
            return None
        if kind == "lost" and len(before) > 1:
            return in_order(before, [r for r in range(len(before)) if r != row])
        if kind == "another epoch":
            return replace(before, epochs=before.epochs + mark.astype(np.int32))
        if kind in ("another serial", "lost"):
            return replace(before, serials=np.where(mark, 10**6, before.serials))
        return replace(before, samples=before.samples & ~mark)

    def _launch(self, random: Random, zeros: bool) -> None:
        self.current = None
        if len(self.state.uncommitted) > 1:
            return
        self.state, plan = scheduler.schedule(self.state)
        if plan is None:
            return
        order = random.sample(range(len(plan)), len(plan))
        shuffled = in_order(plan, order)
        bucket = _bucket(plan, random.randrange(3), random.randrange(3))
        packed = self.pack(shuffled, bucket, self.previous)
        self._check(shuffled, packed)
        sampled = np.array(
            [0 if zeros and random.random() < 0.5 else random.randrange(VOCAB_SIZE) for _ in order],
            np.int32,
        )
        for row in np.flatnonzero(shuffled.samples).tolist():
            self.tokens[int(shuffled.serials[row])].append(int(sampled[row]))
        self.before, self.previous, self.current = self.previous, shuffled, shuffled
        self.previous_token_ids = sampled
        self.in_flight.append((plan, _back(sampled, order)))

    def _check(self, plan: Plan, packed: PackedBatch) -> None:
        expected = np.zeros(packed.bucket.tokens, np.int64)
        carried = np.zeros(packed.bucket.tokens, bool)
        for row, serial in enumerate(plan.serials.tolist()):
            start, end = int(plan.starts[row]), int(plan.starts[row] + plan.num_tokens[row])
            first, last = packed.cu_seqlens[row], packed.cu_seqlens[row + 1]
            expected[first:last] = self.tokens[serial][start:end]
            carried[first:last] = np.arange(start, end) >= self.known[serial]
        if not np.array_equal(packed.carry_index >= 0, carried):
            raise InvariantViolation(
                f"carry: carry_index of step {plan.step} is {packed.carry_index}, tokens are in "
                f"flight at {np.flatnonzero(carried)}"
            )
        if packed.input_ids[carried].any():
            raise InvariantViolation("carry: input_ids is not 0 where tokens are in flight")
        inputs = self.carry_over(packed.input_ids, self.previous_token_ids, packed.carry_index)
        if not np.array_equal(inputs, expected):
            raise InvariantViolation(
                f"carry: the input of step {plan.step} is {inputs}, its tokens are {expected}"
            )


def _bucket(plan: Plan, more_tokens: int = 0, more_rows: int = 0) -> Bucket:
    return Bucket(int(plan.num_tokens.sum()) + more_tokens, len(plan) + more_rows)


def _back(values: np.ndarray, order: Sequence[int]) -> Any:
    """Returns what was reordered by `order` in its first order."""
    back = np.empty_like(values)
    back[np.array(order)] = values
    return back
