"""Hypothesis strategies for the values of the core.

Each is a noun with keyword-only bounds. Nothing is drawn and thrown away. Sizes are small, so that
memory is scarce and everything that happens seldom in service happens all the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

try:
    from hypothesis import strategies as st
    from hypothesis.strategies import SearchStrategy
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        'cbfn.testing.strategies needs Hypothesis: pip install "cbfn[testing]"'
    ) from missing

from cbfn import scheduler
from cbfn.config import EngineConfig, SamplingParams
from cbfn.testing.hashing import next_token
from cbfn.testing.workloads import Workload
from cbfn.types import FULL, SLIDING, CacheSpec, Plan, PlanInputs, Request, StepResult

VOCAB_SIZE = 40
KINDS = ("full", "sliding", "hybrid")
_SAMPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1e-4},
    {"temperature": 1, "top_k": -1},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.9},
    {"temperature": 1.3, "min_p": 0.1},
)


def sampling_params(
    *, vocab_size: int = VOCAB_SIZE, max_tokens: int = 24, served: bool = True
) -> SearchStrategy[SamplingParams]:
    """Returns valid parameters; with `served` only those that no function refuses to serve.

    `max_tokens` bounds the length; one in eight has none of its own.
    """
    lengths = st.integers(1, max_tokens)
    tokens = st.integers(0, vocab_size - 1)
    few = st.lists(tokens, max_size=2).map(tuple)
    common = {
        "max_tokens": st.one_of(*[lengths] * 7, st.none()),
        "stop_token_ids": st.one_of(st.just(()), st.just(()), few),
        "ignore_eos": st.booleans(),
        "seed": st.one_of(st.none(), st.integers(-(2**63), 2**64 - 1)),
    }
    if served:
        variants = [{name: st.just(v) for name, v in values.items()} for values in _SAMPLED]
        return st.one_of(*(st.builds(SamplingParams, **v, **common) for v in variants))
    words = st.lists(st.text(min_size=1, max_size=4), max_size=2).map(tuple)
    return st.builds(
        SamplingParams,
        temperature=st.floats(0, 4),
        top_k=st.integers(-1, 2 * vocab_size),
        top_p=st.floats(0, 1, exclude_min=True),
        min_p=st.floats(0, 1),
        n=st.integers(1, 4),
        stop=words,
        logprobs=st.one_of(st.none(), st.integers(0, 5)),
        prompt_logprobs=st.one_of(st.none(), st.integers(0, 5)),
        presence_penalty=st.floats(-2, 2),
        frequency_penalty=st.floats(-2, 2),
        repetition_penalty=st.floats(0.1, 4),
        logit_bias=st.one_of(st.none(), st.dictionaries(tokens, st.floats(-100, 100), max_size=2)),
        allowed_token_ids=st.one_of(st.none(), st.lists(tokens, min_size=1, max_size=3)),
        bad_words=words,
        **common,
    )


@lru_cache(maxsize=64)
def _stream(family: int, vocab_size: int, length: int) -> tuple[int, ...]:
    """Returns a family's tokens: a beginning, and what the hash model puts behind it."""
    tokens = [family % vocab_size]
    while len(tokens) < length:
        tokens.append(next_token(tokens, vocab_size))
    return tuple(tokens)


@st.composite
def prompts(
    draw: Any, *, vocab_size: int = VOCAB_SIZE, max_length: int = 24, families: int = 3
) -> tuple[int, ...]:
    """Returns prompts that share prefixes.

    A prompt is the beginning of one of a few families of text, one in four with another token
    somewhere. A family goes on as the model does, so a longer prompt also shares what a shorter one
    has generated.
    """
    family, length = draw(st.integers(0, families - 1)), draw(st.integers(1, max_length))
    at = draw(st.integers(0, 4 * max_length - 1)) - 3 * max_length
    tokens = _stream(family, vocab_size, max_length)[:length]
    if 0 <= at < length:
        return (*tokens[:at], (tokens[at] + 1) % vocab_size, *tokens[at + 1 :])
    return tokens


def requests(
    *,
    request_ids: SearchStrategy[str] | None = None,
    vocab_size: int = VOCAB_SIZE,
    max_prompt: int = 24,
    max_tokens: int = 24,
    families: int = 3,
) -> SearchStrategy[Request]:
    """Returns requests that the scheduler serves, were the cache only large enough."""
    return st.builds(
        Request,
        request_ids if request_ids is not None else st.sampled_from("abcdefgh"),
        prompts(vocab_size=vocab_size, max_length=max_prompt, families=families),
        sampling_params(vocab_size=vocab_size, max_tokens=max_tokens),
        eos_token_ids=st.sampled_from([(), (vocab_size - 1,), (0, vocab_size // 2)]),
    )


def cache_specs(
    *,
    kinds: Sequence[str] = KINDS,
    max_page_size: int = 4,
    min_chunks: int = 4,
    max_chunks: int = 12,
    max_layers: int = 3,
    max_window: int = 9,
    vocab_size: int = VOCAB_SIZE,
    num_host_chunks: Sequence[int] = (0, 0, 0, 0, 2, 20),
) -> SearchStrategy[CacheSpec]:
    """Returns the shapes of small caches; chunk counts are without the null chunks.

    A hybrid has up to `max_layers` layers of either type, so a chunk holds several blocks of one
    type or of both where the counts differ.
    """

    counts = range(1, max_layers + 1)
    layers = {
        "full": [(FULL,) * n for n in counts],
        "sliding": [(SLIDING,) * n for n in counts],
        "hybrid": [
            (SLIDING, FULL) * min(n, m) + (FULL,) * (n - m) + (SLIDING,) * (m - n)
            for n in counts
            for m in counts
        ],
    }
    return st.one_of(
        *(
            st.builds(
                CacheSpec,
                layer_types=st.sampled_from(layers[kind]),
                page_size=st.one_of(
                    st.integers(1, min(2, max_page_size)), st.integers(1, max_page_size)
                ),
                page_bytes=st.just(16),
                num_chunks=st.integers(min_chunks + 2, max_chunks + 2),
                sliding_window=st.none() if kind == "full" else st.integers(1, max_window),
                vocab_size=st.just(vocab_size),
                max_model_len=st.sampled_from([None, None, 2 * max_page_size * min_chunks]),
                num_host_chunks=st.sampled_from(num_host_chunks),
            )
            for kind in kinds
        )
    )


def engine_configs(
    *,
    schedulers: Sequence[Any] = ("fifo", "prefill_first"),
    max_batch_tokens: int = 24,
    max_requests: int = 6,
    max_queue_sizes: Sequence[int] = (0, 0, 0, 4),
    safety_margins: Sequence[float | None] = (None, 0.0, 0.3),
    page_size: int = 4,
) -> SearchStrategy[EngineConfig]:
    """Returns settings of the scheduler; two in three have a token budget below 9."""
    return st.builds(
        EngineConfig,
        page_size=st.just(page_size),
        max_batch_tokens=st.one_of(
            st.integers(1, min(4, max_batch_tokens)),
            st.integers(1, min(8, max_batch_tokens)),
            st.integers(1, max_batch_tokens),
        ),
        max_requests_per_batch=st.one_of(
            st.integers(min(2, max_requests), max_requests), st.integers(1, max_requests)
        ),
        allow_block_sharing=st.sampled_from([True, True, True, False]),
        scheduler=st.sampled_from(list(schedulers)),
        safety_margin=st.sampled_from(list(safety_margins)),
        max_queue_size=st.sampled_from(list(max_queue_sizes)),
        after_weights_update=st.sampled_from(["keep", "recompute"]),
        seed=st.integers(0, 3),
    )


@st.composite
def workloads(
    draw: Any,
    *,
    specs: SearchStrategy[CacheSpec] | None = None,
    configs: SearchStrategy[EngineConfig] | None = None,
    max_requests: int = 8,
    max_turns: int = 24,
    max_prompt: int = 24,
    max_tokens: int = 24,
    cancels: bool = True,
) -> Workload:
    """Returns whole runs; requests may be too large for the cache, ids are all different."""
    spec = draw(cache_specs() if specs is None else specs)
    bodies = draw(
        st.lists(
            st.tuples(
                st.integers(0, max_turns), requests(max_prompt=max_prompt, max_tokens=max_tokens)
            ),
            min_size=1,
            max_size=max_requests,
        )
    )
    bodies.sort(key=lambda pair: pair[0])
    named = [
        Request(
            f"r{number}",
            body.prompt_token_ids,
            body.sampling_params,
            eos_token_ids=body.eos_token_ids,
        )
        for number, (_, body) in enumerate(bodies)
    ]
    events = st.tuples(st.integers(0, 2 * max_turns), st.integers(0, len(named) - 1))
    return Workload(
        spec=spec,
        config=draw(engine_configs() if configs is None else configs),
        requests=tuple(named),
        arrivals=tuple(turn for turn, _ in bodies),
        cancels=tuple(sorted(draw(st.lists(events, max_size=3)))) if cancels else (),
        depth=draw(st.integers(0, 1)),
    )


class PageOp(NamedTuple):
    """An operation on a pool. `picks` choose chunks: from those of a kind, modulo their number."""

    kind: str
    picks: tuple[int, ...]


def page_ops(*, num_chunks: int = 12, max_picks: int = 4) -> SearchStrategy[PageOp]:
    """Returns operations on a pool of `num_chunks` chunks; for "allocate" picks are counts."""
    picks = st.lists(st.integers(0, num_chunks - 1), max_size=max_picks).map(tuple)
    kinds = ("allocate", "share", "release", "publish", "evict")
    return st.builds(PageOp, st.sampled_from(kinds), picks)


@st.composite
def plans(
    draw: Any, *, max_steps: int = 10, shuffled: bool = True, **bounds: Any
) -> tuple[Plan, ...]:
    """Returns the plans of successive launches of a workload, one of them always in flight; there
    is at least one.

    `shuffled` puts the rows of each plan in any order: what a plan means does not depend on it.
    `bounds` are those of `workloads`.
    """
    workload = draw(workloads(cancels=False, **bounds))
    state = scheduler.init(workload.spec, workload.config)
    made: list[Plan] = []
    waiting = [Request("small", (0,)), *workload.requests]
    for _ in range(max_steps):
        for request in waiting[: 1 + len(waiting) // 2]:
            try:
                state = scheduler.submit(state, request)
            except scheduler.RequestRejected:
                continue
        waiting = waiting[1 + len(waiting) // 2 :]
        state, plan = scheduler.schedule(state)
        if plan is not None:
            made.append(plan)
        if len(state.uncommitted) > 1 or (plan is None and state.uncommitted):
            oldest = state.uncommitted[0]
            tokens = np.full((len(oldest), 1), oldest.step % VOCAB_SIZE)
            state, _ = scheduler.commit(state, oldest, StepResult(tokens))
    if shuffled:
        made = [in_order(plan, draw(st.permutations(range(len(plan))))) for plan in made]
    return tuple(made)


@st.composite
def step_results(draw: Any, plan: Plan, *, vocab_size: int = VOCAB_SIZE) -> StepResult:
    """Returns what a launch of `plan` may give; in one of two some rows are invalid.

    Rows that do not sample, and invalid ones, hold any value.
    """
    rows = len(plan)
    invalid = np.array(draw(st.lists(st.booleans(), min_size=rows, max_size=rows)), bool)
    invalid &= draw(st.booleans())
    tokens = draw(st.lists(st.integers(0, vocab_size - 1), min_size=rows, max_size=rows))
    token_ids = np.where(plan.samples & ~invalid, tokens, -(2**62))[:, None]
    return StepResult(token_ids, invalid=invalid if invalid.any() or draw(st.booleans()) else None)


def in_order(plan: Plan, order: Sequence[int]) -> Plan:
    """Returns the plan with its rows in another order."""
    rows = np.array(order, np.int64)
    spec, sequences, seats = plan.inputs
    return replace(
        plan,
        request_ids=tuple(plan.request_ids[row] for row in order),
        serials=plan.serials[rows],
        epochs=plan.epochs[rows],
        starts=plan.starts[rows],
        num_tokens=plan.num_tokens[rows],
        samples=plan.samples[rows],
        pending=plan.pending[rows],
        inputs=PlanInputs(spec, sequences, seats[rows]),
    )
