"""Decides what a configuration leaves open, from the device, the model and the memory."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import psutil
import torch

from cbfn.config import EngineConfig
from cbfn.model import Adopted
from cbfn.sizing import ceil_div
from cbfn.types import NUM_NULL_CHUNKS, CacheSpec

CPU_MAX_BATCH_TOKENS = 512
CPU_MAX_REQUESTS = 64
CPU_MEMORY_SHARE = 0.25  # of what is free: the machine is shared with everything else on it
GPU_MAX_BATCH_TOKENS = 8192
GPU_MAX_REQUESTS = 256
GPU_MEMORY_SHARE = 0.9


def decide(model: Adopted, config: EngineConfig) -> tuple[EngineConfig, CacheSpec, tuple[str, ...]]:
    """Returns the configuration without open fields, the shape of the cache, and notes on why.

    Raises ValueError for a setting that does not work here, or where memory is too small for one
    block.
    """
    gpu = model.device.type == "cuda"
    graphs, notes = _decide_graphs(model, config)
    config = replace(
        config,
        max_batch_tokens=config.max_batch_tokens
        or (GPU_MAX_BATCH_TOKENS if gpu else CPU_MAX_BATCH_TOKENS),
        max_requests_per_batch=config.max_requests_per_batch
        or (GPU_MAX_REQUESTS if gpu else CPU_MAX_REQUESTS),
        max_memory_percent=config.max_memory_percent
        or (GPU_MEMORY_SHARE if gpu else CPU_MEMORY_SHARE),
        use_async_batching=gpu if config.use_async_batching is None else config.use_async_batching,
        use_cuda_graph=graphs,
        compile=gpu if config.compile is None else config.compile,
        fuse_projections=gpu if config.fuse_projections is None else config.fuse_projections,
    )
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
    num_blocks = config.num_blocks or _blocks_that_fit(model, spec, config)
    chunks = max(num_blocks * len(spec.layer_types) // spec.chunk_pages, 1)
    spec = replace(
        spec, num_chunks=NUM_NULL_CHUNKS + chunks, num_host_chunks=_host_chunks(spec, config, gpu)
    )
    return replace(config, num_blocks=num_blocks), spec, notes


def _host_chunks(spec: CacheSpec, config: EngineConfig, pinned: bool) -> int:
    """Returns how many chunks `cpu_offload_space` holds. Raises ValueError where it is not free."""
    size, free = int(config.cpu_offload_space * 2**30), psutil.virtual_memory().available
    # torch rounds pinned memory up to a power of two
    if (1 << (size - 1).bit_length() if pinned and size else size) > free:
        raise ValueError(
            f"EngineConfig.cpu_offload_space: expected at most the {free / 2**30:.1f} GiB that are "
            f"free, got {config.cpu_offload_space}"
        )
    return size // (spec.chunk_pages * spec.page_bytes)


def _decide_graphs(model: Adopted, config: EngineConfig) -> tuple[bool, tuple[str, ...]]:
    """Returns whether the step is captured, and why not. Raises ValueError where it can not be."""
    reason = _why_no_kernels(model, config.page_size)
    if reason and model.device.type == "cuda":
        raise ValueError(f"EngineConfig: the attention kernels do not run here: {reason}")
    if reason and config.use_cuda_graph:
        raise ValueError(f"EngineConfig.use_cuda_graph: not to be had here: {reason}")
    if reason:
        return False, (f"no CUDA graphs: {reason}",)
    return config.use_cuda_graph is not False, ()


def _why_no_kernels(model: Adopted, page_size: int) -> str | None:
    if model.device.type != "cuda":
        return f"the model is on {model.device.type}"
    if find_spec("triton") is None:
        return "Triton is not installed"
    if page_size < 16 or page_size & (page_size - 1):
        return f"page_size is {page_size}, expected a power of two of 16 or more"
    if model.head_dim not in (16, 32, 64, 128, 256):
        return f"the head dimension is {model.head_dim}, expected a power of two in [16, 256]"
    return None


def _blocks_that_fit(model: Adopted, spec: CacheSpec, config: EngineConfig) -> int:
    """Returns the blocks that the memory share holds, but no more than full rows can ever use."""
    assert config.max_memory_percent is not None
    block_bytes = len(spec.layer_types) * spec.page_bytes
    room = int(_free_bytes(model, config) * config.max_memory_percent)
    fits = room // block_bytes - 2 * ceil_div(spec.chunk_pages, len(spec.layer_types))
    if fits < 1:
        raise ValueError(
            f"EngineConfig.max_memory_percent: {room / 2**20:.0f} MiB do not hold one block of "
            f"{block_bytes / 2**20:.1f} MiB; expected a larger share or a smaller page_size"
        )
    if spec.max_model_len is not None:
        useful = config.row_budget * ceil_div(spec.max_model_len, spec.page_size)
        fits = min(fits, useful)
    return fits


def _free_bytes(model: Adopted, config: EngineConfig) -> int:
    """Returns the bytes that are free for the cache, less what a step needs beside it."""
    if model.device.type != "cuda":
        return int(psutil.virtual_memory().available)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(model.device)
    # fp32 copies, and for top-k and top-p the sorted values, their places and their sums
    logits = 40 * config.row_budget * model.num_logits
    hidden = getattr(model.module.config, "intermediate_size", 16384)
    activations = 8 * config.token_budget * hidden * model.dtype.itemsize
    return int(free) - logits - activations
