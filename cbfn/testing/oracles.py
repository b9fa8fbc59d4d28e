"""What must come out: every request as if it ran alone.

The model is a hash of the whole prefix, so a request whose KV is mixed up, stale or incomplete gets
another token, and what it should get is known without any scheduling.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from cbfn.sizing import max_request_tokens
from cbfn.testing.hashing import EMPTY, extend, next_token, vocabulary
from cbfn.testing.memory import POISON, KVMemory
from cbfn.types import CacheSpec, Request, RequestId

__all__ = ["POISON", "Expected", "KVMemory", "next_token", "run_alone"]


class Expected(NamedTuple):
    """How a request ends when it runs alone; `limit` is the length at which it would at most."""

    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: int | None
    limit: int


@runtime_checkable
class HasRequests(Protocol):
    """A workload, for instance `cbfn.testing.workloads.Workload`."""

    @property
    def spec(self) -> CacheSpec: ...
    @property
    def requests(self) -> Sequence[Request]: ...


def run_alone(
    workload: HasRequests | Iterable[Request], spec: CacheSpec | None = None
) -> dict[RequestId, Expected]:
    """Returns what each request gives when nothing else is in the cache.

    `spec` is the workload's own unless it is given; bare requests need one. It bounds the length:
    by the model's positions, and by what the cache holds of a single request.
    """
    requests = workload if isinstance(workload, Iterable) else workload.requests
    spec = spec or getattr(workload, "spec", None)
    if spec is None:
        raise ValueError("run_alone: expected a spec with bare requests")
    longest = max_request_tokens(spec)
    return {request.request_id: _alone(request, spec, longest) for request in requests}


def _alone(request: Request, spec: CacheSpec, longest: int) -> Expected:
    params, prompt = request.sampling_params, request.prompt_token_ids
    # the last token is sampled, and its own KV is never needed
    limit = min(longest + 1, spec.max_model_len or longest + 1)
    if params.max_tokens is not None:
        limit = min(limit, len(prompt) + params.max_tokens)
    eos = () if params.ignore_eos else request.eos_token_ids
    vocab, content = vocabulary(spec), EMPTY
    for token in prompt:
        content = extend(content, token)
    tokens: list[int] = []
    while True:
        tokens.append(content % vocab)
        if tokens[-1] in eos:
            return Expected(tuple(tokens), "stop", None, limit)
        if tokens[-1] in params.stop_token_ids:
            return Expected(tuple(tokens), "stop", tokens[-1], limit)
        if len(prompt) + len(tokens) >= limit:
            return Expected(tuple(tokens), "length", None, limit)
        content = extend(content, tokens[-1])
