"""The kernels compile for a Hopper GPU, within what one of its multiprocessors has."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")

SHARED_MEMORY = 227 * 2**10
POINTERS = {
    "x": "bf16", "weight": "bf16", "bias": "bf16", "out": "bf16",
    "query": "bf16", "kv": "bf16", "sinks": "bf16", "partial": "fp32", "stats": "fp32",
    "table": "i32", "arrivals": "i32", "block_table": "i32", "seq_lens": "i32",
    "cu_seqlens": "i32", "layer_page": "i64",
}  # fmt: skip


def compiled(kernel: Any, constants: dict[str, Any], **options: int) -> Any:
    """Returns a kernel compiled for bf16, with arguments of any value that are aligned."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {
        name: f"*{POINTERS[name]}" if name in POINTERS else "i32"
        for name in names
        if name not in constants
    }
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (names.index(name),): [["tt.divisibility", 16]] for name in POINTERS if name in names
        },
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def check_order(kernel: Any) -> None:
    """Checks that a dependent waits, and then lets the next kernel begin, before it loads."""
    text = kernel.asm["ptx"]
    wait, go = text.index("griddepcontrol.wait"), text.index("griddepcontrol.launch_dependents")
    first = min(at for name in ("ld.global", "cp.async") if (at := text.find(name)) >= 0)
    assert wait < go < first


@pytest.mark.compiled
def test_linear_kernels() -> None:
    for tokens in (1, 17, 33, 64):
        for shape in ((1024, 2048), (4096, 14_336), (6144, 4096), (128_256, 4096)):
            check_linear_kernels(tokens, shape)


def check_linear_kernels(tokens: int, shape: tuple[int, int]) -> None:
    from cbfn import linear_kernel

    block_tokens = max(1 << (tokens - 1).bit_length(), 16)
    tiling = linear_kernel.tiling(tokens, *shape)
    assert tiling is not None
    kernel = compiled(
        linear_kernel._linear,
        {
            "BT": block_tokens,
            "BN": tiling.block_rows,
            "BC": tiling.block_columns,
            "IS_SPLIT": tiling.splits > 1,
            "HAS_BIAS": True,
            "DEPENDENT": True,
        },
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        launch_pdl=True,
    )
    assert kernel.metadata.shared <= SHARED_MEMORY
    check_order(kernel)


@pytest.mark.compiled
def test_decode_kernel() -> None:
    for head_dim in (64, 128, 256):
        for window in (0, 1024):
            check_decode_kernel(head_dim, window)


def check_decode_kernel(head_dim: int, window: int) -> None:
    from cbfn.attention import decode_kernel

    keys = max(min(decode_kernel.TILE_BYTES // (2 * head_dim), 128), 16)
    shape = {"H": 32, "K": 8, "D": head_dim, "G": 4, "G_PAD": 16, "P": 64, "BLOCK_PAGES": 64}
    how = {"N": keys, "UNIT": 128, "SCALE": 0.1, "WINDOW": window, "SOFTCAP": 30.0}
    flags = {"HAS_SINKS": True, "FILL_PADDING": True, "DEPENDENT": True}
    kernel = compiled(
        decode_kernel._decode, shape | how | flags, num_warps=4, num_stages=3, launch_pdl=True
    )
    assert kernel.metadata.shared <= SHARED_MEMORY
    check_order(kernel)


@pytest.mark.compiled
def test_prefill_kernel() -> None:
    from cbfn.attention import prefill_kernel

    for head_dim in (64, 128, 256):
        shape = {"H": 32, "K": 8, "D": head_dim, "G": 4, "G_PAD": 4, "P": 64, "BLOCK_PAGES": 64}
        how = {"TOKENS": 16, "N": 64, "SCALE": 0.1, "WINDOW": 1024, "SOFTCAP": 0.0}
        kernel = compiled(
            prefill_kernel._prefill, shape | how | {"HAS_SINKS": True}, num_warps=4, num_stages=2
        )
        assert kernel.metadata.shared <= SHARED_MEMORY
