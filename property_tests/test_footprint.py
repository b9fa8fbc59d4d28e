"""The arithmetic of an engine's memory: against what is allocated, and against its inverse."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cbfn import footprint, kv, slots
from cbfn.breakdown import MemoryBreakdown
from cbfn.footprint import StepShape
from cbfn.graphs import buckets
from cbfn.model import adopt
from cbfn.plan import Bucket
from cbfn.testing import strategies
from tests.conftest import small_model

sizes = st.integers(1, 300)
shapes = st.builds(
    StepShape,
    bucket=st.builds(Bucket, tokens=sizes, rows=sizes),
    hidden_size=sizes,
    intermediate_size=sizes,
    num_heads=sizes,
    num_kv_heads=sizes,
    head_dim=sizes,
    num_logits=sizes,
    dtype_bytes=st.sampled_from([2, 4]),
    num_norms=st.integers(0, 4),
    num_experts_per_tok=st.integers(0, 3),
    compiled=st.booleans(),
)
bases = st.builds(
    MemoryBreakdown, weights=sizes, other=sizes, graphs=sizes, libraries=sizes, limit=st.just(0)
)


@given(
    spec=strategies.cache_specs(max_layers=6),
    shape=shapes,
    base=bases,
    room=st.integers(-200, 60_000),
)
def test_blocks_that_fit_are_the_most_within_the_limit(spec, shape, base, room):
    def total(num_blocks):
        return footprint.breakdown(spec, num_blocks, shape, base).total

    base = replace(base, limit=total(1) + room)
    fits = footprint.blocks_that_fit(spec, shape, base)
    assert (fits == 0) == (room < 0)
    assert fits == 0 or total(fits) <= base.limit
    assert total(fits + 1) > base.limit


@given(
    spec=strategies.cache_specs(max_layers=6),
    num_blocks=st.integers(1, 40),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.integers(1, 5),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    shape=shapes,
)
def test_kv_caches_have_the_bytes_that_are_allocated(
    spec, num_blocks, num_kv_heads, head_dim, dtype, shape
):
    page_bytes = 2 * spec.page_size * num_kv_heads * head_dim * dtype.itemsize
    spec = replace(spec, page_bytes=page_bytes)
    expected = footprint.breakdown(spec, num_blocks, shape, MemoryBreakdown())
    spec = footprint.with_blocks(spec, num_blocks)
    cache = kv.allocate(spec, num_kv_heads, head_dim, dtype, torch.device("cpu"))
    assert expected.kv_cache == cache.nbytes
    host = kv.allocate_host(spec, cache)
    assert expected.host - expected.io_buffers == host.nbytes


@given(spec=strategies.cache_specs(max_layers=6), num_blocks=st.integers(1, 200))
def test_blocks_of_the_full_model_become_chunks_of_the_same_bytes(spec, num_blocks):
    chunks = footprint.with_blocks(spec, num_blocks).usable_chunks
    wanted = num_blocks * len(spec.layer_types) * spec.page_bytes
    assert chunks == 1 or chunks * footprint.chunk_bytes(spec) <= wanted
    assert wanted < (chunks + 1) * footprint.chunk_bytes(spec)


@pytest.fixture(scope="module")
def adopted():
    return adopt(small_model("llama"))


@given(
    spec=strategies.cache_specs(max_layers=6),
    max_tokens=st.integers(1, 200),
    max_rows=st.integers(1, 70),
    least=st.integers(1, 2),
)
def test_io_buffers_have_the_bytes_that_slots_allocate(adopted, spec, max_tokens, max_rows, least):
    shape = buckets(max_tokens, min(max_rows, max_tokens), least)
    zeros = torch.zeros

    def unpinned(*size, pin_memory=False, **more):
        return zeros(*size, **more)

    with mock.patch.object(torch, "zeros", unpinned):
        slot = slots.CudaSlot(adopted, spec, shape[0].rows, shape)
    # a slot counts both sides of its copies
    assert 2 * footprint.io_bytes(spec, shape[0]) == footprint.NUM_SLOTS * slot.num_bytes


@given(shape=shapes, field=st.sampled_from(["hidden_size", "intermediate_size", "num_norms"]))
def test_more_of_anything_takes_more(shape, field):
    more = replace(shape, **{field: getattr(shape, field) + 1})
    assert footprint.activation_bytes(more) >= footprint.activation_bytes(shape)
    eager, compiled = replace(shape, compiled=False), replace(shape, compiled=True)
    assert footprint.activation_bytes(eager) > footprint.activation_bytes(compiled)


@given(
    spec=strategies.cache_specs(),
    num_blocks=st.integers(1, 40),
    shape=shapes,
    base=bases,
)
def test_total_is_the_sum_of_what_is_on_the_device(spec, num_blocks, shape, base):
    whole = footprint.breakdown(spec, num_blocks, shape, base)
    assert whole.total == (
        whole.weights
        + whole.other
        + whole.kv_cache
        + whole.graph_pool
        + whole.io_buffers
        + whole.graphs
        + whole.libraries
    )
    assert whole.graph_pool == whole.activations + whole.logits + whole.sampling
    assert (whole.weights, whole.other) == (base.weights, base.other)
    assert (whole.graphs, whole.libraries) == (base.graphs, base.libraries)
    assert whole.sampling == 48 * shape.bucket.rows * shape.num_logits
    for name in whole.parts:
        assert name in str(whole)
