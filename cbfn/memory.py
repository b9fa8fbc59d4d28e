"""Decides what a configuration leaves open, from the device, the model and the memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from importlib.util import find_spec
from itertools import chain
from typing import Any

import psutil
import torch

from cbfn.breakdown import MemoryBreakdown, readable
from cbfn.config import EngineConfig
from cbfn.devices import buckets_of
from cbfn.footprint import (
    NUM_SLOTS,
    StepShape,
    blocks_that_fit,
    breakdown,
    chunk_bytes,
    useful_blocks,
    with_blocks,
)
from cbfn.model import Adopted, decoder_layers, has_experts
from cbfn.sample import ALL_NEEDS
from cbfn.types import NUM_NULL_CHUNKS, CacheSpec

CPU_MAX_BATCH_TOKENS = 512
CPU_MAX_REQUESTS = 64
# of what is free: the machine is shared with everything else on it, and what attention gathers of
# the cache comes on top
CPU_MEMORY_SHARE = 0.25
GPU_MAX_BATCH_TOKENS = 8192
GPU_MAX_REQUESTS = 256
GPU_MOST_REQUESTS = 4096  # whose lengths fit into the registers of the program that cuts them
GPU_MEMORY_SHARE = 0.9
# what comes to a GPU after the sizes are settled, and is no tensor of ours: a stream's cuBLAS
# workspace (32 MiB on Hopper), kernels of libraries and of Triton, what segments are rounded up by
LIBRARY_BYTES = 2**28
OLDEST_CAPABILITY, TRITON_SUPPORTS = (7, 0), (8, 0)  # of a GPU: what torch compiles for; Triton
GRAPH_LAYER_BYTES = 2**15  # of a captured launch, for each layer: a dozen kernels, their arguments


def decide(model: Adopted, config: EngineConfig) -> tuple[EngineConfig, tuple[str, ...]]:
    """Returns the configuration with all fields but `num_blocks` decided, and notes on why.

    Raises ValueError for a setting that does not work here.
    """
    gpu = model.device.type == "cuda"
    rows = config.max_requests_per_batch or 0
    if gpu and rows > GPU_MOST_REQUESTS:
        raise ValueError(
            f"EngineConfig.max_requests_per_batch: expected at most {GPU_MOST_REQUESTS} on a GPU, "
            f"got {rows}"
        )
    graphs, notes = _decide_graphs(model, config)
    share = GPU_MEMORY_SHARE if gpu else CPU_MEMORY_SHARE
    if config.num_blocks is not None:  # fixed by hand: bound by what there is
        share = 1.0
    config = replace(
        config,
        max_batch_tokens=config.max_batch_tokens
        or (GPU_MAX_BATCH_TOKENS if gpu else CPU_MAX_BATCH_TOKENS),
        max_requests_per_batch=config.max_requests_per_batch
        or (GPU_MAX_REQUESTS if gpu else CPU_MAX_REQUESTS),
        max_memory_percent=config.max_memory_percent or share,
        use_async_batching=gpu if config.use_async_batching is None else config.use_async_batching,
        use_cuda_graph=graphs,
        compile=gpu if config.compile is None else config.compile,
        fuse_projections=gpu if config.fuse_projections is None else config.fuse_projections,
    )
    return config, notes


def size(model: Adopted, config: EngineConfig) -> tuple[EngineConfig, CacheSpec, MemoryBreakdown]:
    """Returns the configuration with `num_blocks`, the cache of that size, and what memory it all
    takes. `config` is one that `decide` returned; the model has the storage that it will keep.

    Raises ValueError where memory is too small for one block, or for `num_blocks` of them.
    """
    line_bytes = model.num_kv_heads * model.head_dim * model.dtype.itemsize
    spec = CacheSpec(
        layer_types=model.layer_types,
        page_size=config.page_size,
        page_bytes=2 * config.page_size * line_bytes,
        num_chunks=NUM_NULL_CHUNKS + 1,
        sliding_window=model.sliding_window,
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
    )
    spec = replace(spec, num_host_chunks=_host_chunks(spec, config, model.device.type == "cuda"))
    shape = step_shape(model, config)
    base = _base(model, config, spec, shape)
    fits = blocks_that_fit(spec, shape, base)
    wanted = config.num_blocks or 1
    if fits < wanted:
        would_do = _what_would_do(model, config, spec, wanted)
        raise ValueError(_too_small(config, fits, breakdown(spec, wanted, shape, base), would_do))
    useful = useful_blocks(spec, config.row_budget)
    num_blocks = config.num_blocks or (fits if useful is None else min(fits, useful))
    config = replace(config, num_blocks=num_blocks)
    return config, with_blocks(spec, num_blocks), breakdown(spec, num_blocks, shape, base)


def step_shape(model: Adopted, config: EngineConfig) -> StepShape:
    """Returns the shape of the largest step of a configuration that is decided."""
    whole: Any = model.module.config
    text = whole.get_text_config()
    embedding: Any = model.module.get_input_embeddings()  # type: ignore[operator]
    hidden = getattr(text, "hidden_size", embedding.weight.shape[1])
    inner = getattr(text, "moe_intermediate_size", None)
    inner = inner or getattr(text, "intermediate_size", None) or 4 * hidden
    norms = sum(
        p.shape == (hidden,) and name.endswith("weight")
        for name, p in model.module.named_parameters()
    )
    return StepShape(
        bucket=buckets_of(config)[0],
        hidden_size=hidden,
        intermediate_size=max(inner) if isinstance(inner, (list, tuple)) else inner,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        num_logits=model.num_logits,
        dtype_bytes=model.dtype.itemsize,
        num_norms=norms // len(model.layer_types),
        num_experts_per_tok=getattr(text, "num_experts_per_tok", None) or 0,
        compiled=bool(config.compile),
    )


def device_bytes(device: torch.device) -> tuple[int, int]:
    """Returns the bytes of a CUDA device that are in use, by any process, and all that it has."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free, total


def _base(
    model: Adopted, config: EngineConfig, spec: CacheSpec, shape: StepShape
) -> MemoryBreakdown:
    """Returns what depends neither on the blocks nor on the step."""
    weights, share = _weight_bytes(model), config.max_memory_percent
    assert share is not None
    if model.device.type != "cuda":
        # what is used already counts for nothing here; the weights are, and are shown all the same
        available = int(psutil.virtual_memory().available)
        step = breakdown(spec, 1, shape, MemoryBreakdown()).graph_pool
        limit = weights + min(step + int(available * share), available)
        return MemoryBreakdown(limit=limit, weights=weights)
    torch.cuda.empty_cache()
    used, total = device_bytes(model.device)
    num_graphs = len(buckets_of(config)) * NUM_SLOTS * len(ALL_NEEDS)
    return MemoryBreakdown(
        limit=int(total * share),
        weights=weights,
        other=max(used - weights, 0),
        graphs=num_graphs
        * len(model.layer_types)
        * GRAPH_LAYER_BYTES
        * bool(config.use_cuda_graph),
        libraries=LIBRARY_BYTES,
    )


def _weight_bytes(model: Adopted) -> int:
    """Returns the bytes of the storages of all parameters and buffers, each counted once."""
    tensors = chain(model.module.parameters(), model.module.buffers())
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _what_would_do(model: Adopted, config: EngineConfig, spec: CacheSpec, wanted: int) -> list[str]:
    """Returns settings each of which would make room for `wanted` blocks."""

    def fits(**changes: Any) -> bool:
        changed = replace(config, **changes)
        shape = step_shape(model, changed)
        return blocks_that_fit(spec, shape, _base(model, changed, spec, shape)) >= wanted

    budget, share = config.token_budget, config.max_memory_percent or 0.0
    fewer = (budget >> halvings for halvings in range(1, budget.bit_length() - 3))  # 8 and more
    larger = (percent / 100 for percent in range(5, 100, 5) if percent / 100 > share)
    choices: dict[str, Iterable[float]] = {"max_batch_tokens": fewer, "max_memory_percent": larger}
    found = {
        name: next(filter(lambda v: fits(**{name: v}), vs), None) for name, vs in choices.items()
    }
    return [f"{name}={value}" for name, value in found.items() if value is not None]


def _too_small(
    config: EngineConfig, fits: int, needed: MemoryBreakdown, would_do: list[str]
) -> str:
    """Returns what to say of memory that does not hold `needed`, and what would help."""
    enough = f" ({' or '.join(would_do)} would do)" if would_do else ""
    if config.num_blocks is None:
        problem, first = "max_memory_percent: expected room for one block or more", ""
    else:
        problem = f"num_blocks: expected at most {fits}, got {config.num_blocks}"
        first = "num_blocks, "
    return (
        f"EngineConfig.{problem}: {readable(needed.total - needed.limit)} are missing; lower "
        f"{first}max_batch_tokens ({config.max_batch_tokens}), max_requests_per_batch "
        f"({config.max_requests_per_batch}) or page_size ({config.page_size}), or raise "
        f"max_memory_percent ({config.max_memory_percent:g}){enough}. What it takes:\n{needed}"
    )


def _host_chunks(spec: CacheSpec, config: EngineConfig, pinned: bool) -> int:
    """Returns how many chunks `cpu_offload_space` holds. Raises ValueError where it is not free."""
    size, free = int(config.cpu_offload_space * 2**30), psutil.virtual_memory().available
    # torch rounds pinned memory up to a power of two
    taken = 1 << (size - 1).bit_length() if pinned and size else size
    if taken > free:
        rounded = f" (pinned memory for it takes {taken / 2**30:g})" if taken > size else ""
        raise ValueError(
            f"EngineConfig.cpu_offload_space: expected at most the {free / 2**30:.1f} GiB that are "
            f"free, got {config.cpu_offload_space}{rounded}; lower it, or free memory of the host"
        )
    return size // chunk_bytes(spec)


def _decide_graphs(model: Adopted, config: EngineConfig) -> tuple[bool, tuple[str, ...]]:
    """Returns whether the step is captured, and why not. Raises ValueError where it can not be."""
    reason = _why_no_kernels(model, config.page_size)
    if reason and model.device.type == "cuda":
        raise ValueError(
            f"EngineConfig: the attention kernels do not run here: {reason}. A CPU runs "
            'the model too: model.to("cpu", torch.float32)'
        )
    reason = reason or _why_not_captured(model)
    if reason and config.use_cuda_graph:
        raise ValueError(f"EngineConfig.use_cuda_graph: expected None or False: {reason}")
    if reason:
        return False, (f"no CUDA graphs: {reason}",)
    return config.use_cuda_graph is not False, _notes_on_gpu(model)


def _why_not_captured(model: Adopted) -> str | None:
    """Returns why steps wait for the device midway, as transformers' and torch's experts do where
    the host has to know how many tokens each of them got."""
    if not any(map(has_experts, decoder_layers(model) or [model.module])):
        return None
    kind = getattr(model.module.config, "_experts_implementation", None)
    if kind == "eager":
        return (
            'experts_implementation is "eager", expected "grouped_mm" or "batched_mm": '
            'model.set_experts_implementation("grouped_mm")'
        )
    if kind == "grouped_mm" and model.dtype != torch.bfloat16:
        return (
            f"experts of {model.dtype} are multiplied one by one; those of bfloat16 are not: "
            "model.to(torch.bfloat16)"
        )
    return None


def _notes_on_gpu(model: Adopted) -> tuple[str, ...]:
    if torch.version.hip is not None:
        return ("an AMD GPU: cbfn was never tried on one; compare some answers with a CPU's",)
    if model.device.type == "cuda" and (capability := _capability(model)) < TRITON_SUPPORTS:
        return (
            f"compute capability {_dotted(capability)}: Triton supports {_dotted(TRITON_SUPPORTS)} "
            "and more; if compiling fails, try model.to(torch.float16)",
        )
    return ()


def _capability(model: Adopted) -> tuple[int, int]:
    return torch.cuda.get_device_capability(model.device)


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _why_no_kernels(model: Adopted, page_size: int) -> str | None:
    if model.device.type != "cuda":
        return f"the model is on {model.device.type}"
    if torch.version.hip is None and (capability := _capability(model)) < OLDEST_CAPABILITY:
        return (
            f"the GPU has compute capability {_dotted(capability)}, and Triton needs "
            f"{_dotted(OLDEST_CAPABILITY)} or more: take a newer one"
        )
    if find_spec("triton") is None:
        return "Triton is not installed: pip install triton"
    if page_size < 16 or page_size & (page_size - 1):
        return f"EngineConfig.page_size is {page_size}, expected a power of two of 16 or more"
    if model.head_dim not in (16, 32, 64, 128, 256):
        return f"the head dimension is {model.head_dim}, expected a power of two in [16, 256]"
    return None
