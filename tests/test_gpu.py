"""What only a GPU shows: captured, asynchronous steps give the tokens of eager ones on a CPU."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3TextConfig, LlamaConfig

import cbfn
from cbfn import Engine, EngineConfig, Runner, SamplingParams, demo, memory
from cbfn.attention import prefill_kernel
from cbfn.graphs import Graphs
from cbfn.sample import SamplingNeeds, draw, likeliest, sample
from cbfn.types import Plan, StepResult
from tests.conftest import greedy_alone, small_model
from tests.test_attention import Case, make_case
from tests.test_compiling import read_back
from tests.test_not_finite import (
    WAYS,
    broken_model,
    check_engine,
    check_tokens,
    planted,
    positions_of,
    rows_with_and_without_numbers,
)
from tests.test_smollm2 import LONG, QUESTIONS, TEXTS

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


CONFIGS: dict[str, Any] = {"llama": LlamaConfig, "gemma3": Gemma3TextConfig}


def medium_model(family: str) -> Any:
    """Returns a random model whose linear layers have the sizes that kernels of ours take."""
    shape = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 4096, "head_dim": 64}
    shape |= {"num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 6}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[family](**shape))


def wide_model(family: str) -> Any:
    """Returns a random model of one layer, as wide as models that are used."""
    shape = {"hidden_size": 4096, "intermediate_size": 8192, "vocab_size": 32_003}
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(CONFIGS[family](**shape, num_hidden_layers=1))


def with_kernels(function: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Returns a function's result, and the sources of the Triton kernels that inductor made."""
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        result, sources = run_and_get_code(function)
    kernels = [part for source in sources for part in source.split("async_compile.triton(")[1:]]
    return result, kernels


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


@pytest.mark.parametrize("max_batch_tokens", [64, 100, 256, 8192])
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
    for changes in ({}, {"compile": True}, {"cpu_offload_space": 1e-2}):
        with Engine(gpu, config=config(num_blocks=14, **changes)) as engine:
            assert answers(engine, prompts) == wanted
            stats = engine.stats()
            assert stats.num_preemptions
            assert bool(stats.num_offloads) == ("cpu_offload_space" in changes)


def served(engine: Engine, count: int) -> dict[str, list[int]]:
    """Returns the tokens of `count` requests that arrive over time; one in ten is cancelled."""
    chance = random.Random(0)
    ended: dict[str, list[int]] = {}
    running: list[str] = []

    def note(outputs: Any) -> None:
        for output in outputs:
            if output.status.ended:
                assert output.error is None, output.error
                ended[output.request_id] = list(output.token_ids)

    for number in range(count):
        prompt = prompt_of(chance.randint(1, 60), number)
        running.append(engine.add_request(prompt, params_of(number, chance.randint(1, 30))))
        if chance.random() < 0.1:
            engine.cancel(chance.choice(running[-20:]))
        for _ in range(chance.choice([0, 0, 1, 1, 2])):
            note(engine.step())
    note(engine.stream())
    assert len(ended) == count
    return ended


def check_async_equals_sync(model: Any, settings: EngineConfig, count: int) -> None:
    """Raises unless both give the same tokens; of what was cancelled, as far as both go."""
    results = []
    for asynchronous in (False, True):
        with Engine(model, config=replace(settings, use_async_batching=asynchronous)) as engine:
            results.append(served(engine, count))
            assert engine.stats().num_preemptions
    for name, tokens in results[0].items():
        others = results[1][name]
        common = min(len(tokens), len(others))
        assert tokens[:common] == others[:common], name
    same = sum(results[0][name] == results[1][name] for name in results[0])
    assert same > 0.85 * count


def test_async_equals_sync_with_cancels_preemptions_and_arrivals(models: Any):
    check_async_equals_sync(models[1], config(num_blocks=24, safety_margin=0.0), 300)


def test_async_equals_sync_with_offloading(models: Any):
    settings = config(num_blocks=24, safety_margin=0.0, cpu_offload_space=1e-2)
    check_async_equals_sync(models[1], settings, 300)


def test_async_equals_sync_compiled_over_2000_requests():
    model = small_model("llama", head_dim=16).cuda()
    check_async_equals_sync(model, config(num_blocks=24, safety_margin=0.0, compile=True), 2000)


def test_async_equals_sync_with_a_real_model():
    try:
        folder = demo.smollm2()
    except demo.ModelNotFound as missing:
        pytest.skip(str(missing))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer(text).input_ids for text in (*TEXTS, *QUESTIONS, *LONG)]
    params = SamplingParams(max_tokens=24, temperature=0)
    outputs = cbfn.generate(model, prompts, params, config=config(num_blocks=200))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.token_ids) == greedy_alone(model, prompt, 24)
    check_async_equals_sync(model, config(num_blocks=24, safety_margin=0.0, compile=True), 2000)


def test_replayed_plans_give_the_same_tokens_in_bf16(monkeypatch: pytest.MonkeyPatch):
    model = small_model("llama", head_dim=64).to(torch.bfloat16).cuda()
    settings = config(num_blocks=24, safety_margin=0.0)
    record: list[tuple[Plan, StepResult]] = []
    collect = Runner.collect

    def recorded(runner: Runner, ticket: Any) -> StepResult:
        result = collect(runner, ticket)
        record.append((ticket.plan, result))
        return result

    with Engine(model, config=settings) as engine:
        monkeypatch.setattr(Runner, "collect", recorded)
        served(engine, 300)
        monkeypatch.undo()
        assert engine.stats().num_preemptions
    runner = Runner(model, settings)
    for plan, result in record:
        again = runner.collect(runner.launch(plan))
        assert again.token_ids is not None
        assert result.token_ids is not None
        assert (again.token_ids == result.token_ids).all(), plan.step
    runner.close()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_bf16_tokens_are_the_likeliest_of_transformers(family: str):
    """Kernels of ours begin while those before them end: what they read has to be there."""
    model = medium_model(family).to(torch.bfloat16).cuda()
    settings = config(num_blocks=600, max_batch_tokens=512, compile=True, allow_block_sharing=False)
    prompts = [prompt_of(5 + number, number) for number in range(33)]
    with Engine(model, config=settings) as engine:
        params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
        first = tokens_of(engine, [engine.add_request(p, params) for p in prompts])
        again = tokens_of(engine, [engine.add_request(p, params) for p in prompts])
    assert first == again
    for prompt, tokens in zip(prompts, first, strict=True):
        ids = torch.tensor([prompt + tokens], device="cuda")
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
        taken = logits.gather(1, torch.tensor(tokens, device="cuda")[:, None])[:, 0]
        assert ((logits.amax(1) - taken) <= 0.05 * logits.std(1)).all()


def test_experts_and_sinks_run_uncaptured_in_fp32_and_captured_in_bf16():
    model = small_model("gpt_oss", head_dim=16)
    prompts = [prompt_of(5 + number, number) for number in range(9)]
    with Engine(model, config=config()) as engine:
        expected = answers(engine, prompts)
    model = model.cuda()
    with Engine(model, config=config()) as engine:
        assert engine.runner.config.use_cuda_graph is False
        assert answers(engine, prompts) == expected
    model = model.to(torch.bfloat16)
    results = []
    for captured in (True, False):
        settings = config(use_cuda_graph=captured, use_async_batching=captured)
        with Engine(model, config=settings) as engine:
            results.append(answers(engine, prompts))
    assert results[0] == results[1]


def test_two_engines_at_once_do_not_disturb_each_other():
    model = medium_model("llama").to(torch.bfloat16).cuda()
    settings = config(num_blocks=600, compile=True, allow_block_sharing=False)
    prompts = [prompt_of(5 + number, number) for number in range(33)]
    with Engine(model, config=settings) as one, Engine(model, config=settings) as two:
        expected = answers(one, prompts)
        with ThreadPoolExecutor(2) as pool:
            for _ in range(3):
                results = pool.map(lambda engine: answers(engine, prompts), (one, two))
                assert list(results) == [expected, expected]


@pytest.mark.parametrize("use_cuda_graph", [False, True])
def test_decode_steps_of_few_and_of_many_rows_are_compiled(use_cuda_graph: bool):
    model = medium_model("llama").cuda()
    settings = config(
        num_blocks=600, max_requests_per_batch=90, compile=True, use_cuda_graph=use_cuda_graph
    )
    prompts = [prompt_of(5, number) for number in range(90)]
    with Engine(model, config=settings) as engine, Engine(model, config=config()) as expected:
        for count in (1, 2, 40, 64, 65, 90):
            assert answers(engine, prompts[:count]) == answers(expected, prompts[:count])


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_kernels_wait_for_those_before_them_and_for_their_own_threads(family: str, wide: bool):
    # rows of a wide model take several passes
    model = wide_model(family) if wide else medium_model(family)
    model = model.to(torch.bfloat16).cuda()
    settings = config(num_blocks=64, compile=True, use_cuda_graph=False)
    engine, kernels = with_kernels(lambda: Engine(model, config=settings))
    engine.close()
    dependent = [kernel for kernel in kernels if "'launch_pdl': True" in kernel]
    assert len(dependent) > 5
    assert all("gdc_wait" in kernel for kernel in dependent)
    assert not [kernel for kernel in kernels if read_back(kernel)]


@pytest.mark.parametrize("rows", [33, 512])
@pytest.mark.parametrize("vocab_size", [1000, 1536, 32_003, 128_256])
def test_sampling_compiled_as_one_graph_reads_nothing_back(vocab_size: int, rows: int):
    """As in a step that the caller compiles."""
    logits = torch.randn(rows, vocab_size, dtype=torch.bfloat16, device="cuda")
    column = torch.arange(rows, device="cuda")
    arguments = (logits, column % 3 / 2, column * 0, column * 0 + 1.0, column * 0.0, column, column)
    drawn = partial(sample, *arguments, needs=SamplingNeeds(noise=True))
    tokens, kernels = with_kernels(torch.compile(drawn, fullgraph=True))
    assert kernels
    assert not [kernel for kernel in kernels if read_back(kernel)]
    assert (tokens == drawn()).float().mean() > 0.99


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


LOSS = """
import torch
from cbfn import Engine, SamplingParams
from cbfn.step import compose, sample
from cbfn.runner import Runner
from tests.test_gpu import config, prompt_of, small_model

def bad(logits, inputs):
    tokens = sample(logits, inputs)
    reaches = (inputs.sample_positions > 40).long() * 2**30  # beyond the logits, later on
    return tokens + logits.float()[0].gather(0, reaches).long() * 0

model = small_model("llama", head_dim=16).cuda()
with Engine(model, config=config()) as engine:
    engine.runner.close()
    engine.runner = Runner(model, config(), step=compose(sample=bad))
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    names = [engine.add_request(prompt_of(9, salt), params) for salt in range(40)]
    ended = {o.request_id: o for o in engine.stream() if o.status.ended}
    assert set(ended) == set(names)
    assert all("CUDA" in str(o.error) for o in ended.values()), ended
    try:
        engine.add_request([1])
    except RuntimeError as error:
        assert "lost" in str(error)
        print("as it should")
"""


def test_case_20_where_the_device_is_lost_all_fail_and_nothing_more_is_taken():
    done = subprocess.run(
        [sys.executable, "-c", LOSS], capture_output=True, text=True, timeout=100, check=False
    )
    assert "as it should" in done.stdout, done.stderr[-3000:]


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


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_memory_stays_within_what_was_reckoned_and_comes_close(family: str, compiled: bool):
    model = small_model(family, head_dim=64).cuda()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    settings = config(max_batch_tokens=4096, num_blocks=4096, compile=compiled)
    with Engine(model, config=settings) as engine:
        answers(engine, [prompt_of(9, salt) for salt in range(33)])
        used, _ = memory.device_bytes(model.device)
        stats = engine.stats()
    peak = torch.cuda.max_memory_reserved() - before
    # inductor times reductions of so few elements, and before each run empties the L2 cache by a
    # tensor of its size, on two streams; a third is for what that leaves in pieces
    timing = 3 * torch.cuda.get_device_properties(0).L2_cache_size if compiled else 0
    reckoned, allocated = stats.memory, stats.allocated
    assert reckoned is not None
    assert reckoned.kv_cache == allocated["kv_bytes"]
    assert 2 * reckoned.io_buffers == allocated["io_bytes"]
    # segments of 2 and of 20 MiB, some of them with little in them, and a workspace of cuBLAS
    rounding = 64 * 2**20
    assert abs(allocated["graph_bytes"] - reckoned.graph_pool) <= rounding
    ours = reckoned.kv_cache + reckoned.graph_pool + reckoned.io_buffers
    slack = rounding + 32 * 2**20
    assert ours - slack <= peak <= ours + slack + timing
    assert reckoned.total - reckoned.libraries - reckoned.graphs - rounding <= used
    assert used <= reckoned.total


def test_share_of_the_device_is_used_and_not_more():
    model = small_model("llama", head_dim=64).cuda()
    model.config.max_position_embeddings = 2**16  # so long that rows can use it all
    torch.cuda.empty_cache()
    used, total = memory.device_bytes(model.device)
    settings = config(num_blocks=None, max_memory_percent=(used + 2**30) / total)
    with Engine(model, config=settings) as engine:
        answers(engine, [prompt_of(9, salt) for salt in range(33)])
        used, _ = memory.device_bytes(model.device)
        reckoned, spec = engine.stats().memory, engine.runner.cache_spec
    assert reckoned is not None
    assert used <= reckoned.total <= reckoned.limit
    block_table = 2 * 4 * 33  # of both slots: one more column
    assert reckoned.limit - reckoned.total < 2 * spec.page_bytes + block_table


def test_second_engine_has_the_memory_of_the_first():
    model = small_model("llama", head_dim=16).cuda()
    _, total = memory.device_bytes(model.device)
    page_size = 1024
    block_bytes = 2 * 2 * page_size * 2 * 16 * 4  # layers, K and V, tokens, heads, dimension, fp32
    most = int(0.6 * total) // block_bytes  # two of these are more than there is
    for _ in range(2):
        with Engine(model, config=config(num_blocks=most, page_size=page_size)) as engine:
            assert engine.runner.kv.nbytes > 0.59 * total
    used, _ = memory.device_bytes(model.device)
    assert used < 0.3 * total


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


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma2"])
@pytest.mark.parametrize("compiled", [False, True])
def test_case_29_the_prompt_with_nan_fails_alone(family: str, compiled: bool, asynchronous: bool):
    broken, sound = (model.cuda() for model in broken_model(family))
    for tokens in (256, 24):
        settings = config(
            max_batch_tokens=tokens, compile=compiled, use_async_batching=asynchronous
        )
        check_engine((broken, sound), settings)


def test_case_29_experts_and_sinks_with_nan():
    for family in ("qwen3_moe", "gpt_oss"):
        broken, sound = (model.cuda() for model in broken_model(family))
        check_engine((broken, sound), config(max_batch_tokens=256))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_keep_what_is_no_number_from_other_queries(dtype: torch.dtype):
    """The tiles that are launched, and small ones; what few keys at a time give is as exact."""
    shape: dict[str, Any] = {"page_size": 64, "heads": (8, 2), "head_dim": 64}
    rows = [(0, 100), (70, 65), (300, 33), (5, 2), (900, 40)]
    exact = 1e-5 if dtype == torch.float32 else 0.03
    for number, (value, which) in enumerate(WAYS):
        model = ("full", "sliding", "hybrid")[number % 3]
        case = make_case(number, rows, model=model, layer=1, window=50, **shape)
        case.query, case.kv = case.query.to(dtype), case.kv.to(dtype)
        clean = case.expected()
        sees = planted(case, positions_of(case), value, which)
        for tuning in ({}, {"tile": 16, "keys": 16}, {"tile": 64, "keys": 32}):
            found = run_prefill_on_gpu(case, **tuning).cpu()
            torch.testing.assert_close(found[~sees].double(), clean[~sees], rtol=0, atol=exact)
            if value != value:
                assert found[sees].isnan().flatten(1).any(1).all()


def run_prefill_on_gpu(case: Case, **tuning: int) -> torch.Tensor:
    """Returns what the kernel writes, NaN where it writes nothing."""
    out = torch.full_like(case.query, float("nan"), device="cuda")
    prefill_kernel.attend(
        case.query.cuda(),
        case.kv.cuda(),
        out,
        case.layer_page.cuda(),
        torch.from_numpy(case.table).cuda(),
        torch.from_numpy(case.seq_lens).cuda(),
        torch.from_numpy(case.cu_seqlens).cuda(),
        page_size=case.spec.page_size,
        block_pages=2 * case.spec.num_layers(case.attention_type),
        scale=case.scale,
        window=case.window,
        **tuning,
    )
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [30, 1000, 1024, 32_003, 128_256])
def test_rows_without_a_number_have_no_token(vocab_size: int, dtype: torch.dtype):
    """Searched as a whole and in parts, eager and compiled."""
    logits, expected = rows_with_and_without_numbers(vocab_size)
    logits = logits.to(dtype).cuda()
    rows = len(logits)
    compiled: dict[str, Any] = {
        "likeliest": torch.compile(likeliest, fullgraph=True),
        "draw": torch.compile(draw, fullgraph=True),
    }
    column = torch.arange(rows, device="cuda")
    for temperature in (0.0, 1e-45, 1.0, 3e38, float("inf")):
        heat = torch.full((rows,), temperature, device="cuda")
        top_k, positions = (column * 0 + 2).int(), column.int()
        arguments = (logits, heat, top_k, column * 0 + 0.9, column * 0.0, column, positions)
        for needs in (SamplingNeeds(True), SamplingNeeds(True, True)):
            tokens = sample(*arguments, needs)
            check_tokens(tokens, expected, temperature > 0)
            again = sample(*arguments, needs, **compiled)
            check_tokens(again, expected, temperature > 0)
            finite = logits.gather(1, again.clamp(min=0)[:, None])[:, 0] > float("-inf")
            assert (finite | (again < 0)).all()


def test_case_28_hot_and_cold_temperatures_draw_what_the_filters_left(models: Any):
    cpu, gpu = models
    settings = config(allow_block_sharing=False)
    heats = [1e-45, 1e-30, 1e-4, 1.0, 1e30, 3.5e38, 1e39, 1e308]
    params = [
        SamplingParams(max_tokens=1, temperature=heat, top_k=2, seed=seed, ignore_eos=True)
        for heat in heats
        for seed in range(8)
    ]
    prompt = prompt_of(20)
    with torch.no_grad():
        best = cpu(torch.tensor([prompt])).logits[0, -1].topk(2).indices.tolist()
    for compiled in (False, True):
        with Engine(gpu, config=replace(settings, compile=compiled)) as engine:
            tokens = tokens_of(engine, [engine.add_request(prompt, p) for p in params])
        assert {token for row in tokens for token in row} == set(best)
        assert {row[0] for row in tokens[:24]} == {best[0]}
