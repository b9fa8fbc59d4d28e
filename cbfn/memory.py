"""Decides what a configuration leaves open, from the device, the model and the memory."""

from __future__ import annotations

from dataclasses import replace

import psutil
import torch

from cbfn.config import EngineConfig
from cbfn.model import Adopted
from cbfn.sizing import ceil_div
from cbfn.types import NUM_NULL_CHUNKS, CacheSpec

CPU_MAX_BATCH_TOKENS = 512
CPU_MAX_REQUESTS = 64
CPU_MEMORY_SHARE = 0.25  # of what is free: the machine is shared with everything else on it


def decide(model: Adopted, config: EngineConfig) -> tuple[EngineConfig, CacheSpec]:
    """Returns the configuration without open fields, and the shape of the cache.

    Raises ValueError for a setting that does not work here, or where memory is too small for one
    block.
    """
    _check_served(config)
    config = replace(
        config,
        max_batch_tokens=config.max_batch_tokens or CPU_MAX_BATCH_TOKENS,
        max_requests_per_batch=config.max_requests_per_batch or CPU_MAX_REQUESTS,
        max_memory_percent=config.max_memory_percent or CPU_MEMORY_SHARE,
        use_async_batching=bool(config.use_async_batching),
        use_cuda_graph=False,
        compile=bool(config.compile),
    )
    spec = CacheSpec(
        layer_types=model.layer_types,
        page_size=config.page_size,
        page_bytes=2 * config.page_size * model.num_kv_heads * model.head_dim * _bytes(model.dtype),
        num_chunks=NUM_NULL_CHUNKS + 1,
        sliding_window=model.sliding_window,
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
    )
    num_blocks = config.num_blocks or _blocks_that_fit(spec, config)
    chunks = max(num_blocks * len(spec.layer_types) // spec.chunk_pages, 1)
    return replace(config, num_blocks=num_blocks), _with_chunks(spec, chunks)


def _check_served(config: EngineConfig) -> None:
    if config.cpu_offload_space:
        raise ValueError(
            "EngineConfig.cpu_offload_space: not served yet, expected 0, "
            f"got {config.cpu_offload_space}"
        )
    if config.use_cuda_graph:
        raise ValueError("EngineConfig.use_cuda_graph: not served yet, expected None or False")


def _blocks_that_fit(spec: CacheSpec, config: EngineConfig) -> int:
    """Returns the blocks that the memory share holds, but no more than full rows can ever use."""
    assert config.max_memory_percent is not None
    block_bytes = len(spec.layer_types) * spec.page_bytes
    room = int(psutil.virtual_memory().available * config.max_memory_percent)
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


def _with_chunks(spec: CacheSpec, chunks: int) -> CacheSpec:
    return CacheSpec(
        layer_types=spec.layer_types,
        page_size=spec.page_size,
        page_bytes=spec.page_bytes,
        num_chunks=NUM_NULL_CHUNKS + chunks,
        sliding_window=spec.sliding_window,
        vocab_size=spec.vocab_size,
        max_model_len=spec.max_model_len,
    )


def _bytes(dtype: torch.dtype) -> int:
    return torch.empty((), dtype=dtype).element_size()
