"""transformers on a workload: `generate_batch` (continuous batching), or padded `generate`.

python -m bench.mixed64 --engine transformers              # the best settings of two cores
python -m bench.mixed64 --engine transformers -s num_blocks=12 -s attention=eager
python -m bench.mixed64 --engine transformers -s padded=16 # padded batches of 16
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.utils import WorkloadHints

from cbfn.demo import smollm2

BEST: dict[str, Any] = {
    "page_size": 32,
    "num_blocks": 800,
    "max_batch_tokens": 256,
    "max_requests_per_batch": 16,
}
"""The fastest settings of those listed in README.md."""


def run(
    prompts: list[list[int]], max_tokens: int, *, model: Any = None, **settings: Any
) -> dict[str, Any]:
    """Seconds, tokens per second, token count, settings and token ids of one greedy run.

    `settings` are fields of ContinuousBatchingConfig (those in `BEST` unless given), and of our
    own: `attention` ("sdpa" or "eager"), `inference_mode`, `recompile_limit` of the compiler, and
    `padded` (a batch size: `generate` instead of `generate_batch`). `model` is SmolLM2 in fp32
    unless given; its attention implementation is as before afterwards.

    What a first call costs stays out of the time: the manager with its cache, its own warm-up, and
    compilation happen in a short run on other prompts. Raises RuntimeError unless every prompt
    got exactly `max_tokens` tokens.
    """
    settings = settings if "padded" in settings else {**BEST, **settings}
    options = dict(settings)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    if model is None:
        model = AutoModelForCausalLM.from_pretrained(smollm2())
    attention = model.config._attn_implementation
    model.set_attn_implementation(options.pop("attention", "sdpa"))
    # Reversed: no prefix in common with the real ones. All of them only where shapes matter.
    compiled = any("compile" in name for name in options)
    warm_up = [prompt[::-1] for prompt in (prompts if compiled else prompts[:8])]
    generate = _padded if "padded" in options else _continuous
    inference_mode = options.pop("inference_mode", False)
    limit = options.pop("recompile_limit", torch._dynamo.config.recompile_limit)
    try:
        with (
            torch.inference_mode(inference_mode),
            torch._dynamo.config.patch(recompile_limit=limit),
        ):
            generate(model, warm_up, min(4, max_tokens), options)
            start = time.perf_counter()
            token_ids = generate(model, prompts, max_tokens, options)
            seconds = time.perf_counter() - start
    finally:
        model.destroy_cached_continuous_batching_manager()
        model.set_attn_implementation(attention)
    counts = [len(ids) for ids in token_ids]
    if counts != [max_tokens] * len(prompts):
        raise RuntimeError(f"void: {max_tokens} tokens for each prompt were due, got {counts}")
    tokens = sum(counts)
    return {
        "seconds": round(seconds, 2),
        "tok_s": round(tokens / seconds, 2),
        "tokens": tokens,
        "settings": {"threads": torch.get_num_threads(), **settings},
        "token_ids": token_ids,
    }


def serve(
    model: Any, prompts: list[list[int]], lengths: list[int], runs: int = 1, **settings: Any
) -> list[dict[str, Any]]:
    """Seconds, tokens per second and token count of greedy runs with a length for each prompt.

    `settings` are fields of ContinuousBatchingConfig. transformers chooses the attention, the best
    that it finds installed; it is named in the result. The manager, its warm-up and a run of 8
    tokens stay out of the time. Raises RuntimeError unless every prompt got its length.
    """
    hints = WorkloadHints(
        max_prompt_length=max(map(len, prompts)),
        max_generated_length=max(lengths),
        num_requests=len(prompts),
    )
    figures = []
    with model.continuous_batching_context_manager(
        generation_config=_generation_config(max(lengths)),
        continuous_batching_config=ContinuousBatchingConfig(**settings),
        workload_hints=hints,
    ) as manager:
        _served(manager, [prompt[::-1] for prompt in prompts], [8] * len(prompts))
        for _ in range(runs):
            start = time.perf_counter()
            counts = _served(manager, prompts, lengths)
            seconds = time.perf_counter() - start
            if counts != lengths:
                raise RuntimeError(f"void: {sum(lengths)} tokens were due, got {sum(counts)}")
            rate = round(sum(counts) / seconds, 1)
            line = {"seconds": round(seconds, 3), "tokens": sum(counts), "tok_s": rate}
            figures.append({**line, "attention": model.config._attn_implementation})
    return figures


def _served(manager: Any, prompts: list[list[int]], lengths: list[int]) -> list[int]:
    """Returns how many tokens each prompt got."""
    names = [
        manager.add_request(prompt, max_new_tokens=length)
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    counts: dict[str, int] = {}
    while len(counts) < len(names):
        result = manager.get_result(timeout=1)
        if result is None and not manager.is_running():
            raise RuntimeError("void: the generation thread ended")
        if result is not None and result.is_finished():
            counts[result.request_id] = len(result.generated_tokens)
    return [counts[name] for name in names]


def _generation_config(max_tokens: int) -> GenerationConfig:
    """Greedy, and never ending early: no token has the id -1."""
    return GenerationConfig(
        max_new_tokens=max_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )


def _continuous(
    model: Any, prompts: list[list[int]], max_tokens: int, options: dict[str, Any]
) -> list[list[int]]:
    """The tokens of each prompt. The manager stays with the model for the next call."""
    outputs = model.generate_batch(
        prompts,
        generation_config=_generation_config(max_tokens),
        continuous_batching_config=ContinuousBatchingConfig(**options),
        persistent_manager=True,
        max_new_tokens=max_tokens,
    )
    return [list(output.generated_tokens) for output in outputs.values()]


def _padded(
    model: Any, prompts: list[list[int]], max_tokens: int, options: dict[str, Any]
) -> list[list[int]]:
    """The tokens of each prompt, from left-padded batches of prompts of similar lengths."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    tokens: dict[int, list[int]] = {}
    for first in range(0, len(order), options["padded"]):
        rows = order[first : first + options["padded"]]
        width = max(len(prompts[i]) for i in rows)
        padding = [width - len(prompts[i]) for i in rows]
        ids = torch.tensor([[0] * p + prompts[i] for p, i in zip(padding, rows, strict=True)])
        mask = torch.tensor([[0] * p + [1] * (width - p) for p in padding])
        output = model.generate(
            ids, attention_mask=mask, generation_config=_generation_config(max_tokens)
        )
        tokens.update(zip(rows, output[:, width:].tolist(), strict=True))
    return [tokens[i] for i in range(len(prompts))]
