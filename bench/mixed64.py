"""The workload `mixed64` on the CPU: 64 prompts of mixed length, 128 new tokens each, SmolLM2.

    python -m bench.mixed64                         # cbfn and its peers, one after the other
    python -m bench.mixed64 --rounds 3 --output bench/results/mixed64-cpu.json
    python -m bench.mixed64 --engine transformers -s page_size=32 -s num_blocks=800

Every engine gets the same token ids and as many threads as there are cores, ignores EOS, and runs
in a process of its own. Loading, compiling and a first run on other prompts stay out of the time.
A run with any other number of tokens is void. On a CPU only ratios of one run mean something.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.environment import describe_environment
from bench.workloads import NEW_TOKENS, mixed64

ENGINES = {
    "cbfn": "bench.mixed64",
    "transformers": "bench.peers.transformers_cb",
    "llama.cpp": "bench.peers.llama_cpp",
}


def run(prompts: list[list[int]], max_tokens: int, **settings: Any) -> dict[str, Any]:
    """Returns seconds, tokens per second, token count, settings and token ids of a run of cbfn.

    `settings` are fields of EngineConfig. Raises RuntimeError unless every prompt got exactly
    `max_tokens` tokens.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from cbfn import Engine, EngineConfig
    from cbfn.demo import smollm2

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    settings = {"compile": True, **settings}
    model = AutoModelForCausalLM.from_pretrained(smollm2(), dtype=torch.float32)
    with Engine(model, config=EngineConfig(**settings)) as engine:
        start = time.perf_counter()
        _finish(engine, [prompt[::-1] for prompt in prompts], min(4, max_tokens))
        warm_up = time.perf_counter() - start
        start = time.perf_counter()
        token_ids = _finish(engine, prompts, max_tokens)
        seconds = time.perf_counter() - start
    counts = [len(ids) for ids in token_ids]
    if counts != [max_tokens] * len(prompts):
        raise RuntimeError(f"void: {max_tokens} tokens for each prompt were due, got {counts}")
    return {
        "seconds": round(seconds, 2),
        "tok_s": round(sum(counts) / seconds, 2),
        "tokens": sum(counts),
        "warm_up_s": round(warm_up, 2),
        "settings": {"threads": torch.get_num_threads(), **settings},
        "token_ids": token_ids,
    }


def _finish(engine: Any, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    from cbfn import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    ended = {o.request_id: o for o in engine.stream() if o.status.ended}
    return [list(ended[request_id].token_ids) for request_id in ids]


def main(
    engine: Annotated[
        str | None, typer.Option(help=f"one of {', '.join(ENGINES)}; all of them without it")
    ] = None,
    setting: Annotated[
        list[str] | None, typer.Option("-s", "--set", help="name=value, see the engine's `run`")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="new tokens of each prompt")] = NEW_TOKENS,
    rounds: Annotated[int, typer.Option(help="turns of all engines")] = 1,
    output: Annotated[Path | None, typer.Option(help="write the result here too")] = None,
    answers: Annotated[bool, typer.Option(help="with the engine's token ids or texts")] = False,
) -> None:
    """Prints one JSON line for an engine, or for all of them with cbfn's ratios."""
    if engine is None:
        line = compare(max_tokens, rounds)
    else:
        line = {"workload": "mixed64", "model": "SmolLM2-135M", "engine": engine, "device": "cpu"}
        result = one(engine, max_tokens, setting or [])
        line |= describe_environment()
        line |= {k: v for k, v in result.items() if answers or k not in ("token_ids", "texts")}
    text = json.dumps(line)
    print(text)
    if output is not None:
        output.write_text(text + "\n")


def one(engine: str, max_tokens: int, settings: list[str]) -> dict[str, Any]:
    """Returns the figures of one engine with settings written as name=value."""
    from transformers import AutoTokenizer

    from cbfn.demo import smollm2

    prompts = mixed64(AutoTokenizer.from_pretrained(smollm2()))
    values = dict(text.split("=", 1) for text in settings)
    run_engine = import_module(ENGINES[engine]).run
    result: dict[str, Any] = run_engine(
        prompts, max_tokens, **{name: _value(text) for name, text in values.items()}
    )
    return result


def compare(max_tokens: int, rounds: int) -> dict[str, Any]:
    """Returns the tokens per second of all engines in turns, and what cbfn's are to the peers'."""
    command = [sys.executable, "-m", "bench.mixed64", "--max-tokens", str(max_tokens), "--answers"]
    lines: dict[str, list[dict[str, Any]]] = {engine: [] for engine in ENGINES}
    for _ in range(rounds):
        for engine, results in lines.items():
            done = subprocess.run(
                [*command, "--engine", engine], stdout=subprocess.PIPE, text=True, check=True
            )
            results.append(json.loads(done.stdout.splitlines()[-1]))
    rate = {name: [line["tok_s"] for line in each] for name, each in lines.items()}
    ratio = {
        name: [round(a / b, 2) for a, b in zip(rate["cbfn"], theirs, strict=True)]
        for name, theirs in rate.items()
        if name != "cbfn"
    }
    ours, theirs = lines["cbfn"][0]["token_ids"], lines["transformers"][0]["token_ids"]
    return {
        "workload": "mixed64",
        "model": "SmolLM2-135M",
        "device": "cpu",
        "tok_s": rate,
        "cbfn_ratio": ratio,
        "cbfn_ratio_median": {
            name: round(statistics.median(each), 2) for name, each in ratio.items()
        },
        "tokens": {name: [line["tokens"] for line in each] for name, each in lines.items()},
        "outputs_equal_to_transformers": sum(a == b for a, b in zip(ours, theirs, strict=True)),
        "warm_up_s": [line["warm_up_s"] for line in lines["cbfn"]],
        "settings": {name: each[0]["settings"] for name, each in lines.items()},
        **describe_environment(),
    }


def _value(text: str) -> Any:
    """Returns a setting's value: JSON where the text is JSON, else the text itself."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


if __name__ == "__main__":
    typer.run(main)
