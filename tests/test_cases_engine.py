"""The numbered cases that broke real engines, as far as the engine shows them.

The oracle is transformers' own `generate` for each prompt alone.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import cbfn
from cbfn import Engine, EngineConfig, RequestOutput, RequestRejected, RequestStatus, SamplingParams
from cbfn.scheduler import check_invariants
from tests.conftest import greedy_alone, small_model

PAGE = 4
WINDOW = 16  # of the small models
both_depths = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


@cache
def model_of(family: str) -> Any:
    return small_model(family)


@cache
def oracle(family: str, prompt: tuple[int, ...], new_tokens: int) -> list[int]:
    return greedy_alone(model_of(family), list(prompt), new_tokens)


def make_engine(family: str = "llama", asynchronous: bool = False, **more: Any) -> Engine:
    settings = {"page_size": PAGE, "num_blocks": 64, "max_batch_tokens": 16} | more
    config = EngineConfig(use_async_batching=asynchronous, **settings)
    return Engine(model_of(family), config=config)


def greedy(max_tokens: int | None, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, **more)


def words(length: int, first: int = 1) -> list[int]:
    """Returns a prompt; those with different `first` share no token with it at any place."""
    return [(first * 31 + 7 * n * n + 3 * n) % 128 for n in range(length)]


def add(engine: Engine, prompts: dict[str, list[int]], max_tokens: int | None) -> None:
    for name, prompt in prompts.items():
        engine.add_request(prompt, greedy(max_tokens), request_id=name)


def run(engine: Engine) -> dict[str, RequestOutput]:
    """Steps until all is over, with all rules of the scheduler checked after each step."""
    over: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        for output in engine.step():
            assert output.request_id not in over
            if output.status.ended:
                over[output.request_id] = output
        check_invariants(engine.state)
    stats = engine.stats()
    assert stats.free_blocks + stats.cached_blocks == stats.total_blocks
    return over


def assert_as_alone(
    over: dict[str, RequestOutput], prompts: dict[str, list[int]], new: int, family: str = "llama"
) -> None:
    for name, prompt in prompts.items():
        assert over[name].error is None
        assert over[name].token_ids == oracle(family, tuple(prompt), new), name


@both_depths
def test_case_01_empty_prompt_next_to_a_running_request(asynchronous: bool) -> None:
    prompts = {"neighbour": words(9), "later": words(5, 2)}
    with make_engine(asynchronous=asynchronous) as engine:
        engine.add_request(prompts["neighbour"], greedy(8), request_id="neighbour")
        for _ in range(3):
            engine.step()
        with pytest.raises(RequestRejected, match="at least one token id, got none"):
            engine.add_request([], greedy(8), request_id="empty")
        engine.add_request(prompts["later"], greedy(8), request_id="later")
        over = run(engine)
    assert over.keys() == prompts.keys()
    assert_as_alone(over, prompts, 8)


@both_depths
def test_case_02_prompt_larger_than_the_cache_among_small_ones(asynchronous: bool) -> None:
    prompts = [words(5), words(50, 2), words(30, 3), words(3, 4)]
    config = EngineConfig(page_size=PAGE, num_blocks=8, use_async_batching=asynchronous)
    outputs = cbfn.generate(model_of("llama"), prompts, greedy(6), config=config)
    assert outputs[1].status is RequestStatus.FAILED
    assert "a prompt of 50 tokens can never fit; the cache holds 32" in str(outputs[1].error)
    for index in (0, 2, 3):
        tokens = outputs[index].token_ids[:]
        assert tokens == oracle("llama", tuple(prompts[index]), 6)[: len(tokens)]
        assert outputs[index].finish_reason == "length"
    assert [len(output.token_ids) for output in outputs] == [6, 0, 3, 6]  # 30 + 3 fill the cache


@both_depths
def test_case_03_request_that_outgrows_the_cache_alone(asynchronous: bool) -> None:
    with make_engine(asynchronous=asynchronous, num_blocks=6) as engine:
        engine.add_request(words(7), greedy(None), request_id="large")
        over = run(engine)
        assert over["large"].finish_reason == "length"
        assert over["large"].token_ids == oracle("llama", tuple(words(7)), 18)
        prompts = {"next": words(9, 2)}
        add(engine, prompts, 5)
        assert_as_alone(run(engine), prompts, 5)


@both_depths
def test_case_04_same_id_twice_and_cancel_and_submit_at_once(asynchronous: bool) -> None:
    prompts = {"a": words(9, 2), "b": words(6, 3)}
    with make_engine(asynchronous=asynchronous) as engine:
        engine.add_request(words(9), greedy(30), request_id="a")
        engine.add_request(prompts["b"], greedy(8), request_id="b")
        with pytest.raises(RequestRejected, match="in use"):
            engine.add_request(words(4), greedy(4), request_id="a")
        for _ in range(3):
            engine.step()
        assert engine.cancel("a")
        older = None
        while older is None:  # until its output is out, the id is taken
            with pytest.raises(RequestRejected, match="in use"):
                engine.add_request(prompts["a"], greedy(8), request_id="a")
            older = next((o for o in engine.step() if o.request_id == "a"), None)
        assert older.status is RequestStatus.CANCELLED
        assert older.token_ids == oracle("llama", tuple(words(9)), 30)[: len(older.token_ids)]
        engine.add_request(prompts["a"], greedy(8), request_id="a")
        assert_as_alone(run(engine), prompts, 8)


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        ([1, -1], {}),
        ([1, 128], {}),
        ([1, 2**31], {}),
        ([1], {"temperature": -1}),
        ([1], {"temperature": float("nan")}),
        ([1], {"top_p": 7.5}),
        ([1], {"top_p": 0.0}),
        ([1], {"min_p": 2}),
        ([1], {"top_k": -2}),
        ([1], {"max_tokens": 0}),
        ([1], {"stop_token_ids": [-3]}),
    ],
)
def test_case_05_values_out_of_range_are_refused_before_anything_runs(
    prompt: list[int], params: dict[str, Any]
) -> None:
    prompts = {"neighbour": words(9)}
    with make_engine() as engine:
        add(engine, prompts, 6)
        engine.step()
        before = engine.state
        with pytest.raises(ValueError, match="expected"):
            engine.add_request(prompt, SamplingParams(**params))
        assert engine.state is before
        assert_as_alone(run(engine), prompts, 6)


@both_depths
@pytest.mark.parametrize("pages", [1, 3])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_case_06_prompt_of_exactly_some_pages_sent_again_and_many_times(
    family: str, pages: int, asynchronous: bool
) -> None:
    prompt = words(pages * PAGE)
    with make_engine(family, asynchronous, max_batch_tokens=64, num_blocks=200) as engine:
        for _ in range(2):
            add(engine, {"again": prompt}, 6)
            (output,) = run(engine).values()
            assert output.token_ids == oracle(family, tuple(prompt), 6)
            assert output.num_cached_tokens < len(prompt)
        many = {f"r{number}": prompt for number in range(32)}
        add(engine, many, 6)
        over = run(engine)
        assert_as_alone(over, many, 6, family)
        assert all(output.num_cached_tokens < len(prompt) for output in over.values())
    if family == "llama":
        assert {o.num_cached_tokens for o in over.values()} == {(pages - 1) * PAGE}


@both_depths
@pytest.mark.parametrize("policy", ["fifo", "prefill_first"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_cases_07_and_08_preempted_requests_resume_in_chunks_with_the_same_tokens(
    family: str, policy: str, asynchronous: bool
) -> None:
    prompts = {f"r{number}": words(6 + 5 * number, number) for number in range(4)}
    config = {"num_blocks": 18, "max_batch_tokens": 8, "safety_margin": 0.0, "scheduler": policy}
    lengths: dict[str, int] = dict.fromkeys(prompts, 0)
    with make_engine(family, asynchronous, **config) as engine:
        add(engine, prompts, 40)
        over: dict[str, RequestOutput] = {}
        while engine.has_unfinished():
            for output in engine.step():
                assert len(output.token_ids) == lengths[output.request_id] + 1
                lengths[output.request_id] += 1
                if output.status.ended:
                    over[output.request_id] = output
        assert engine.stats().num_preemptions > 0
        assert sum(o.num_preemptions for o in over.values()) == engine.stats().num_preemptions
    # a step takes 8 tokens at most: all that were preempted resume in several chunks
    assert any(o.num_preemptions and len(o.prompt_token_ids) > 8 for o in over.values())
    assert_as_alone(over, prompts, 40, family)


@both_depths
@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_case_09_one_to_three_tokens_for_all(max_tokens: int, asynchronous: bool) -> None:
    prompts = {f"r{number}": words(1 + number % 7, number) for number in range(40)}
    with make_engine(asynchronous=asynchronous, max_requests_per_batch=8) as engine:
        add(engine, prompts, max_tokens)
        over = run(engine)
        steps = engine.stats().num_steps
    assert_as_alone(over, prompts, max_tokens)
    # a request known to be over holds no row: 40 requests of at most 8 rows and 16 tokens
    assert steps <= 40 * max_tokens // 8 + 40 * 4 // 16 + 2 * max_tokens


@both_depths
def test_case_17_eviction_spares_what_the_same_admission_reuses(asynchronous: bool) -> None:
    """The cache is full of the finished first turn, and the second needs one more block."""
    first = words(15)
    with make_engine(asynchronous=asynchronous, num_blocks=6, safety_margin=0.0) as engine:
        add(engine, {"first": first}, 1)
        run(engine)
        add(engine, {"other": words(7, 2)}, 1)  # fills the rest of the cache
        run(engine)
        for length in (16, 18, 21):
            again = {"again": [*first, *words(length - 15, length)]}
            add(engine, again, 3)
            over = run(engine)
            assert_as_alone(over, again, 3)
            assert over["again"].num_cached_tokens == 12


@both_depths
@pytest.mark.parametrize("budget", [WINDOW // 2, WINDOW, 3 * WINDOW])
@pytest.mark.parametrize("family", ["mistral", "gemma3", "gpt_oss"])
def test_case_18_prompts_around_the_window(family: str, budget: int, asynchronous: bool) -> None:
    lengths = (WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 3)
    prompts = {f"r{length}": words(length, length) for length in lengths}
    with make_engine(family, asynchronous, max_batch_tokens=budget) as engine:
        for _ in range(2):  # the second time with what is cached
            add(engine, prompts, WINDOW + 4)
            assert_as_alone(run(engine), prompts, WINDOW + 4, family)


@both_depths
@pytest.mark.parametrize("policy", ["fifo", "prefill_first"])
def test_case_22_large_prompt_among_endless_small_ones_waits_for_a_bounded_time(
    policy: str, asynchronous: bool
) -> None:
    config = {"num_blocks": 20, "max_requests_per_batch": 4, "scheduler": policy}
    large, small = words(60), {}
    with make_engine(asynchronous=asynchronous, **config) as engine:
        number = 0

        def keep_busy() -> None:
            nonlocal number
            while engine.stats().num_waiting + engine.stats().num_running < 8:
                small[f"s{number}"] = words(3 + number % 9, number)
                add(engine, {f"s{number}": small[f"s{number}"]}, 4)
                number += 1

        keep_busy()
        engine.add_request(large, greedy(4), request_id="large")
        over: dict[str, RequestOutput] = {}
        while "large" not in over:
            keep_busy()
            over |= {output.request_id: output for output in engine.step() if output.status.ended}
            assert engine.stats().num_steps < 100
        over |= run(engine)
    assert_as_alone(over, small | {"large": large}, 4)


@both_depths
@pytest.mark.parametrize("where", ["launch", "collect"])
def test_case_20_where_the_device_is_lost_all_fail_and_nothing_more_is_taken(
    asynchronous: bool, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cause = RuntimeError("an illegal memory access was encountered")
    engine = make_engine(asynchronous=asynchronous, max_requests_per_batch=2)
    add(engine, {name: words(5, first) for first, name in enumerate("abcd")}, 10)
    for _ in range(4):
        engine.step()

    def fail(*_: Any, **__: Any) -> None:
        raise cause

    device = engine.runner._device
    monkeypatch.setattr(type(device.two_slots), where, fail)
    with pytest.raises(RuntimeError, match="illegal"):  # something else may be wrong
        list(engine.stream())
    monkeypatch.setattr(type(device), "failure", lambda _: cause)
    ended = {output.request_id: output for output in engine.stream() if output.status.ended}
    assert {name: output.error for name, output in ended.items()} == dict.fromkeys("abcd", cause)
    tokens = list(ended["a"].token_ids)
    assert tokens
    assert tokens == oracle("llama", tuple(words(5, 0)), 10)[: len(tokens)]
    with pytest.raises(RuntimeError, match="lost") as raised:
        engine.add_request(words(3), greedy(1))
    assert raised.value.__cause__ is cause
    monkeypatch.setattr(type(device), "close", fail)
    engine.close()
