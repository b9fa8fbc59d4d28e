"""Logits and KV that are no numbers: the request that has them fails, and no other notices."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cbfn import Engine, EngineConfig, Request, RequestStatus, Runner, SamplingParams, scheduler
from cbfn.attention import gather, split
from cbfn.sample import INVALID_TOKEN, SamplingNeeds, draw, likeliest, sample
from cbfn.step import carry_over, compose
from cbfn.types import FULL, CacheSpec, StepResult
from tests.conftest import greedy_alone, run_interpreted, small_model
from tests.test_attention import Case, kernel_cases, make_case, run_decode, run_prefill

BAD = 77  # the token whose embedding is NaN
TEMPERATURES = [1e-45, 1e-40, 1e-30, 1e-4, 1.0, 1e30, 3.4e38, 3.5e38, 1e39, 1e308]
NEEDS = [SamplingNeeds(noise=True, filters=filters) for filters in (False, True)]
FILTERS: list[dict[str, Any]] = [
    {"top_k": 2},
    {"top_k": 3, "top_p": 0.9},
    {"top_p": 0.5},
    {"min_p": 0.9},
    {"top_k": 5, "min_p": 0.1},
]


# Temperatures.


def drawn(
    logits: Tensor,
    temperature: float,
    seeds: Tensor,
    needs: SamplingNeeds = NEEDS[1],
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> list[int]:
    """Returns the sampled tokens; the temperature becomes fp32 as in a packed batch."""
    with np.errstate(over="ignore"):
        fp32 = float(np.float32(temperature))
    rows = len(logits)
    tokens = sample(
        logits,
        torch.full((rows,), fp32),
        torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        seeds,
        torch.zeros(rows, dtype=torch.int32),
        needs,
    )
    return tokens.tolist()


def allowed(
    logits: list[float], temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> set[int]:
    """Returns the tokens that the filters surely do not remove; of equal logits all."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    least = logits[order[top_k - 1]] if 0 < top_k < len(logits) else -math.inf
    left = [i for i in order if logits[i] >= least and logits[i] > -math.inf]
    heat = min(max(temperature, 1e-300), 1e300)
    weights = [math.exp(max((logits[i] - logits[order[0]]) / heat, -700.0)) for i in left]
    shares = [weight / math.fsum(weights) for weight in weights]
    before = [math.fsum(weight for weight in shares if weight > share) for share in shares]
    return {
        i
        for i, share, mass in zip(left, shares, before, strict=True)
        if mass < top_p + 1e-4 and share >= min_p * shares[0] - 1e-4
    }


rows_of_logits = st.lists(
    st.sampled_from([-math.inf, -1e4, -3.0, -1.0, 0.0, 0.5, 2.0, 2.5, 100.0, 6e4]),
    min_size=8,
    max_size=8,
).filter(lambda row: max(row) > -math.inf)


@settings(max_examples=300, deadline=None)
@given(
    logits=rows_of_logits,
    temperature=st.one_of(st.sampled_from(TEMPERATURES), st.floats(1e-45, 1e308)),
    filters=st.sampled_from([*FILTERS, {}]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_any_finite_temperature_draws_what_the_filters_left(
    logits: list[float], temperature: float, filters: dict[str, Any], dtype: torch.dtype
) -> None:
    rows = torch.tensor(logits).to(dtype)
    seeds = torch.arange(40)
    for needs in NEEDS[1:] if filters else NEEDS:
        tokens = drawn(rows.expand(40, -1), temperature, seeds, needs, **filters)
        assert set(tokens) <= allowed(rows.tolist(), temperature, **filters)


def test_hot_temperatures_draw_evenly_and_cold_ones_the_best() -> None:
    logits = torch.tensor([[1.0, 3.0, -math.inf, 2.0, -5.0]]).expand(400, -1)
    for temperature in TEMPERATURES:
        tokens = drawn(logits, temperature, torch.arange(400), top_k=2)
        hot, cold = temperature >= 1e30, temperature <= 1e-4
        assert set(tokens) == ({1} if cold else {1, 3})
        assert 150 < tokens.count(3) < 250 or not hot
        tokens = drawn(logits, temperature, torch.arange(400), NEEDS[0])
        assert set(tokens) == ({1} if cold else {0, 1, 3, 4}) or temperature == 1.0


def without_warm_up(**changes: Any) -> EngineConfig:
    base: dict[str, Any] = {
        "page_size": 16,
        "num_blocks": 64,
        "max_batch_tokens": 256,
        "compile": False,
    }
    return EngineConfig(**{**base, **changes})


def with_fixed_logits(model: Any, row: Tensor) -> Any:
    """Returns a step function in which every row has the same logits."""
    return compose(sample=lambda logits, inputs: _sample(row.expand(len(logits), -1), inputs))


def _sample(logits: Tensor, inputs: Any) -> Tensor:
    from cbfn import step

    return step.sample(logits, inputs)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_case_28_any_temperature_through_an_engine(llama: Any, filters: dict[str, Any]) -> None:
    row = torch.linspace(-4.0, 4.0, 128)[torch.randperm(128, generator=torch.Generator())]
    row[::9] = -math.inf
    with Engine(llama, config=without_warm_up()) as engine:
        engine.runner.close()
        step = with_fixed_logits(llama, row)
        engine.runner = Runner(llama, without_warm_up(), step=step)
        names = {}
        for temperature in TEMPERATURES:
            params = SamplingParams(
                max_tokens=20, temperature=temperature, seed=3, ignore_eos=True, **filters
            )
            names[engine.add_request([1, 2, 3], params)] = temperature
        for output in engine.stream():
            if output.status.ended:
                assert output.finish_reason == "length"
                temperature = names.pop(output.request_id)
                assert set(output.token_ids) <= allowed(row.tolist(), temperature, **filters)
        assert not names


@pytest.mark.compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_sampling_takes_any_temperature_and_finds_what_is_no_number(
    dtype: torch.dtype,
) -> None:
    """As in a step that the caller compiles, and in ours."""
    whole = torch.compile(sample, fullgraph=True)
    parts = {
        "likeliest": torch.compile(likeliest, fullgraph=True),
        "draw": torch.compile(draw, fullgraph=True),
    }
    logits, expected = rows_with_and_without_numbers(1000)
    count = len(logits)
    for temperature in (0.0, 1e-45, 1e-30, 1.0, 3e38, math.inf):
        arguments = (
            logits.to(dtype),
            torch.full((count,), temperature),
            torch.full((count,), 2, dtype=torch.int32),
            torch.full((count,), 0.9),
            torch.zeros(count),
            torch.arange(count),
            torch.zeros(count, dtype=torch.int32),
            NEEDS[1],
        )
        wanted = sample(*arguments)
        for tokens in (whole(*arguments), sample(*arguments, **parts)):
            assert tokens.tolist() == wanted.tolist()
        check_tokens(wanted, expected, temperature > 0)


# Logits.


def rows_with_and_without_numbers(vocab_size: int) -> tuple[Tensor, list[str]]:
    """Returns rows of logits, and what each is: sound, bad, or bad where it draws."""
    torch.manual_seed(0)
    kinds = ["sound", "nan", "sound", "none", "inf", "nan first", "nan last", "sound", "both"]
    logits = torch.randn(len(kinds), vocab_size)
    logits[0, 3] = -math.inf
    logits[1, vocab_size // 2] = math.nan
    logits[3] = -math.inf
    logits[4, 5] = math.inf
    logits[5, 0] = math.nan
    logits[6, -1] = math.nan
    logits[8, 2], logits[8, 7] = math.inf, math.nan
    names = {"sound": "sound", "inf": "bad where it draws"}
    return logits, [names.get(kind, "bad") for kind in kinds]


def check_tokens(tokens: Tensor, expected: list[str], draws: bool) -> None:
    for token, kind in zip(tokens.tolist(), expected, strict=True):
        bad = kind == "bad" or (kind == "bad where it draws" and draws)
        assert (token == INVALID_TOKEN) == bad, (token, kind)
        assert bad or token >= 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("parts", [1, 4])
def test_rows_without_a_number_have_no_token(
    dtype: torch.dtype, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cbfn.sample.parts_of", lambda *_: parts)
    logits, expected = rows_with_and_without_numbers(30)
    for temperature in (0.0, 1.0):
        for needs in (*NEEDS, SamplingNeeds())[: 2 if temperature else 3]:
            tokens = drawn_of(logits.to(dtype), temperature, needs)
            check_tokens(tokens, expected, temperature > 0)
            for row in range(len(logits)):  # whoever stands beside them
                alone = drawn_of(logits[row : row + 1].to(dtype), temperature, needs, row)
                assert alone[0] == tokens[row]


def drawn_of(logits: Tensor, temperature: float, needs: SamplingNeeds, first: int = 0) -> Tensor:
    rows = len(logits)
    return sample(
        logits,
        torch.full((rows,), temperature),
        torch.full((rows,), 5, dtype=torch.int32),
        torch.full((rows,), 0.9),
        torch.zeros(rows),
        torch.arange(first, first + rows),
        torch.zeros(rows, dtype=torch.int32),
        needs,
    )


def test_what_is_no_token_is_carried_as_one_that_exists() -> None:
    ids = torch.tensor([5, 0, 0], dtype=torch.int32)
    previous = torch.tensor([INVALID_TOKEN, 9])
    for dtype in (torch.int32, torch.int64):
        carried = carry_over(ids.to(dtype), previous, torch.tensor([-1, 0, 1], dtype=torch.int32))
        assert carried.tolist() == [5, 0, 9]
    assert previous.int()[0] == INVALID_TOKEN  # a sampler may give int32


# Engines.


def broken_model(family: str) -> tuple[Any, Any]:
    """Returns a model whose embedding of `BAD` is NaN, and one that is sound and equal else."""
    pair = []
    for _ in range(2):
        model = small_model(family, head_dim=16)
        head = torch.nn.Parameter(model.get_output_embeddings().weight.detach().clone())
        head.data[BAD] = 0.0  # no sound request comes to it by itself
        model.get_output_embeddings().weight = head  # NaN in a tied one would be in all logits
        model.config.tie_word_embeddings = False
        pair.append(model)
    with torch.no_grad():
        pair[0].get_input_embeddings().weight[BAD] = math.nan
    return pair[0], pair[1]


def prompt_of(length: int, salt: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * salt + length)
    return torch.randint(1, BAD, (length,), generator=generator).tolist()


PREFIX = prompt_of(36, 5)
GOOD = [prompt_of(7), [*PREFIX[:20], *prompt_of(9)], prompt_of(45), prompt_of(1)]
BROKEN = [
    [*PREFIX, BAD, *prompt_of(14)],  # in the middle of a tile and of a page
    [BAD],
    [*prompt_of(60), BAD],
]
LATER = [[*PREFIX, *prompt_of(11)], [*PREFIX[:32], 3]]


def params_of(number: int) -> SamplingParams:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0, "seed": number},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": number},
    ]
    return SamplingParams(max_tokens=9, ignore_eos=True, **kinds[number % 3])


def ended(engine: Engine, prompts: list[list[int]], first: int = 0) -> list[Any]:
    """Returns the last outputs of prompts that are run together."""
    names = [engine.add_request(p, params_of(i)) for i, p in enumerate(prompts, first)]
    outputs = {o.request_id: o for o in engine.stream() if o.status.ended}
    assert len(outputs) == len(names)
    return [outputs[name] for name in names]


def check_broken(output: Any, longest: int) -> None:
    """The request has failed before its first token, and the error names a position."""
    assert output.status is RequestStatus.FAILED
    assert output.finish_reason == "error"
    assert isinstance(output.error, FloatingPointError)
    assert "NaN" in str(output.error)
    assert "dtype" in str(output.error)
    position = int(str(output.error).split("position ")[1].split()[0])
    bad = list(output.prompt_token_ids).index(BAD)
    assert bad < position <= longest
    assert list(output.token_ids) == []


def check_engine(models: tuple[Any, Any], config: EngineConfig, times: int = 2) -> None:
    """Raises unless the broken prompts fail alone, before and after others of their kind."""
    broken, sound = models
    with Engine(sound, config=config) as engine:
        wanted = [o.token_ids[:] for o in (*ended(engine, GOOD), *ended(engine, LATER, 100))]
    with Engine(broken, config=config) as engine:
        for _ in range(times):
            mixed = [GOOD[0], BROKEN[0], GOOD[1], GOOD[2], BROKEN[1], GOOD[3], BROKEN[2]]
            numbers = [0, 10, 1, 2, 11, 3, 12]
            names = [
                engine.add_request(p, params_of(n)) for p, n in zip(mixed, numbers, strict=True)
            ]
            outputs = {o.request_id: o for o in engine.stream() if o.status.ended}
            for name, prompt in zip(names, mixed, strict=True):
                if BAD in prompt:
                    check_broken(outputs[name], len(prompt))
                    assert outputs[name].num_cached_tokens <= prompt.index(BAD)
            later = ended(engine, LATER, 100)
            good = [outputs[name] for name, n in zip(names, numbers, strict=True) if n < 10]
            assert [o.token_ids[:] for o in (*good, *later)] == wanted
        stats = engine.stats()
        assert stats.owned_blocks == 0
        assert stats.num_running == stats.num_waiting == 0


FULL_FAMILIES = ["llama", "qwen3_moe"]
HYBRIDS = ["gemma2", "gemma3", "gpt_oss"]  # softcap; many layers; sinks and experts


@pytest.mark.parametrize("family", [*FULL_FAMILIES, *HYBRIDS])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_case_29_the_prompt_with_nan_fails_alone(family: str, asynchronous: bool) -> None:
    models = broken_model(family)
    for tokens in (256, 24):
        config = without_warm_up(max_batch_tokens=tokens, use_async_batching=asynchronous)
        check_engine(models, config)


@pytest.mark.parametrize("offload", [0.0, 1e-3])
def test_case_29_where_memory_is_short(offload: float) -> None:
    config = without_warm_up(
        num_blocks=7, max_batch_tokens=24, safety_margin=0.0, cpu_offload_space=offload
    )
    check_engine(broken_model("llama"), config, times=4)


@pytest.mark.compiled
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_case_29_compiled(family: str) -> None:
    check_engine(broken_model(family), without_warm_up(compile=True, max_batch_tokens=64))


def test_case_29_in_half_precision() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        broken, sound = broken_model("llama")
        check_engine((broken.to(dtype), sound.to(dtype)), without_warm_up())


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_tokens_before_what_is_no_number_are_those_of_a_clean_run(family: str) -> None:
    """NaN comes up while tokens are generated: those sampled before are delivered."""
    broken, sound = broken_model(family)
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    salt, clean, at = next(
        (salt, tokens, at)
        for salt in range(20)
        for tokens in [greedy_alone(sound, prompt_of(9, salt), 40)]
        for at in range(2, 39)
        if tokens[at] not in (*prompt_of(9, salt), *tokens[:at])
    )
    bad = clean[at]
    with torch.no_grad():
        broken.get_input_embeddings().weight[bad] = math.nan
    for asynchronous in (False, True):
        config = without_warm_up(use_async_batching=asynchronous)
        with Engine(broken, config=config) as engine:
            prompts = [prompt_of(9, salt), prompt_of(12)]
            first, second = [engine.add_request(p, params) for p in prompts]
            outputs = {o.request_id: o for o in engine.stream() if o.status.ended}
            assert list(outputs[first].token_ids) == clean[: at + 1]
            assert outputs[first].status is RequestStatus.FAILED
            assert f"position {9 + at + 1} " in str(outputs[first].error)
            assert outputs[second].request_id == second


@pytest.mark.parametrize("tokens", [256, 24])
def test_case_29_behind_a_sliding_window(tokens: int) -> None:
    """Layers that all have windows forget NaN: the request goes on, unless a chunk of its prompt
    ends where it still sees it, and whoever shares a prefix with it hears nothing of it."""
    broken, sound = broken_model("mistral")
    forgets = [*PREFIX[:20], BAD, *prompt_of(60)]
    others = [[*PREFIX[:16], *prompt_of(8)], [*PREFIX[:20], 4, 5, 6], [*PREFIX[:19], BAD, 7]]
    config = without_warm_up(max_batch_tokens=tokens)
    with Engine(sound, config=config) as engine:
        wanted = [o.token_ids[:] for o in ended(engine, others[:2], 50)]
    with Engine(broken, config=replace(config, allow_block_sharing=False)) as engine:
        alone = ended(engine, [forgets])
    with Engine(broken, config=config) as engine:
        first, second = ended(engine, [forgets]), ended(engine, [forgets])
        if tokens == 24:
            check_broken(first[0], 24)
            check_broken(second[0], 24)
        else:
            assert first[0].finish_reason == "length"
            assert first[0].token_ids == second[0].token_ids == alone[0].token_ids
            assert second[0].num_cached_tokens == 80
        later = ended(engine, others, 50)
        assert later[0].num_cached_tokens == (16 if tokens == 256 else 0)
        assert [o.token_ids[:] for o in later[:2]] == wanted
        check_broken(later[2], len(others[2]))


@pytest.mark.parametrize("id_", [-1, -(2**31) + 1, 128])
def test_other_ids_of_a_callers_own_sampler_still_fail_the_step(llama: Any, id_: int) -> None:
    step = compose(sample=lambda logits, inputs: torch.full((len(logits),), id_))
    with Engine(llama, config=without_warm_up()) as engine:
        engine.runner.close()
        engine.runner = Runner(llama, without_warm_up(), step=step)
        for output in ended(engine, GOOD):
            assert isinstance(output.error, ValueError)
            assert "expected ids in" in str(output.error)


def test_a_step_of_the_callers_own_fails_rows_by_our_sampler(llama: Any) -> None:
    def planted(logits: Tensor, inputs: Any) -> Tensor:
        bad = inputs.sample_positions == 9
        return _sample(torch.where(bad[:, None], math.nan, logits), inputs)

    config = without_warm_up(allow_block_sharing=False)  # a new runner has a cache of its own
    with Engine(llama, config=config) as engine:
        wanted = [o.token_ids[:] for o in ended(engine, GOOD)]
        engine.runner.close()
        engine.runner = Runner(llama, config, step=compose(sample=planted))
        outputs = ended(engine, GOOD)
        for prompt, output, tokens in zip(GOOD, outputs, wanted, strict=True):
            passes = len(prompt) <= 9 < len(prompt) + 9
            assert output.finish_reason == ("error" if passes else "length")
            assert list(output.token_ids) == tokens[: 9 - len(prompt) if passes else None]


# Commits.

SPEC = CacheSpec((FULL,), 2, 16, 40, vocab_size=128)


def started(prompts: list[list[int]], **changes: Any) -> Any:
    state = scheduler.init(SPEC, EngineConfig(page_size=2, **changes))
    for number, prompt in enumerate(prompts):
        state = scheduler.submit(state, Request(f"r{number}", prompt))
    return scheduler.schedule(state)


def test_commit_fails_invalid_rows_and_shares_none_of_their_blocks() -> None:
    prompts = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    state, plan = started(prompts)
    result = StepResult(np.array([[3], [INVALID_TOKEN]]), invalid=np.array([False, True]))
    state, outputs = scheduler.commit(state, plan, result)
    good, bad = outputs
    assert list(good.token_ids) == [3]
    assert (bad.request_id, bad.status) == ("r1", RequestStatus.FAILED)
    assert "request 'r1': the logits for the token at position 5 hold NaN" in str(bad.error)
    scheduler.check_invariants(state)
    for number, prompt in enumerate(prompts):
        state = scheduler.submit(state, Request(f"again {number}", [*prompt, 1]))
    state, plan = scheduler.schedule(state)
    rows = dict(zip(plan.request_ids, plan.starts.tolist(), strict=True))
    assert (rows["again 0"], rows["again 1"]) == (4, 0)


def test_commit_fails_rows_that_do_not_sample_too() -> None:
    state, plan = started([[1] * 9, [2] * 3], max_batch_tokens=8)
    assert plan.samples.tolist().count(False) == 1
    row = plan.samples.tolist().index(False)
    tokens = np.where(plan.samples, 5, INVALID_TOKEN)[:, None]
    state, outputs = scheduler.commit(state, plan, StepResult(tokens, invalid=~plan.samples))
    failed = {o.request_id: o for o in outputs if o.status is RequestStatus.FAILED}
    assert list(failed) == [plan.request_ids[row]]
    end = plan.starts[row] + plan.num_tokens[row]
    assert f"position {end} " in str(failed[plan.request_ids[row]].error)
    assert len(outputs) == len(plan)


@pytest.mark.parametrize(
    "invalid", [np.zeros(2, bool), np.zeros(1, np.int64), np.zeros((1, 1), bool), [True], True]
)
def test_commit_refuses_another_shape_of_invalid(
    invalid: Any, without_annotation_checks: None
) -> None:
    state, plan = started([[1, 2]])
    with pytest.raises(ValueError, match=r"StepResult.invalid: expected None or an array of 1 "):
        scheduler.commit(state, plan, StepResult(np.array([[1]]), invalid=invalid))


def test_num_tokens_of_an_invalid_row_may_be_0() -> None:
    state, plan = started([[1, 2], [3, 4]])
    invalid = np.array([True, False])
    result = StepResult(np.array([[-5], [1]]), np.array([0, 1]), invalid=invalid)
    _, outputs = scheduler.commit(state, plan, result)
    assert {o.request_id: o.finish_reason for o in outputs} == {"r0": "error", "r1": None}


# Attention.


def planted(case: Case, positions: list[tuple[int, int]], value: float, which: int) -> Tensor:
    """Puts `value` into K (0), V (1) or both (2) of (row, position); returns which tokens see
    one of them."""
    page, per_block = case.spec.page_size, 2 * case.spec.num_layers(case.attention_type)
    sees = torch.zeros(len(case.query), dtype=torch.bool)
    for row, position in positions:
        begin, end = case.cu_seqlens[row : row + 2].tolist()
        block = int(case.table[row, position // page])
        line = (block * per_block + int(case.layer_page)) * page + position % page
        for offset in (0, page) if which == 2 else (which * page,):
            case.kv[line + offset, position % case.kv.shape[1], position % 3] = value
        for other in range(len(case.seq_lens)):  # pages may be shared
            begin, end = case.cu_seqlens[other : other + 2].tolist()
            if int(case.table[other, position // page]) != block:
                continue
            newest = int(case.seq_lens[other]) - end + torch.arange(begin, end)
            seen = newest >= position
            if case.window is not None:
                seen &= newest - case.window < position
            sees[begin:end] |= seen
    return sees


def check_planted(case: Case, found: Tensor, clean: Tensor, sees: Tensor, exact: bool) -> None:
    torch.testing.assert_close(found[~sees].double(), clean[~sees], rtol=0, atol=1e-5)
    if exact:  # an infinite key may weigh nothing
        assert (~found[sees].isfinite()).flatten(1).any(1).all()


WAYS = [(math.nan, 0), (math.nan, 1), (math.nan, 2), (math.inf, 0), (-math.inf, 1), (math.inf, 2)]


def positions_of(case: Case) -> list[tuple[int, int]]:
    """Returns a position in the middle of the queries of every other row, and one behind it."""
    rows = range(0, len(case.seq_lens), 2)
    counts = np.diff(case.cu_seqlens)
    middles = [(row, int(case.seq_lens[row] - 1 - counts[row] // 2)) for row in rows]
    return [*middles, (0, int(case.seq_lens[0] - 1))]


@pytest.mark.parametrize(("value", "which"), WAYS)
@pytest.mark.parametrize("model", ["full", "sliding", "hybrid"])
@pytest.mark.parametrize("by_hand", [False, True])
def test_tiles_keep_what_is_no_number_from_earlier_queries(
    value: float, which: int, model: str, by_hand: bool
) -> None:
    rows = [(0, 40), (3, 17), (30, 9), (70, 5), (0, 2)]
    case = make_case(4, rows, 4, model, 1, window=7, softcap=3.0 if by_hand else None)
    if by_hand:
        case.sinks = torch.zeros(4)
    clean = case.expected()
    sees = planted(case, positions_of(case), value, which)
    before = case.kv.clone()
    for least, tile in ((0, 32), (7, 32), (0, 3)):
        tiles, place = gather.tiles(
            case.spec, case.attention_type, case.table, case.cu_seqlens, case.seq_lens, least, tile
        )
        size = case.spec.page_size
        out = gather.attend(case.query, case.kv, case.layer_page, tiles, size, *case.how)
        check_planted(case, out[place], clean, sees, exact=True)
    assert torch.equal(case.kv.nan_to_num(7.0), before.nan_to_num(7.0))


@pytest.mark.parametrize(("value", "which"), WAYS)
@pytest.mark.parametrize("model", ["full", "sliding", "hybrid"])
def test_rows_of_one_token_keep_what_is_no_number_to_themselves(
    value: float, which: int, model: str
) -> None:
    rows = [(40, 1), (3, 1), (100, 1), (17, 1), (64, 1)]  # rows of fewer items than others
    case = make_case(5, rows, 4, model, 1, window=30)
    clean = case.expected()
    first = 11 if case.window else 1  # in the first of all items, with which others were padded
    sees = planted(case, [(0, 40), (0, first), (2, 90)], value, which)
    assert sees.tolist() == [True, False, True, False, False]
    items = split.items(
        case.spec, case.attention_type, case.table, case.seq_lens, case.cu_seqlens[:-1]
    )
    size = case.spec.page_size
    out = split.attend(case.query, case.kv, case.layer_page, items, size, *case.how)
    check_planted(case, out, clean, sees, exact=math.isnan(value))


def check_kernels(kernel: str) -> None:
    """Raises where NaN in a line of KV reaches a query that does not see it, in a kernel."""
    run: Any = run_prefill
    queries, tunings = [16, 2, 5, 33, 7], [{"tile": 16, "keys": 16}, {"tile": 64, "keys": 32}]
    if kernel == "decode":
        run, queries = run_decode, [1]
        tunings = [{"programs": 3, "unit": 16}, {"programs": 1, "unit": 128}]
    for number, (value, which) in enumerate(WAYS):
        for case in kernel_cases(queries)[number % 2 :: 2]:
            clean = case.expected()
            sees = planted(case, positions_of(case), value, which)
            assert not sees.all()
            for tuning in tunings:
                exact = math.isnan(value)
                check_planted(case, run(case, **tuning), clean, sees, exact)


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("kernel", ["decode", "prefill"])
def test_kernels_keep_what_is_no_number_from_other_queries(kernel: str) -> None:
    run_interpreted(f"from tests.test_not_finite import *; check_kernels({kernel!r})")
