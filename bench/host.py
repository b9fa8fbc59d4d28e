"""The workload `host`: what the CPU does for one step, with no model.

    python -m bench.host [--rows 32 --rows 256 --rows 1024] [--steps 512]

Times `schedule + pack + commit` (`ms`: of steps that only decode; `mixed_ms`: of the others, which
admit and prefill), one batch in flight, over consecutive steps of rows that decode at a context of
8K tokens. All of it comes from real submissions: each row's prompt was submitted, prefilled and is
at its own place in its page; requests end all the time, and new ones are admitted, prefilled and
carry on. Every row crosses a page edge every 64 steps. Each case runs again with 10,000 more
requests waiting. Outputs are timed apart: `built_ms` is what they cost where nobody reads their
tokens, `outputs_ms` where everybody reads the list of all of them.
"""

from __future__ import annotations

import gc
import json
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from bench.environment import describe_environment
from cbfn import scheduler
from cbfn.config import EngineConfig, SamplingParams
from cbfn.plan import Bucket, pack
from cbfn.scheduler import BatchState
from cbfn.types import CacheSpec, Plan, Request, StepResult

CONTEXT = 8192
PAGE = 64
VOCAB = 128_256
PREFILL_TOKENS = 8192


def main(
    rows: Annotated[list[int], typer.Option(help="rows of the batch")] = [32, 256, 1024],  # noqa: B006
    steps: Annotated[int, typer.Option(help="measured steps, 256 or more")] = 512,
    output: Annotated[Path | None, typer.Option(help="append the lines to this file too")] = None,
) -> None:
    """Prints one JSON line for each case."""
    for count in rows:
        for waiting in (0, 10_000):
            line = json.dumps(run(count, waiting, steps))
            print(line, flush=True)
            if output is not None:
                with output.open("a") as file:
                    file.write(line + "\n")


def run(rows: int, waiting: int, steps: int) -> dict[str, object]:
    """Returns the figures of one case: milliseconds of a step and of reading what it gave."""
    rng = np.random.default_rng(0)
    spec = CacheSpec(
        layer_types=("full_attention",) * 32,
        page_size=PAGE,
        page_bytes=PAGE * 2 * 8 * 128 * 2,
        num_chunks=2 + (rows + rows // 2 + 8) * (CONTEXT // PAGE + 16),
        vocab_size=VOCAB,
        max_model_len=2 * CONTEXT,
    )
    budget = EngineConfig(
        page_size=PAGE, max_batch_tokens=rows + PREFILL_TOKENS, max_requests_per_batch=rows
    )
    loop = _Loop(scheduler.init(spec, budget), Bucket(rows + PREFILL_TOKENS, rows), rng)
    # one prompt is prefilled in a step; when the last one is, the ends of all lie ahead, spread out
    for _ in range(rows):
        loop.submit(CONTEXT - int(rng.integers(1, 256)), rows + int(rng.integers(64, 800)))
    while loop.state.prefilling or loop.state.waiting:
        loop.turn()
    for _ in range(waiting):
        loop.submit(CONTEXT - int(rng.integers(1, 256)), int(rng.integers(64, 800)))
    for _ in range(32):
        loop.turn()
    gc.collect()
    gc.freeze()
    loop.spent.clear()
    loop.decodes.clear()
    loop.building.clear()
    loop.reading.clear()
    before = loop.num_ended
    for _ in range(steps):
        loop.turn()
    spent, decode = np.array(loop.spent) * 1e3, np.array(loop.decodes)
    gc.unfreeze()
    return {
        "workload": "host",
        "rows": rows,
        "waiting": waiting,
        "ms": round(float(spent[decode].mean()), 4),
        "median_ms": round(float(np.median(spent[decode])), 4),
        "p99_ms": round(float(np.percentile(spent[decode], 99)), 4),
        "mixed_ms": round(float(spent[~decode].mean()), 4),
        "mixed_steps": int((~decode).sum()),
        "built_ms": round(float(np.mean(loop.building)) * 1e3, 4),
        "outputs_ms": round(float(np.mean(loop.reading)) * 1e3, 4),
        "submit_us": round(float(np.mean(loop.submitted)) * 1e6, 2),
        "steps": steps,
        "ended": loop.num_ended - before,
        "context": CONTEXT,
        **describe_environment(),
    }


class _Loop:
    """The asynchronous loop around a model that takes no time."""

    def __init__(self, state: BatchState, bucket: Bucket, rng: np.random.Generator) -> None:
        self.state = state
        self.bucket = bucket
        self.decode_bucket = Bucket(bucket.rows, bucket.rows)
        self.rng = rng
        self.previous: Plan | None = None
        self.spent: list[float] = []
        self.decodes: list[bool] = []
        self.building: list[float] = []
        self.reading: list[float] = []
        self.submitted: list[float] = []
        self.num_submitted = 0
        self.num_ended = 0

    def submit(self, prompt_tokens: int, new_tokens: int) -> None:
        prompt = self.rng.integers(0, VOCAB, prompt_tokens, dtype=np.int32)
        params = SamplingParams(max_tokens=new_tokens, temperature=0.0)
        start = time.perf_counter()
        request = Request(str(self.num_submitted), prompt, params, eos_token_ids=(VOCAB - 1,))
        self.state = scheduler.submit(self.state, request)
        self.submitted.append(time.perf_counter() - start)
        self.num_submitted += 1

    def turn(self) -> None:
        """One step; each request that ended makes room for a new one, outside the timing."""
        previous = self.previous
        result = None
        if previous is not None:
            tokens = self.rng.integers(0, VOCAB - 1, (len(previous), 1))
            result = StepResult(tokens)
        ended = 0
        start = time.perf_counter()
        state, plan = scheduler.schedule(self.state, start)
        if plan is not None:
            tokens_only = len(plan) == plan.num_tokens.sum()
            pack(plan, self.decode_bucket if tokens_only else self.bucket, previous)
        state, outputs = scheduler.commit(state, previous, result, start)
        self.spent.append(time.perf_counter() - start)
        plans = [p for p in (plan, previous) if p is not None]
        self.decodes.append(all(len(p) == p.num_tokens.sum() for p in plans))
        start = time.perf_counter()
        for output in outputs:
            ended += output.status.ended
        self.building.append(time.perf_counter() - start)
        start = time.perf_counter()
        read = 0
        for output in outputs:
            read += output.token_ids[-1]
        self.reading.append(time.perf_counter() - start)
        self.state, self.previous = state, plan
        self.num_ended += ended
        for _ in range(ended):
            self.submit(CONTEXT - int(self.rng.integers(1, 256)), int(self.rng.integers(64, 800)))


if __name__ == "__main__":
    typer.run(main)
