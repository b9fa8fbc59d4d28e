"""One request as a caller sees it, and what its rows and outputs have to be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from cbfn.config import EngineConfig
from cbfn.plan import PackedBatch
from cbfn.sizing import max_request_tokens
from cbfn.testing.fingerprint import fingerprint
from cbfn.testing.hashing import vocabulary
from cbfn.testing.oracles import Expected
from cbfn.types import (
    CacheSpec,
    InvariantViolation,
    Plan,
    Request,
    RequestId,
    RequestOutput,
    RequestStatus,
    StepResult,
)


class StepFailed(RuntimeError):
    """What a step raises that is made to fail."""


class Ending(NamedTuple):
    """An end that was asked for: by `cancel`, or by `finish`."""

    num_tokens: int
    status: RequestStatus
    finish_reason: str
    stop_reason: int | str | None = None


@dataclass(eq=False)
class Followed:
    """One submitted request, as seen from outside.

    Arguments:
        num_tokens: tokens there are, those that launched steps sample included.
        number: its place in the order of arrival.
        overtaken: later arrivals that were admitted since it was last in a plan.
        given: generated tokens that were handed out.
        computed: where its last planned row ended.
        in_flight: uncommitted plans that it is in.
        first_hit: tokens that its first admission found computed.
        ending: the end that was asked for and not handed out yet.
        terminal: its last output.
        outputs: all that were handed out, with their tokens at that moment.
    """

    request: Request
    expected: Expected
    num_tokens: int
    number: int = 0
    overtaken: int = 0
    given: int = 0
    computed: int = 0
    epoch: int = -1
    serial: int = -1
    in_flight: int = 0
    first_hit: int | None = None
    ending: Ending | None = None
    terminal: RequestOutput | None = None
    outputs: list[tuple[RequestOutput, tuple[int, ...]]] = field(default_factory=list)

    @property
    def request_id(self) -> RequestId:
        return self.request.request_id

    @property
    def name(self) -> str:
        return f"request {self.request_id!r}"

    @property
    def known(self) -> int:
        """Tokens whose values the host has."""
        return len(self.request.prompt_token_ids) + self.given

    @property
    def over(self) -> bool:
        """True once it has ended, whether or not its last output was handed out."""
        return self.terminal is not None or self.ending is not None

    def check_row(self, plan: Plan, row: int) -> None:
        """Raises InvariantViolation unless the row goes on where the request stopped."""
        start, count = int(plan.starts[row]), int(plan.num_tokens[row])
        epoch, end = int(plan.epochs[row]), start + count
        if count < 1:
            broken("plan", f"{self.name} has {count} tokens")
        if self.serial not in (-1, int(plan.serials[row])):
            broken("serial", f"{self.name} has serial {plan.serials[row]}, it had {self.serial}")
        if epoch == self.epoch:
            if start != self.computed:
                broken(
                    "positions", f"{self.name} goes on at {start}, it stopped at {self.computed}"
                )
        elif epoch < self.epoch or (self.epoch < 0 and not self.given and epoch > 0):
            broken("epoch", f"{self.name} goes from epoch {self.epoch} to {epoch}")
        elif self.num_tokens > self.known:
            broken("preemption", f"{self.name} is resumed while a token of it is in flight")
        if not 0 <= start < end <= self.num_tokens:
            broken("positions", f"{self.name}: {start} to {end} of {self.num_tokens} tokens")
        if self.num_tokens >= self.expected.limit:
            broken("limit", f"{self.name} has all {self.num_tokens} tokens, and is planned again")
        if bool(plan.samples[row]) != (end == self.num_tokens):
            broken(
                "sampling", f"{self.name}: samples={plan.samples[row]} at {end}/{self.num_tokens}"
            )
        if bool(plan.pending[row]) != (end > self.known):
            broken("pending", f"{self.name}: {plan.pending[row]} at {end}, {self.known} are known")

    def take_row(self, plan: Plan, row: int) -> None:
        """The row was launched: the counts move on."""
        start = int(plan.starts[row])
        if self.first_hit is None:
            self.first_hit = start
        self.serial, self.epoch = int(plan.serials[row]), int(plan.epochs[row])
        self.computed = start + int(plan.num_tokens[row])
        self.num_tokens += bool(plan.samples[row])
        self.in_flight += 1

    def take_output(self, output: RequestOutput, cause: type[Exception] | None) -> None:
        """Raises InvariantViolation unless this is the output that follows the last one.

        `cause` is the type of error that the request has failed with.
        """
        tokens, expected = tuple(output.token_ids), self.expected
        end = self._end(cause is not None)
        length = self.ending.num_tokens if self.ending else self.given
        if tokens != expected.token_ids[:length]:
            broken("tokens", f"{self.name} has {tokens}, alone {expected.token_ids[:length]}")
        got = (output.status, output.finish_reason, output.stop_reason)
        if end is None and (output.status.ended or output.finish_reason is not None):
            broken("end", f"{self.name} ended as {output.status} with {tokens}, alone {expected}")
        if end is not None and got != end:
            broken("end", f"{self.name} has {got} after {len(tokens)} tokens, expected {end}")
        if not isinstance(output.error, cause or type(None)):
            broken("end", f"{self.name}: its error is {output.error!r}")
        if end is not None:
            self.terminal = output
        self._check_details(output)
        self.outputs.append((output, tokens))

    def overtake(self, planned: bool, admitted: Sequence[int], bound: int | None) -> None:
        """Counts those that arrived later and are `admitted`, while it waits; raises
        InvariantViolation beyond `bound`."""
        if planned or self.over or self.num_tokens >= self.expected.limit:
            self.overtaken = 0
            return
        self.overtaken += sum(number > self.number for number in admitted)
        if bound is not None and self.overtaken > bound:
            broken("overtaking", f"{self.name} was overtaken {self.overtaken} times")

    def check_outputs(self) -> None:
        """Raises InvariantViolation where an output has changed since it was handed out."""
        for output, tokens in self.outputs:
            if tuple(output.token_ids) != tokens:
                broken("outputs", f"{self.name}: {tokens} has become {output.token_ids}")

    def _end(self, failed: bool) -> tuple[Any, ...] | None:
        if self.ending is not None:
            return self.ending[1:]
        if failed:
            return (RequestStatus.FAILED, "error", None)
        if self.given == len(self.expected.token_ids):
            reasons = (self.expected.finish_reason, self.expected.stop_reason)
            return (RequestStatus.FINISHED, *reasons)
        return None

    def _check_details(self, output: RequestOutput) -> None:
        if output.prompt_token_ids != self.request.prompt_token_ids:
            broken("outputs", f"{self.name} comes back with prompt {output.prompt_token_ids}")
        hit, got = self.first_hit or 0, output.num_cached_tokens
        if got != hit:
            broken("outputs", f"{self.name} found {hit} tokens cached, its output says {got}")
        last = self.outputs[-1][0].num_preemptions if self.outputs else 0
        if output.num_preemptions < max(last, self.epoch):
            broken("outputs", f"{self.name} was preempted {max(last, self.epoch)} times")
        times = [time for time in output.times if time is not None]
        if times != sorted(times) or (self.given and None in output.times):
            broken("outputs", f"{self.name} has times {output.times}")


class Launched(NamedTuple):
    """A launch whose results are not committed yet."""

    plan: Plan
    token_ids: np.ndarray
    failed: bool
    rows: tuple[Followed, ...]
    invalid: np.ndarray | None = None

    @property
    def cause(self) -> type[Exception]:
        """The type of error that its rows fail with, all of them or those that are invalid."""
        return StepFailed if self.failed else FloatingPointError

    def result(self) -> StepResult:
        """Returns what the device gives back for it."""
        if self.failed:
            return StepResult(error=StepFailed(f"step {self.plan.step}"))
        return StepResult(self.token_ids[:, None], invalid=self.invalid)

    def land(self) -> tuple[dict[RequestId, Followed], dict[RequestId, Followed], bool]:
        """Takes the rows out of flight; returns whose tokens grow, who fails, and whether any row's
        request was over already."""
        grown: dict[RequestId, Followed] = {}
        failed: dict[RequestId, Followed] = {}
        stray = False
        for row, f in enumerate(self.rows):
            f.in_flight -= 1
            if f.over:
                stray = True
            elif self.failed or (self.invalid is not None and self.invalid[row]):
                # one that was taken out of the batch and started anew needs nothing of this step
                if f.epoch == self.plan.epochs[row]:
                    failed[f.request_id] = f
            elif self.plan.samples[row]:
                grown[f.request_id] = f
        return grown, failed, stray


def check_carry(
    packed: PackedBatch, plan: Plan, rows: Sequence[Followed], last: Launched | None
) -> None:
    """Checks that a token is carried exactly where it is in flight, from its row in the launch
    before."""
    expected = np.full(packed.bucket.tokens, -1)
    for row, f in enumerate(rows):
        end = int(plan.starts[row] + plan.num_tokens[row])
        if end > f.known:
            assert last is not None
            source = last.rows.index(f)
            expected[packed.cu_seqlens[row + 1] - 1] = source
            if last.plan.epochs[source] != plan.epochs[row]:
                broken("carry", f"{f.name} carries a token over a preemption")
    if not np.array_equal(expected, packed.carry_index):
        broken("carry", f"carry_index is {packed.carry_index}, expected {expected}")


def check_overtaking(
    plan: Plan, rows: Sequence[Followed], live: Iterable[Followed], config: EngineConfig
) -> None:
    """Checks that not many later arrivals are admitted while a request is left out."""
    admitted = [f.number for row, f in enumerate(rows) if plan.epochs[row] != f.epoch]
    planned = {f.number for f in rows}
    bound = 2 * config.row_budget if isinstance(config.scheduler, str) else None
    for f in live:
        f.overtake(f.number in planned, admitted, bound)


def picked(picks: Sequence[int], num_rows: int) -> np.ndarray | None:
    """Returns True for the rows that are picked, modulo their number; None where none is."""
    if not picks:
        return None
    return np.isin(np.arange(num_rows), np.array(picks, np.int64) % num_rows)


def indexed(outputs: Sequence[RequestOutput]) -> list[RequestOutput]:
    """Returns the outputs; checks that they are the same by index."""
    items = list(outputs)
    if len(items) != len(outputs) or any(
        outputs[i].token_ids != item.token_ids or outputs[i].status != item.status
        for i, item in enumerate(items)
    ):
        broken("outputs", "indexing and iterating give different outputs")
    return items


def misfit(request: Request, spec: CacheSpec) -> str | None:
    """Returns why a cache can not serve a request, even alone."""
    length = len(request.prompt_token_ids)
    if max(request.prompt_token_ids) >= vocabulary(spec):
        return "its prompt is outside the vocabulary"
    if length > max_request_tokens(spec):
        return f"the cache holds {max_request_tokens(spec)} tokens of the {length}"
    if spec.max_model_len is not None and length >= spec.max_model_len:
        return "the model has no position for a new token"
    return None


def plan_digest(plan: Plan) -> bytes:
    """Returns a digest of a plan and of the chunks that its rows hold."""
    spec, s, seats = plan.inputs
    tables = [s.tables[t].columns(seats, int(s.end[t][seats].max())) for t in spec.attention_types]
    counts = (plan.starts, plan.num_tokens, plan.samples, plan.pending)
    moves = [tuple(move) for move in (*plan.moves_before, *plan.moves_beside)]
    return fingerprint((plan.request_ids, plan.serials, plan.epochs, counts, tables, moves))


def broken(rule: str, what: str) -> None:
    """Raises InvariantViolation, which names the rule first."""
    raise InvariantViolation(f"{rule}: {what}")
