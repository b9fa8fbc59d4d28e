"""What only a GPU shows: captured, asynchronous steps give the tokens of eager ones on a CPU."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cbfn import Engine, EngineConfig, SamplingParams
from cbfn.graphs import Graphs
from tests.conftest import small_model

pytestmark = pytest.mark.gpu
NEW_TOKENS = 12


@pytest.fixture(autouse=True)
def without_tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture(scope="module", params=["llama", "gemma3", "mistral"])
def models(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """The same model on the CPU and on the GPU."""
    model = small_model(request.param, head_dim=16)
    twin = small_model(request.param, head_dim=16).cuda()
    return model, twin


def prompt_of(length: int, salt: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * salt + length)
    return torch.randint(1, 128, (length,), generator=generator).tolist()


def params_of(number: int, tokens: int = NEW_TOKENS) -> SamplingParams:
    """Greedy, drawn, and drawn with filters, in turns."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0, "seed": number},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": number},
    ]
    return SamplingParams(max_tokens=tokens, ignore_eos=True, **kinds[number % 3])


def tokens_of(engine: Engine, names: list[str]) -> list[list[int]]:
    ended = {o.request_id: o for o in engine.stream() if o.status.ended}
    assert not [o.error for o in ended.values() if o.error]
    return [list(ended[name].token_ids) for name in names]


def answers(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    return tokens_of(engine, [engine.add_request(p, params_of(i)) for i, p in enumerate(prompts)])


def config(**changes: Any) -> EngineConfig:
    base: dict[str, Any] = {
        "page_size": 16,
        "num_blocks": 96,
        "max_batch_tokens": 64,
        "max_requests_per_batch": 33,
        "compile": False,
    }
    return EngineConfig(**{**base, **changes})


@pytest.mark.parametrize("max_batch_tokens", [64, 100, 256])
def test_case_16_every_row_count_around_the_buckets_edges(models: Any, max_batch_tokens: int):
    cpu, gpu = models
    some = [1, 2, 3, 4, 5, 8, 9, 16, 17, 24, 25, 32, 33]
    changes = {"max_batch_tokens": max_batch_tokens, "num_blocks": 160}
    settings = config(**changes)
    with Engine(cpu, config=settings) as expected, Engine(gpu, config=settings) as engine:
        for rows in some:
            prompts = [prompt_of(1 + (7 * row + rows) % 50, rows) for row in range(rows)]
            assert answers(engine, prompts) == answers(expected, prompts), rows


def test_case_15_long_and_short_contexts_in_one_bucket_in_both_orders(models: Any):
    cpu, gpu = models
    short, long = [prompt_of(3), prompt_of(5)], [prompt_of(100), prompt_of(180)]
    with Engine(cpu, config=config()) as expected, Engine(gpu, config=config()) as engine:
        for prompts in (short, long, short, long[::-1]):
            assert answers(engine, prompts) == answers(expected, prompts)


def test_case_14_padding_behind_a_larger_batch(models: Any):
    cpu, gpu = models
    with Engine(cpu, config=config()) as expected, Engine(gpu, config=config()) as engine:
        for rows in (33, 3, 30, 1):
            prompts = [prompt_of(40 - row, rows) for row in range(rows)]
            assert answers(engine, prompts) == answers(expected, prompts)


def test_case_07_and_10_preemption_under_pressure_gives_the_same_tokens(models: Any):
    cpu, gpu = models
    prompts = [prompt_of(10 + row, 3) for row in range(20)]
    with Engine(cpu, config=config(num_blocks=96)) as expected:
        wanted = answers(expected, prompts)
    for compile in (False, True):
        with Engine(gpu, config=config(num_blocks=14, compile=compile)) as engine:
            assert answers(engine, prompts) == wanted
            assert engine.stats().num_preemptions


def test_async_equals_sync_with_cancels_and_arrivals(models: Any):
    _, gpu = models
    results = []
    for asynchronous in (False, True):
        chance = random.Random(0)
        with Engine(gpu, config=config(use_async_batching=asynchronous, num_blocks=24)) as engine:
            ended: dict[str, list[int]] = {}
            cancelled = set()
            for number in range(300):
                prompt = prompt_of(chance.randint(1, 60), number)
                name = engine.add_request(prompt, params_of(number, chance.randint(1, 30)))
                if chance.random() < 0.1:
                    cancelled.add(name)
                for output in engine.step():
                    if output.status.ended:
                        ended[output.request_id] = list(output.token_ids)
                if cancelled and chance.random() < 0.2:
                    engine.cancel(sorted(cancelled)[0])
            for output in engine.stream():
                if output.status.ended:
                    ended[output.request_id] = list(output.token_ids)
            results.append({n: t for n, t in ended.items() if n not in cancelled})
    assert results[0] == results[1]
    assert len(results[0]) > 250


def test_case_20_failing_step_fails_its_requests_and_the_engine_goes_on(
    models: Any, monkeypatch: pytest.MonkeyPatch
):
    cpu, gpu = models
    with Engine(cpu, config=config()) as expected, Engine(gpu, config=config()) as engine:
        replay = Graphs.replay

        def fail(*_: Any) -> None:
            raise torch.cuda.OutOfMemoryError("planted")

        monkeypatch.setattr(Graphs, "replay", fail)
        engine.add_request(prompt_of(4), params_of(0))
        (output,) = [o for o in engine.stream() if o.status.ended]
        assert isinstance(output.error, torch.cuda.OutOfMemoryError)
        monkeypatch.setattr(Graphs, "replay", replay)
        assert answers(engine, [prompt_of(9)]) == answers(expected, [prompt_of(9)])


def test_second_engine_finds_no_leftovers_of_the_first():
    model = small_model("llama", head_dim=16).cuda()
    results = []
    for _ in range(3):
        with Engine(model, config=config()) as engine:
            results.append(answers(engine, [prompt_of(9, salt) for salt in range(6)]))
        torch.full((2**26,), -1, dtype=torch.int32, device="cuda")  # what zeros must replace
    assert results[0] == results[1] == results[2]


def test_graphs_of_all_buckets_and_slots_take_the_memory_of_the_largest():
    model = small_model("llama", head_dim=64).cuda()
    with Engine(model, config=config(max_batch_tokens=4096)) as engine:
        sizes = engine.runner.memory()
        assert sizes["graph_bytes"] <= 1.2 * sizes["largest_graph_bytes"] + 2**21
        assert sizes["num_graphs"] > 60


def test_the_host_waits_for_the_device_in_collect_alone():
    model = small_model("llama", head_dim=16).cuda()
    prompts = [prompt_of(9, salt) for salt in range(6)]
    with Engine(model, config=config(allow_block_sharing=False)) as engine:
        expected = answers(engine, prompts)  # captures what the start has not
        names = [engine.add_request(prompt, params_of(i)) for i, prompt in enumerate(prompts)]
        torch.cuda.set_sync_debug_mode("error")
        try:
            assert tokens_of(engine, names) == expected
        finally:
            torch.cuda.set_sync_debug_mode("default")
