"""Sizing at the start: what takes memory, what is left for the cache, and what is refused."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cbfn import Engine, EngineConfig, memory
from cbfn.breakdown import MemoryBreakdown, readable
from cbfn.devices import buckets_of
from cbfn.footprint import StepShape, activation_bytes, breakdown
from cbfn.fusing import fuse
from cbfn.model import Adopted, adopt
from cbfn.plan import Bucket
from cbfn.sample import ALL_NEEDS, sample
from cbfn.types import FULL, CacheSpec
from tests.conftest import FAMILIES, SMALL, small_model

GIB = 2**30
MIB = 2**20
H200 = 143 * 10**9
SETTINGS: dict[str, Any] = {"page_size": 16, "max_batch_tokens": 64, "max_requests_per_batch": 4}


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes that the host seems to have available."""

    class Memory:
        available = 2 * GIB

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    return Memory.available


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Adopted:
    """A model that seems to be on a GPU of which the caller and others use 3 GiB, and of which
    torch keeps 5 GiB more that nobody uses."""
    kept = [5 * GIB]
    monkeypatch.setattr(torch.cuda, "empty_cache", kept.clear)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (H200 - 3 * GIB - sum(kept), H200))
    return replace(adopt(small_model("llama")), device=torch.device("cuda"), max_model_len=None)


def gpu_config(**more: Any) -> EngineConfig:
    decided = {"use_cuda_graph": True, "compile": True, "max_memory_percent": 0.9}
    return EngineConfig(**{**SETTINGS, **decided, **more})


def weights_of(model: Any) -> int:
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())


def test_rows_on_a_gpu_are_limited(gpu: Adopted, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "_why_no_kernels", lambda *_: None)
    memory.decide(gpu, EngineConfig(max_requests_per_batch=4096))
    with pytest.raises(ValueError, match="max_requests_per_batch: expected at most 4096 on a GPU"):
        memory.decide(gpu, EngineConfig(max_requests_per_batch=4097))


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_steps_with_experts_are_captured_where_the_host_has_nothing_to_count(
    family: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(memory, "_why_no_kernels", lambda *_: None)
    model = adopt(small_model(family))
    config, notes = memory.decide(model, EngineConfig())
    assert config.use_cuda_graph is False
    assert "experts of torch.float32" in notes[0]
    with pytest.raises(ValueError, match=r"use_cuda_graph: expected None or False: experts of"):
        memory.decide(model, EngineConfig(use_cuda_graph=True))
    model.module.config._experts_implementation = "eager"
    with pytest.raises(ValueError, match='experts_implementation is "eager"'):
        memory.decide(model, EngineConfig(use_cuda_graph=True))
    for kind, dtype in (("grouped_mm", torch.bfloat16), ("batched_mm", torch.float32)):
        model.module.config._experts_implementation = kind
        config, notes = memory.decide(replace(model, dtype=dtype), EngineConfig())
        assert config.use_cuda_graph
        assert not notes


def test_convolutions_beside_the_decoder_are_no_experts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "_why_no_kernels", lambda *_: None)
    model = adopt(small_model("llama"))
    model.module.config._experts_implementation = "eager"
    model.module.model.patches = torch.nn.Conv2d(3, 4, 2)
    config, notes = memory.decide(model, EngineConfig(use_cuda_graph=True))
    assert config.use_cuda_graph
    assert not notes


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1])
def test_cache_takes_the_share_of_what_is_available_on_a_cpu(free: int, share: float):
    model = adopt(small_model("llama"))
    unlimited = replace(model, max_model_len=None)
    config, _ = memory.decide(unlimited, EngineConfig(**SETTINGS, max_memory_percent=share))
    config, spec, sizes = memory.size(unlimited, config)
    assert sizes.limit == weights_of(model.module) + sizes.graph_pool + int(free * share)
    # a block more, and the words of a block table that it takes
    block = 2 * spec.page_bytes
    assert sizes.limit - block - 128 <= sizes.total <= sizes.limit
    assert config.num_blocks == spec.usable_chunks


def test_default_share_of_a_cpu_is_a_quarter_of_what_is_available(free: int):
    model = adopt(small_model("llama"))
    config, _ = memory.decide(model, EngineConfig(**SETTINGS))
    assert config.max_memory_percent == 0.25
    _, _, sizes = memory.size(model, config)
    assert sizes.limit == sizes.weights + sizes.graph_pool + free // 4


def test_large_steps_leave_the_cache_its_share_or_what_there_is(free: int):
    model = replace(adopt(small_model("llama")), max_model_len=None)
    rows = EngineConfig(page_size=16, max_requests_per_batch=64)
    for num_logits, room in ((262_144, free // 4), (600_000, free - 64 * 600_000 * 52)):
        wide = replace(model, num_logits=num_logits)
        config, _ = memory.decide(wide, rows)
        _, _, sizes = memory.size(wide, config)
        assert 0.9 * room < sizes.kv_cache + sizes.io_buffers <= room
        assert sizes.total <= sizes.weights + free
    config, _ = memory.decide(replace(model, num_logits=700_000), rows)
    with pytest.raises(ValueError, match="max_requests_per_batch"):
        memory.size(replace(model, num_logits=700_000), config)


def test_blocks_that_no_request_can_use_are_not_allocated(free: int):
    model = adopt(small_model("llama"))
    config, _ = memory.decide(model, EngineConfig(**SETTINGS))
    config, _, sizes = memory.size(model, config)
    assert config.num_blocks == 4 * SMALL["max_position_embeddings"] // 16
    assert sizes.total < sizes.limit // 10


def test_a_gpu_is_filled_to_the_share_of_all_that_it_has(gpu: Adopted):
    _, _, sizes = memory.size(gpu, gpu_config())
    assert sizes.limit == int(0.9 * H200)
    assert sizes.weights + sizes.other == 3 * GIB  # all that was in use
    assert sizes.weights == weights_of(gpu.module)
    assert sizes.limit - 2**14 <= sizes.total <= sizes.limit
    buckets, needs, slots, layers = len(buckets_of(gpu_config())), 3, 2, 2
    assert sizes.graphs == buckets * needs * slots * layers * memory.GRAPH_LAYER_BYTES
    assert sizes.libraries >= 2**27  # a cuBLAS workspace, modules of kernels
    _, _, without = memory.size(gpu, gpu_config(use_cuda_graph=False))
    assert (without.graphs, without.libraries) == (0, sizes.libraries)


def test_weights_that_are_tied_count_once():
    model = small_model("gemma3")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    adopted = adopt(model)
    config, _ = memory.decide(adopted, EngineConfig(**SETTINGS, num_blocks=4))
    _, _, sizes = memory.size(adopted, config)
    assert sizes.weights == weights_of(model)


def test_weights_that_are_fused_count_once():
    adopted = adopt(small_model("llama"))
    before = weights_of(adopted.module)
    config, _ = memory.decide(adopted, EngineConfig(**SETTINGS, num_blocks=4))
    assert fuse(adopted.module)
    _, _, sizes = memory.size(adopted, config)
    assert sizes.weights == before


@pytest.mark.parametrize(
    ("family", "norms", "inner", "experts"),
    [("llama", 2, 64, 0), ("gemma3", 4, 64, 0), ("qwen3_moe", 2, 32, 2), ("gpt_oss", 2, 64, 4)],
)
def test_largest_step_has_the_model_s_shape(family: str, norms: int, inner: int, experts: int):
    adopted = adopt(small_model(family))
    config, _ = memory.decide(adopted, EngineConfig(**SETTINGS))
    assert memory.step_shape(adopted, config) == StepShape(
        bucket=Bucket(64, 4),
        hidden_size=32,
        intermediate_size=inner,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        num_logits=128,
        dtype_bytes=4,
        num_norms=norms,
        num_experts_per_tok=experts,
        compiled=False,
    )


def test_cpu_too_small_for_one_block_is_refused_with_the_numbers(free: int):
    with pytest.raises(ValueError, match=r"EngineConfig\.max_memory_percent") as info:
        Engine(small_model("llama"), config=EngineConfig(**SETTINGS, max_memory_percent=1e-6))
    text = str(info.value)
    for hint in (
        "max_batch_tokens (64)",
        "max_requests_per_batch (4)",
        "page_size (16)",
        "max_memory_percent (1e-06)",
    ):
        assert hint in text
    for name in MemoryBreakdown().parts:
        assert f"\n{name} " in text
    assert "missing" in text


def test_gpu_that_others_have_filled_is_refused(gpu: Adopted, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (20 * MIB, 80 * GIB))
    with pytest.raises(ValueError, match=r"(?s)one block.* are missing.*other +79\.98 GiB"):
        memory.size(gpu, gpu_config())


def test_blocks_by_hand_are_taken_or_refused(free: int):
    model = small_model("llama")
    with Engine(model, config=EngineConfig(**SETTINGS, num_blocks=7)) as engine:
        assert engine.runner.config.num_blocks == 7
        assert engine.runner.config.max_memory_percent == 1.0
    with pytest.raises(ValueError, match=r"num_blocks: expected at most \d+, got 4000000") as info:
        Engine(model, config=EngineConfig(**SETTINGS, num_blocks=4_000_000))
    at_most = int(str(info.value).split("expected at most ")[1].split(",")[0])
    adopted = adopt(model)
    decided, _ = memory.decide(adopted, EngineConfig(**SETTINGS, num_blocks=at_most))
    assert memory.size(adopted, decided)[0].num_blocks == at_most
    with pytest.raises(ValueError, match=rf"expected at most {at_most}, got {at_most + 1}:"):
        memory.size(adopted, replace(decided, num_blocks=at_most + 1))


def test_share_bounds_blocks_by_hand_too(free: int):
    settings = {**SETTINGS, "num_blocks": 1000, "max_memory_percent": 1e-3}
    with pytest.raises(ValueError, match=r"expected at most \d+, got 1000.*\(0\.001\)"):
        Engine(small_model("llama"), config=EngineConfig(**settings))


def test_stats_show_what_was_expected_and_what_was_allocated():
    model = small_model("gemma3")
    settings = {**SETTINGS, "num_blocks": 9, "cpu_offload_space": 1e-4}
    with Engine(model, config=EngineConfig(**settings)) as engine:
        stats = engine.stats()
        assert stats.memory is not None
        assert stats.memory.kv_cache == stats.allocated["kv_bytes"] == engine.runner.kv.nbytes
        host = stats.memory.host - stats.memory.io_buffers
        assert host == stats.allocated["host_kv_bytes"] > 0
        assert dict(stats.allocated) == engine.runner.memory()
        text = str(stats)
        assert f"\n  kv_cache {readable(stats.memory.kv_cache):>15}\n" in text
        assert "\nnum_running: 0\n" in text
        assert hash(stats) == hash(engine.stats())


# What a step computes


class LiveBytes(TorchDispatchMode):
    """Notes how many bytes the results of operations hold at the most."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._results: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in self.tensors((args, kwargs))}
        new = [t for t in self.tensors(out) if t.untyped_storage().data_ptr() not in given]
        self._results = [ref for ref in self._results if ref() is not None]
        # a view lives on where what it is a view of does not
        known = {t.untyped_storage().data_ptr() for t in self.live()}
        views = [t for t in self.tensors(out) if t.untyped_storage().data_ptr() in known]
        self._results += map(weakref.ref, (*new, *views))
        sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self.live()}
        self.peak = max(self.peak, sum(sizes.values()))
        return out

    def live(self) -> list[torch.Tensor]:
        return [tensor for ref in self._results if (tensor := ref()) is not None]

    @staticmethod
    def tensors(tree: Any) -> list[torch.Tensor]:
        return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [1, 256])
def test_no_step_holds_more_than_was_reckoned(family: str, rows: int):
    adopted = adopt(small_model(family))
    limits = {"max_batch_tokens": 512, "max_requests_per_batch": rows}
    config, _ = memory.decide(adopted, EngineConfig(page_size=16, num_blocks=64, **limits))
    _, _, sizes = memory.size(adopted, config)
    index = torch.arange(512)

    def attend(module: Any, query: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros_like(query.transpose(1, 2))

    with torch.no_grad(), LiveBytes() as live:
        logits = adopted.logits(attend, index % 128, index % 256, index[:rows])
        ones, some = torch.ones(rows), index[:rows].int()
        sample(logits, ones, some, ones * 0.9, ones * 0.1, index[:rows], some, ALL_NEEDS[0])
    assert 0.2 * sizes.graph_pool < live.peak <= sizes.graph_pool


def test_each_result_of_a_layer_counts_by_its_width():
    shape = StepShape(Bucket(8, 2), 32, 64, 4, 2, 8, 128, dtype_bytes=2, num_norms=3)
    token_bytes = 8 * 2
    parts = 4 * (2 + 256)  # of the decode kernel, in fp32: rows and programs

    def growth(**changes: Any) -> int:
        return activation_bytes(replace(shape, **changes)) - activation_bytes(shape)

    # input, output, what either half adds, and three norms
    assert growth(hidden_size=33) == token_bytes * 7
    # gate, up, and their product
    assert growth(intermediate_size=65) == token_bytes * 3
    # k twice and v once, of a head of 8
    assert growth(num_kv_heads=3) == token_bytes * 8 * 3
    # q twice and the result; of a part also its maximum and its sum
    assert growth(num_heads=5) == token_bytes * 8 * 3 + parts * (8 + 2)
    assert growth(dtype_bytes=4) == activation_bytes(shape) - parts * 4 * (8 + 2)


# What an H200 was seen to take for steps of 8,192 tokens and 32 rows, in bf16


def pool_bytes(**dims: int) -> int:
    shape = StepShape(bucket=Bucket(8192, 32), dtype_bytes=2, **dims)
    spec = CacheSpec((FULL,), page_size=64, page_bytes=1, num_chunks=4, max_model_len=4096)
    return breakdown(spec, 1, shape, MemoryBreakdown()).graph_pool


def test_pool_of_an_8b_model_is_what_was_measured_or_a_little_more():
    pool = pool_bytes(
        hidden_size=4096,
        intermediate_size=14_336,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        num_logits=128_256,
    )
    assert 1_407_188_992 <= pool <= 1.12 * 1_407_188_992


def test_pool_of_a_06b_model_is_what_was_measured_or_a_little_more():
    pool = pool_bytes(
        hidden_size=1024,
        intermediate_size=3072,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        num_logits=151_936,
    )
    assert 425_721_856 <= pool <= 425_721_856 + 256 * MIB


def test_experts_count_where_they_take_more_than_the_mlp_of_all():
    dense = StepShape(Bucket(8, 2), 32, 64, 4, 2, 8, 128, 4)
    one, two = (replace(dense, num_experts_per_tok=n) for n in (1, 2))
    assert activation_bytes(dense) < activation_bytes(one) < activation_bytes(two)
    # of a token and expert: its input, both products with their biases, the result by its weight
    assert activation_bytes(two) - activation_bytes(one) == 8 * 4 * (4 * 32 + 5 * 64)
