"""First checks on a GPU: parity of small models, then the step of a large one.

python -m bench.gpu_check [small] [large]
"""

from __future__ import annotations

import faulthandler
import json
import sys
import time
from typing import Any

import torch

import cbfn
from cbfn import EngineConfig, SamplingParams
from tests.conftest import small_model


def small() -> None:
    """Greedy outputs on the GPU equal those on the CPU for small models."""
    torch.backends.cuda.matmul.allow_tf32 = False
    for family in ("llama", "gemma3"):
        generator = torch.Generator().manual_seed(1)
        lengths = (1, 3, 15, 16, 17, 35, 40, 64, 100)
        prompts = [torch.randint(0, 128, (n,), generator=generator).tolist() for n in lengths]
        params = SamplingParams(max_tokens=40, temperature=0)
        model = small_model(family, head_dim=16)
        expected = [list(o.token_ids) for o in cbfn.generate(model, prompts, params)]
        model = model.cuda()
        for compile, graphs, sync in ((True, True, True),):
            start = time.time()
            config = EngineConfig(
                page_size=16,
                max_batch_tokens=128,
                max_requests_per_batch=6,
                num_blocks=64,
                compile=compile,
                use_cuda_graph=graphs,
                use_async_batching=sync,
            )
            try:
                outputs = cbfn.generate(model, prompts, params, config=config)
                same = [list(o.token_ids) for o in outputs] == expected
                errors = {repr(o.error)[:300] for o in outputs if o.error}
            except Exception as error:
                same, errors = False, {repr(error)[:1500]}
            seconds = round(time.time() - start, 1)
            print(family, compile, graphs, sync, "same" if same else "DIFFERENT", errors, seconds)
        torch._dynamo.reset()


def large(num_layers: int = 32) -> None:
    """Start-up, memory and decode steps of an 8B model with random weights."""
    from bench.models import llama_8b

    faulthandler.dump_traceback_later(90, repeat=True)  # where a slow start spends its time
    start = time.time()
    model = llama_8b(num_layers)
    print("model", round(time.time() - start, 1), "s", flush=True)
    start = time.time()
    config = EngineConfig(max_requests_per_batch=32, max_batch_tokens=8192)
    engine = cbfn.Engine(model, config=config)
    torch.cuda.synchronize()
    print("engine", round(time.time() - start, 1), "s", engine.stats(), flush=True)
    print("graphs", len(engine.runner._device.graphs or ()), torch.cuda.memory_reserved() / 2**30)
    longest = sorted(engine.runner._device.startup, key=lambda item: -item[1])[:8]
    print(longest, sum(s for _, s in engine.runner._device.startup), flush=True)
    generator = torch.Generator().manual_seed(0)
    for new_tokens in (64, 512):
        prompts = torch.randint(0, 16000, (32, 256), generator=generator).tolist()
        params = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
        start = time.time()
        for prompt in prompts:
            engine.add_request(prompt, params)
        count = 0
        while engine.has_unfinished():
            for output in engine.step():
                if output.status.ended:
                    count += len(output.token_ids)
                    if output.error:
                        print(repr(output.error)[:500])
        seconds = time.time() - start
        line: dict[str, Any] = {"new": new_tokens, "s": round(seconds, 3), "tokens": count}
        line["ms_per_step"] = round(seconds / new_tokens * 1e3, 3)
        print(json.dumps(line), flush=True)
    engine.close()


if __name__ == "__main__":
    if "small" in sys.argv:
        small()
    if "large" in sys.argv:
        large()
