"""The workloads of one GPU: rollouts and ragged requests, start-up, idle share, graph memory.

    python -m bench.gpu --model 8B --rollouts 2048 --ragged --output bench/results/8B.jsonl
    python -m bench.gpu --model 8B --rollouts 2048 --sync --plot out.png
    python -m bench.gpu --model 8B --profile
    python -m bench.gpu --model 8B --decode
    python -m bench.gpu --model 8B --pressure --prefix --plot out.png
    python -m bench.gpu --model 8B --rollouts 2048 --peer

One line of JSON for each workload. The time runs from the first `add_request` to the last finished
output; start-up is a line of its own. A token count that is not exact makes a run void.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
import typer

from bench.environment import describe_environment
from bench.kernels import copy_bandwidth, time_us
from bench.models import gemma3_4b, llama_8b, qwen3_06b
from bench.profiling import profile_steps
from cbfn import Engine, EngineConfig, SamplingParams
from cbfn.memory import device_bytes
from cbfn.trace import COMPUTE, MOVES, Trace

MODELS = {"8B": llama_8b, "0.6B": qwen3_06b, "hybrid-4B": gemma3_4b}
PAGE = 64
OFFLOAD_GIB = 16.0
TRACED_STEPS = 256
PROFILED_STEPS = 200
DECODED_BEFORE = 64
DECODED = {
    "160 x 950": [950] * 160,
    "100 x 1000": [1000] * 100,
    "32 x 400": [400] * 32,
    "32 x 1200": [1200] * 32,
    "32 x 4096": [4096] * 32,
}  # prompts of `--decode`, beside the ragged ones
PROFILED_PREFILLS = 4


def main(
    model: Annotated[str, typer.Option(help="8B, 0.6B or hybrid-4B")] = "8B",
    rollouts: Annotated[list[int] | None, typer.Option(help="new tokens of 32 prompts")] = None,
    ragged: Annotated[bool, typer.Option(help="256 requests of mixed lengths")] = False,
    sync: Annotated[bool, typer.Option("--sync", help="no step is planned ahead")] = False,
    pressure: Annotated[
        bool, typer.Option("--pressure", help="ragged with a quarter of the blocks")
    ] = False,
    prefix: Annotated[
        bool, typer.Option("--prefix", help="512 requests that share 2,048 tokens")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="picture of some traced steps")] = None,
    profile: Annotated[bool, typer.Option("--profile", help="kernels of a decode step")] = False,
    decode: Annotated[
        bool,
        typer.Option("--decode", help="decode steps of several batches, to compare kernels by"),
    ] = False,
    peer: Annotated[
        bool, typer.Option("--peer", help="rollouts and ragged by transformers instead")
    ] = False,
    runs: Annotated[int, typer.Option(help="times that each workload runs")] = 1,
    output: Annotated[Path | None, typer.Option(help="append the lines to this file")] = None,
) -> None:
    """Runs the workloads that are asked for, in one engine each."""
    loaded = MODELS[model]()
    torch.cuda.synchronize()
    loading = time.time() - psutil.Process().create_time()
    common = {"model": model, "async": not sync, **describe_environment()}

    def emit(workload: str, figures: dict[str, Any]) -> None:
        text = json.dumps({"workload": workload, **figures, **common})
        print(text, flush=True)
        if output is not None:
            with output.open("a") as file:
                file.write(text + "\n")

    todo = [(f"rollouts-{n}", *rollout_requests(n), 32) for n in rollouts or ()]
    if ragged:
        todo.append(("ragged", *ragged_requests(), 256))
    if peer:
        from bench.peers import transformers_cb

        for name, prompts, lengths, rows in todo:
            settings = {"max_requests_per_batch": rows, "use_async_batching": not sync}
            served = transformers_cb.serve(loaded, prompts, lengths, runs, **settings)
            emit(name, {"engine": "transformers", **settings, **median(served)})
        todo = []
    for number, (rows, group) in enumerate(itertools.groupby(todo, key=itemgetter(3))):
        config = EngineConfig(max_requests_per_batch=rows, use_async_batching=not sync)
        start = time.perf_counter()
        with Engine(loaded, config=config) as engine:
            if number == 0:
                emit("startup", started(engine, loading, time.perf_counter() - start))
            for name, prompts, lengths, _ in group:
                emit(name, median([run(engine, prompts, lengths) for _ in range(runs)]))
    if pressure:
        for name, figures in pressed(loaded, not sync, plot):
            emit(name, figures)
        plot = None  # drawn, or nothing moved
    if prefix:
        for sharing in (True, False):
            config = EngineConfig(allow_block_sharing=sharing, use_async_batching=not sync)
            with Engine(loaded, config=config) as engine:
                figures = run(engine, *prefix_requests())
                cached = engine.stats().num_cached_tokens
            emit("prefix", {**figures, "sharing": sharing, "cached_tokens": cached})
    if decode:
        cases = {"256 ragged": [len(prompt) for prompt in ragged_requests()[0]], **DECODED}
        config = EngineConfig(max_requests_per_batch=256, use_async_batching=not sync)
        with Engine(loaded, config=config) as engine:
            for name, lengths in cases.items():
                emit("decode", {"batch": name, **decode_steps(engine, lengths)})
    config = EngineConfig(max_requests_per_batch=32, use_async_batching=not sync)
    if profile or plot is not None:
        trace = Trace()
        with Engine(loaded, config=config, trace=trace) as engine:
            run(engine, *rollout_requests(TRACED_STEPS))
            share = trace.idle_share(skip=16)
            emit("idle", {"idle_share": round(share, 5), "steps": TRACED_STEPS - 16})
            if plot is not None:
                trace.plot(plot)
    if profile:
        limits = measured_limits()
        with Engine(loaded, config=config) as engine:  # a trace's events would be profiled too
            emit("profile-prefill", profile_prefill(engine, limits))
            emit("profile-decode", profile_decode(engine, limits))


def decode_steps(engine: Engine, lengths: list[int], steps: int = 50) -> dict[str, Any]:
    """Returns milliseconds until all of these prompts decode, and of each of `steps` steps then."""
    engine.weights_updated()
    # those that are computed first go on while the others wait for their turn
    budget = engine.runner.config.token_budget
    spare = 2 * (sum(lengths) + len(lengths) ** 2) // budget + 2 * DECODED_BEFORE
    params = SamplingParams(max_tokens=steps + spare, temperature=0, ignore_eos=True)
    rng = random.Random(0)
    start = time.perf_counter()
    for length in lengths:
        engine.add_request([rng.randint(0, 90) for _ in range(length)], params)
    while engine.stats().num_waiting or engine.state.prefilling:
        engine.step()
    for _ in range(8):
        engine.step()
    decoding = time.perf_counter()
    for _ in range(steps):
        engine.step()
    end = time.perf_counter()
    rows = engine.stats().num_running
    list(engine.stream())
    if rows != len(lengths):
        raise RuntimeError(f"void: {rows} rows of {len(lengths)} decode")
    return {
        "rows": rows,
        "until_decoding_ms": round((decoding - start) * 1e3),
        "ms_per_step": round((end - decoding) / steps * 1e3, 4),
    }


def pressed(loaded: Any, ahead: bool, plot: Path | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the figures of `ragged` with room, with blocks for a quarter of the demand, and with
    room but at most as many rows as were resident on average under pressure.

    The margin that new prefills leave free by default keeps most of the pressure away, so it runs
    as it is, and then without a margin, without and with offloading. There a trace notes how much
    of the time in which KV moves the device computes as well; `plot` is a picture of steps beside
    the longest move.
    """
    prompts, lengths = ragged_requests()
    needed = sum(-(-(len(p) + n) // PAGE) for p, n in zip(prompts, lengths, strict=True))
    tight: dict[str, Any] = {"num_blocks": needed // 4, "max_requests_per_batch": 256}
    cases: list[tuple[str, dict[str, Any], Trace | None]] = [
        ("roomy", {"max_requests_per_batch": 256}, None),
        ("pressure", {**tight, "cpu_offload_space": OFFLOAD_GIB}, None),
        ("pressure", {**tight, "cpu_offload_space": 0.0, "safety_margin": 0.0}, None),
        ("pressure", {**tight, "cpu_offload_space": OFFLOAD_GIB, "safety_margin": 0.0}, Trace()),
    ]
    rows = 1
    for name, settings, trace in cases:
        config = EngineConfig(page_size=PAGE, use_async_batching=ahead, **settings)
        with Engine(loaded, config=config, trace=trace) as engine:
            figures = run(engine, prompts, lengths)
            stats = engine.stats()
        rows = max(round(figures["mean_rows"]), 1)
        counts = {"preemptions": stats.num_preemptions, "offloads": stats.num_offloads}
        beside = moved_beside_compute(trace, plot) if trace and stats.num_offloads else {}
        yield name, {**figures, **settings, **counts, **beside}
    config = EngineConfig(max_requests_per_batch=rows, use_async_batching=ahead)
    with Engine(loaded, config=config) as engine:
        yield "roomy, fewer rows", {**run(engine, prompts, lengths), "max_requests_per_batch": rows}


def moved_beside_compute(trace: Trace, plot: Path | None) -> dict[str, float]:
    """Returns milliseconds of moves between device and host memory, and which share of them lies
    within steps that compute."""
    spans = trace.spans()
    steps = [span for span in spans if span.lane == COMPUTE]
    moves = [span for span in spans if span.lane == MOVES]
    beside = [
        sum(max(min(step.end, move.end) - max(step.start, move.start), 0.0) for step in steps)
        for move in moves
    ]
    total = sum(move.end - move.start for move in moves)
    if plot is not None:
        longest = max(moves, key=lambda move: move.end - move.start)
        number = sum(step.end < longest.start for step in steps)
        trace.plot(plot, first=max(number - 1, 0))
    return {"moves_ms": round(total * 1e3, 1), "beside_compute": round(sum(beside) / total, 4)}


def median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the run in the middle by time, the slower of two, and the times of all."""
    middle = sorted(runs, key=itemgetter("seconds"))[len(runs) // 2]
    return {**middle, "runs_s": [figures["seconds"] for figures in runs]}


def profile_prefill(engine: Engine, limits: dict[str, float]) -> dict[str, Any]:
    """Returns the kernels of steps that compute prompts of 1,024 tokens, and little else."""
    for number in range(64):
        prompt = [number + at for at in range(1024)]
        engine.add_request(prompt, SamplingParams(max_tokens=1, temperature=0))
    engine.step()
    figures = profile_steps(engine, PROFILED_PREFILLS)
    list(engine.stream())
    tokens = PROFILED_PREFILLS * engine.runner.config.token_budget
    # of the linear layers alone; the head sees a token or so of each prompt
    tflop = 2 * linear_parameters(engine) * tokens / 1e12
    rate = tflop / figures["wall_ms"] * 1e3
    share = {"TFLOP/s": round(rate, 1), "of_gemm_rate": round(rate / limits["gemm TFLOP/s"], 3)}
    return {**share, **limits, **figures}


def profile_decode(engine: Engine, limits: dict[str, float]) -> dict[str, Any]:
    """Returns the kernels of the decode steps of a rollout."""
    prompts, _ = rollout_requests(0)
    for prompt in prompts:
        engine.add_request(prompt, SamplingParams(max_tokens=1024, temperature=0, ignore_eos=True))
    for _ in range(DECODED_BEFORE):
        engine.step()
    figures = profile_steps(engine, PROFILED_STEPS)
    model = engine.runner.model
    size = model.dtype.itemsize
    context = 256 + DECODED_BEFORE + PROFILED_STEPS // 2
    token = 2 * len(model.layer_types) * model.num_kv_heads * model.head_dim * size
    head = model.num_logits * model.module.config.hidden_size
    read = size * (linear_parameters(engine) + head) + len(prompts) * context * token
    rate = read * PROFILED_STEPS / figures["wall_ms"] / 1e9
    share = {"TB/s": round(rate, 3), "of_copy_bandwidth": round(rate / limits["copy TB/s"], 3)}
    return {"context": context, "GB_a_step": round(read / 1e9, 2), **share, **limits, **figures}


def linear_parameters(engine: Engine) -> int:
    """Returns how many parameters the layers' matrices have."""
    named = engine.runner.model.module.named_parameters()
    return sum(p.numel() for name, p in named if p.dim() == 2 and ".layers." in name)


def measured_limits() -> dict[str, float]:
    """Returns what the card reaches in a copy (read and written) and in a large matrix product."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    us = time_us([lambda: a @ a])
    return {"copy TB/s": copy_bandwidth()["TB/s"], "gemm TFLOP/s": round(2 * 8192**3 / us / 1e6, 1)}


def rollout_requests(new_tokens: int) -> tuple[list[list[int]], list[int]]:
    """Returns 32 prompts of 256 random ids, and the same length for all."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, 16_000, (32, 256), generator=generator).tolist()
    return prompts, [new_tokens] * 32


def ragged_requests() -> tuple[list[list[int]], list[int]]:
    """Returns 256 prompts and output lengths, uniform in 100..1024."""
    random.seed(0)
    prompts = [
        [random.randint(0, 10_000) for _ in range(random.randint(100, 1024))] for _ in range(256)
    ]
    return prompts, [random.randint(100, 1024) for _ in range(256)]


def prefix_requests() -> tuple[list[list[int]], list[int]]:
    """Returns 512 prompts of 2,048 shared and 128 own tokens, and 64 new tokens for each."""
    rng = random.Random(0)
    shared = [rng.randint(0, 10_000) for _ in range(2048)]
    own = [[rng.randint(0, 10_000) for _ in range(128)] for _ in range(512)]
    return [shared + tokens for tokens in own], [64] * 512


def started(engine: Engine, loading: float, engine_seconds: float) -> dict[str, Any]:
    """Returns what the start took, the first token included, and memory: what was reckoned of the
    device's, what is in use, and what the cache, the buffers and the graphs have of that."""
    engine.add_request([1] * 256, SamplingParams(max_tokens=1, temperature=0))
    start = time.perf_counter()
    list(engine.stream())
    startup = dict(engine.runner.startup)
    longest = sorted(startup.items(), key=lambda item: -item[1])[:4]
    return {
        "seconds": round(loading + engine_seconds + time.perf_counter() - start, 2),
        "model_s": round(loading, 2),
        "engine_s": round(engine_seconds, 2),
        "longest_s": {name: round(seconds, 2) for name, seconds in longest},
        "predicted_bytes": engine.runner.breakdown.total,
        "limit_bytes": engine.runner.breakdown.limit,
        "peak_bytes": used_bytes(engine),
        **engine.runner.memory(),
    }


def used_bytes(engine: Engine) -> int:
    """Returns the bytes of the device that are in use, by the driver's count. While an engine runs
    that only grows: torch gives nothing back that a step once took."""
    return device_bytes(engine.runner.model.device)[0]


def run(engine: Engine, prompts: list[list[int]], lengths: list[int]) -> dict[str, Any]:
    """Returns the figures of one run, in which no KV of an earlier one is a hit.

    Raises RuntimeError for a count that is not exact.
    """
    engine.weights_updated()
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in lengths]
    before = engine.stats().num_steps
    start = time.perf_counter()
    names = [engine.add_request(p, param) for p, param in zip(prompts, params, strict=True)]
    ended, rows = {}, 0
    while engine.has_unfinished():
        for output in engine.step():
            if output.status.ended:
                ended[output.request_id] = output
        rows += engine.stats().num_running
    seconds = time.perf_counter() - start
    errors = {repr(output.error)[:300] for output in ended.values() if output.error}
    counts = [len(ended[name].token_ids) for name in names]
    if counts != lengths:
        raise RuntimeError(f"void: {sum(counts)} tokens of {sum(lengths)}; {errors}")
    steps = engine.stats().num_steps - before
    return {
        "seconds": round(seconds, 3),
        "tokens": sum(counts),
        "tok_s": round(sum(counts) / seconds, 1),
        "steps": steps,
        "ms_per_step": round(seconds / steps * 1e3, 4),
        "mean_rows": round(rows / steps, 1),
        "peak_bytes": used_bytes(engine),
    }


if __name__ == "__main__":
    typer.run(main)
