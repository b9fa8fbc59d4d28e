"""Own kernels of linear layers give what torch's give."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cbfn.linear import is_faster, linear, use_own_kernels
from tests.conftest import run_interpreted

TOKENS = (1, 2, 16, 17, 31, 32, 33, 64, 65, 127, 128)
SHAPES = ((64, 128), (128, 256), (192, 1024), (256, 2304))


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.sampled_from(TOKENS),
    shape=st.sampled_from(SHAPES),
    splits=st.integers(1, 6),
    block_rows=st.sampled_from((64, 32)),
    has_bias=st.booleans(),
    seed=st.integers(0, 5),
)
def check_kernel(
    tokens: int,
    shape: tuple[int, int],
    splits: int,
    block_rows: int,
    has_bias: bool,
    seed: int,
) -> None:
    """Checks the kernel in Triton's interpreter, which has to be on, against torch."""
    from cbfn import linear_kernel

    torch.manual_seed(seed)
    num_rows, num_columns = shape
    x, weight = torch.randn(tokens, num_columns), torch.randn(num_rows, num_columns)
    bias = torch.randn(num_rows) if has_bias else None
    arrivals = torch.zeros(num_rows // block_rows, dtype=torch.int32)
    tiling = linear_kernel.Tiling(block_rows, 64, min(splits, num_columns // 64))
    for _ in range(2):  # the second finds the counters as the first left them
        out = linear_kernel.linear(x, weight, bias, arrivals, tiling)
        expected = nn.functional.linear(x.double(), weight.double(), _double(bias))
        assert (out - expected).abs().max() <= 1e-5 * expected.abs().max()
        assert not arrivals.any()


def _double(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.double()


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_kernel_equals_torch() -> None:
    run_interpreted("from tests.test_linear import *; check_kernel()")


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("tokens", range(1, 258))
def test_tilings_fit_what_they_cut(tokens: int) -> None:
    from cbfn import linear_kernel

    for num_rows in (32, 64, 96, 576, 1024, 4096, 6144, 16_384, 28_672, 128_256, 151_936):
        for num_columns in (64, 128, 192, 576, 1024, 2048, 4096, 14_336):
            tiling = linear_kernel.tiling(tokens, num_rows, num_columns)
            if tiling is None:
                assert tokens > 64 or num_rows % 64 or num_columns % 128
                continue
            assert num_rows % tiling.block_rows == 0
            assert num_columns % tiling.block_columns == 0
            assert 1 <= tiling.splits <= num_columns // tiling.block_columns
            assert num_rows // tiling.block_rows <= linear_kernel.MAX_TILES
            block_tokens = 1 << max(tokens - 1, 15).bit_length()
            stage = 2 * (tiling.block_rows + block_tokens) * tiling.block_columns
            assert stage * tiling.num_stages <= 227 * 2**10  # shared memory of a Hopper SM


@pytest.mark.parametrize("leading", [(5,), (1, 7), (2, 3)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_operator_equals_torch_on_a_cpu(leading: tuple[int, ...], has_bias: bool) -> None:
    layer = nn.Linear(24, 40, bias=has_bias)
    if not is_faster(layer.weight):
        pytest.skip("this torch has no oneDNN")
    x = torch.randn(*leading, 24)
    out = linear(x, layer.weight.detach(), layer.bias.detach() if has_bias else None)
    torch.testing.assert_close(out, layer(x).detach(), rtol=1e-5, atol=1e-5)
    torch.library.opcheck(linear, (x, layer.weight.detach(), None))


def test_replaced_forward_calls_and_other_dtypes_stay() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double(), nn.Linear(4, 4))
    mine = lambda x: x  # noqa: E731
    module[0].forward = mine  # type: ignore[method-assign, assignment]
    assert use_own_kernels(module) == is_faster(module[2].weight)
    assert module[0].forward is mine
    assert "forward" not in vars(module[1])
    assert ("forward" in vars(module[2])) == is_faster(module[2].weight)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(64, 128), (6144, 4096), (1024, 3072), (28_672, 1024)])
def test_operator_equals_torch_on_a_gpu(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(*shape, device="cuda", dtype=dtype)
    bias = torch.randn(shape[0], device="cuda", dtype=dtype)
    for tokens in TOKENS:
        x = torch.randn(1, tokens, shape[1], device="cuda", dtype=dtype)
        exact = nn.functional.linear(x.float(), weight.float(), bias.float())
        first = linear(x, weight, bias)
        assert (first.float() - exact).abs().max() <= 1e-2 * exact.abs().max()
        for _ in range(20):  # whoever ends last
            assert torch.equal(linear(x, weight, bias), first)
