"""The values that cross cbfn's edges: requests, plans, results, outputs, and the errors.

Shape letters, here and in every annotation: T tokens in a step, B rows, C chunks, P page size,
M blocks a row, H / K query and key-value heads, D head dimension, V vocabulary, L layers,
S tokens sampled for a row in one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import indent
from typing import Any, NamedTuple

import numpy as np
from immutables import Map
from jaxtyping import Bool, Int, Int32, Int64

from cbfn import checks
from cbfn.breakdown import MemoryBreakdown
from cbfn.cachespec import FULL as FULL
from cbfn.cachespec import NUM_NULL_CHUNKS as NUM_NULL_CHUNKS
from cbfn.cachespec import SLIDING as SLIDING
from cbfn.cachespec import CacheSpec as CacheSpec
from cbfn.config import SamplingParams
from cbfn.prompts import token_ids
from cbfn.requestoutput import FINISH_REASONS as FINISH_REASONS
from cbfn.requestoutput import Decoded as Decoded
from cbfn.requestoutput import RequestOutput as RequestOutput
from cbfn.requestoutput import RequestStatus as RequestStatus
from cbfn.requestoutput import RequestTimes as RequestTimes
from cbfn.requestoutput import error_record as error_record
from cbfn.requestoutput import portable
from cbfn.tokens import Tokens

RequestId = str


class RequestRejected(ValueError):
    """A request that can not run; nothing else is touched."""


class InvariantViolation(AssertionError):
    """A broken rule of the core; the message names it."""


class SchedulerStalled(RuntimeError):
    """Work is left, and the policy offers nothing that can run."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to be continued.

    Arguments:
        request_id: a non-empty string, unique among the requests that have not ended.
        prompt_token_ids: token ids in [0, 2**31), at least one, as a sequence, a tensor or array
            [T] or [1, T], or what a tokenizer returns for one text; kept as `Tokens`.
        sampling_params: None stands for `SamplingParams()`.
        priority: for policies that look at it.
        deadline: seconds after `arrival`, > 0.
        arrival: seconds on the clock that `schedule` and `commit` are called with.
        eos_token_ids: the model's end-of-sequence ids.

    Raises RequestRejected that names the field, the value and what was expected.
    """

    request_id: RequestId
    prompt_token_ids: Sequence[int]
    sampling_params: SamplingParams = None  # type: ignore[assignment]
    priority: int = 0
    deadline: float | None = None
    arrival: float = 0.0
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        try:
            put("request_id", checks.text("Request.request_id", self.request_id))
            put("prompt_token_ids", prompt_tokens(self.prompt_token_ids))
            if self.sampling_params is None:
                put("sampling_params", SamplingParams())
            if not isinstance(self.sampling_params, SamplingParams):
                raise ValueError(
                    "Request.sampling_params: expected SamplingParams or None, "
                    f"got {self.sampling_params!r}"
                )
            put("priority", checks.integer("Request.priority", self.priority))
            if self.deadline is not None:
                low_open = True
                deadline = checks.real("Request.deadline", self.deadline, 0.0, None, low_open)
                put("deadline", deadline)
            put("arrival", checks.real("Request.arrival", self.arrival))
            eos = checks.token_ids("Request.eos_token_ids", self.eos_token_ids)
            put("eos_token_ids", eos)
        except RequestRejected:
            raise
        except ValueError as error:
            raise RequestRejected(str(error)) from None


def prompt_tokens(prompt: Any) -> Tokens:
    """Returns a prompt as `Tokens`. Raises RequestRejected unless it is at least one valid id."""
    try:
        return Tokens(token_ids("Request.prompt_token_ids", prompt))
    except ValueError as error:
        raise RequestRejected(str(error)) from None


class Move(NamedTuple):
    """Chunks of one request that a launch copies to the host, or back: device[i] and host[i].

    Host chunks are counted from 2, like those of the device.
    """

    to_host: bool
    device: Int32[np.ndarray, "n"]
    host: Int32[np.ndarray, "n"]
    serial: int
    epoch: int


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What one launch computes; row i is `request_ids[i]`. Counts only: no sampled token is in it.

    Row i computes positions `starts[i]` to `starts[i] + num_tokens[i] - 1` and, where `samples[i]`
    is True, samples the token at the position behind them. `pending[i]` is True where the row's
    last input token is the sampled output of the launch before, whose value the host does not have.

    Moves run in order, behind the launch before; `moves_before` before this one computes, the
    others beside it, and all before the next one computes.
    """

    step: int
    request_ids: tuple[RequestId, ...]
    serials: Int64[np.ndarray, "B"]
    epochs: Int32[np.ndarray, "B"]
    starts: Int32[np.ndarray, "B"]
    num_tokens: Int32[np.ndarray, "B"]
    samples: Bool[np.ndarray, "B"]
    pending: Bool[np.ndarray, "B"]
    inputs: PlanInputs
    moves_before: tuple[Move, ...] = ()
    moves_beside: tuple[Move, ...] = ()

    @property
    def moves(self) -> tuple[Move, ...]:
        """All moves, in their order."""
        return self.moves_before + self.moves_beside

    def __len__(self) -> int:
        return len(self.request_ids)


class PlanInputs(NamedTuple):
    """What `pack` looks up for a plan's rows, kept by reference; see `cbfn.sequence`."""

    spec: CacheSpec
    sequences: Any
    seats: Int32[np.ndarray, "B"]


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What one launch gave; row i is `plan.request_ids[i]`.

    Arguments:
        token_ids: sampled token ids; rows that do not sample hold any value.
        num_tokens: valid tokens of each row; None: one for each row that samples.
        logprobs: log-probabilities of the sampled tokens.
        error: the exception that the launch raised; the other fields are then ignored.
        invalid: True for rows without a token, whether they were to sample or not: the logits of
            the row's last token hold NaN, or nothing but -inf, or +inf where it draws. Their token
            ids hold any value. None: no row is.
    """

    token_ids: Int[np.ndarray, "B S"] | None = None
    num_tokens: Int[np.ndarray, "B"] | None = None
    logprobs: Any = None
    error: BaseException | None = None
    invalid: Bool[np.ndarray, "B"] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        values = (self.token_ids, self.num_tokens, self.logprobs, portable(self.error))
        return StepResult, (*values, self.invalid)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts at one moment; `str` gives a line for each.

    Blocks are the pool's units: chunks for hybrid models. `memory` is what the engine takes at
    most, as it was reckoned at its start; `allocated` is what parts of it came to, in bytes, as
    `Runner.memory` names them.
    """

    total_blocks: int
    free_blocks: int
    cached_blocks: int
    owned_blocks: int
    num_waiting: int
    num_running: int
    num_preemptions: int
    num_steps: int
    num_cached_tokens: int
    num_generated_tokens: int
    host_blocks: int = 0
    free_host_blocks: int = 0
    num_offloads: int = 0
    notes: tuple[str, ...] = ()
    memory: MemoryBreakdown | None = None
    allocated: Map[str, int] = Map()

    def __str__(self) -> str:
        lines = []
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, MemoryBreakdown):
                value = "\n" + indent(str(value), "  ")
            lines += [f"{name}: {dict(value) if isinstance(value, Map) else value}"]
        return "\n".join(lines)
