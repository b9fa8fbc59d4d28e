"""The kernels compile for a Hopper GPU, within what one of its multiprocessors has."""

from __future__ import annotations

import re
import subprocess
from importlib.util import find_spec
from tempfile import NamedTemporaryFile
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")

SHARED_MEMORY = 227 * 2**10
REGISTERS = 2**16
SOME_BYTES = 128  # of a thread's local memory, that cost nothing to speak of
POINTERS = {
    "x": "bf16", "weight": "bf16", "bias": "bf16", "out": "bf16",
    "query": "bf16", "kv": "bf16", "sinks": "bf16", "partial": "fp32", "stats": "fp32",
    "table": "i32", "arrivals": "i32", "block_table": "i32", "seq_lens": "i32",
    "cu_seqlens": "i32", "layer_page": "i64",
}  # fmt: skip


def compiled(
    kernel: Any,
    constants: dict[str, Any],
    pointers: dict[str, str] = POINTERS,
    capability: int = 90,
    **options: int,
) -> Any:
    """Returns a kernel compiled with arguments of any value that are aligned."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {
        name: f"*{pointers[name]}" if name in pointers else "i32"
        for name in names
        if name not in constants
    }
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (names.index(name),): [["tt.divisibility", 16]] for name in pointers if name in names
        },
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def resource(kernel: Any, name: str) -> int:
    """Returns what a thread has of a resource, by the disassembler's name for it."""
    from triton import knobs

    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(rf"{name}:(\d+)", told)
    assert found, told
    return int(found[1])


def stack_bytes(kernel: Any) -> int:
    """Returns the bytes of local memory of a thread: what registers did not hold."""
    return resource(kernel, "STACK")


def registers(kernel: Any) -> int:
    """Returns the registers of a thread, of which warps get eight at a time."""
    return -(-resource(kernel, "REG") // 8) * 8


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
def test_attention_kernels() -> None:
    for head_dim in (64, 128, 256):
        for element in ("bf16", "fp32"):
            check_attention_kernels(head_dim, element, window=0, page_size=64)
    for head_dim, window, page_size in (
        (16, 16, 16),
        (128, 1024, 64),
        (128, 0, 16),
        (256, 1024, 64),
    ):
        check_attention_kernels(head_dim, "bf16", window, page_size)
    for head_dim in (128, 256):
        check_attention_kernels(head_dim, "bf16", 0, 64, capability=89, shared=100 * 2**10)


@pytest.mark.compiled
def test_kernel_that_cuts_rows() -> None:
    from cbfn.attention import decode_kernel
    from cbfn.memory import GPU_MOST_REQUESTS

    for rows in (64, GPU_MOST_REQUESTS):
        padded, entries = decode_kernel.split_tiling(rows)
        shape = {"SHARES": 32, "K": 8, "K_PAD": 8, "B_PAD": padded, "E": entries}
        how = {"MIN_UNITS": 2, "UNIT": 128, "WINDOW": 0, "FILL_PADDING": True}
        assert stack_bytes(compiled(decode_kernel._split, shape | how, num_warps=4)) <= SOME_BYTES


def check_attention_kernels(
    head_dim: int,
    element: str,
    window: int,
    page_size: int,
    capability: int = 90,
    shared: int | None = None,
) -> None:
    """Checks that the kernels fit with the settings that they are launched with."""
    from cbfn.attention import key_tiles, prefill_kernel

    reserved = key_tiles.RESERVED_BYTES
    shared = shared or key_tiles.HOPPER_SHARED_MEMORY
    element_bytes = {"bf16": 2, "fp32": 4}[element]
    shape = {"H": 32, "K": 8, "D": head_dim, "G": 4, "P": page_size, "BLOCK_PAGES": 64}
    shape |= {"SCALE": 0.1, "WINDOW": window, "HAS_SINKS": True}
    pointers = POINTERS | dict.fromkeys(("query", "kv", "out", "sinks"), element)
    on_hopper = capability == 90

    for num_programs in (1, 10_000):
        check_decode_kernel(shape, pointers, num_programs, capability, shared)

    tile, keys, warps, stages = prefill_kernel.tiling(head_dim, element_bytes, shared)
    how = {"G_PAD": 4, "TOKENS": tile // 4, "N": keys, "SOFTCAP": 0.0}
    kernel = compiled(
        prefill_kernel._prefill,
        shape | how,
        pointers,
        capability,
        num_warps=warps,
        num_stages=stages,
    )
    programs = 2 if on_hopper and head_dim <= 128 else 1
    assert programs * (kernel.metadata.shared + reserved) <= shared
    assert stack_bytes(kernel) <= SOME_BYTES


def check_decode_kernel(
    shape: dict[str, Any],
    pointers: dict[str, str],
    num_programs: int,
    capability: int,
    shared: int,
) -> None:
    """Checks that as many programs share a multiprocessor as `tiling` says."""
    from cbfn.attention import decode_kernel, key_tiles

    on_hopper = capability == 90
    element = pointers["kv"]
    element_bytes = {"bf16": 2, "fp32": 4}[element]
    head_dim = shape["D"]
    keys, warps, stages = decode_kernel.tiling(head_dim, element_bytes, shared, num_programs)
    queries = decode_kernel.MIN_QUERIES
    how = {"G_PAD": queries, "N": keys, "UNIT": 128, "SOFTCAP": 30.0, "FILL_PADDING": True}
    kernel = compiled(
        decode_kernel._decode,
        shape | how | {"DEPENDENT": on_hopper},
        pointers,
        capability,
        num_warps=warps,
        num_stages=stages,
        launch_pdl=on_hopper,
    )
    crowded = (num_programs > 512, element, head_dim, on_hopper) == (True, "bf16", 128, True)
    programs = 3 if crowded else 2
    assert programs * (kernel.metadata.shared + key_tiles.RESERVED_BYTES) <= shared
    if crowded:
        assert programs * warps * 32 * registers(kernel) <= REGISTERS
    if on_hopper:
        assert stages == (3 if crowded else 4) or (element, head_dim) == ("fp32", 256)
        check_order(kernel)
    assert stack_bytes(kernel) <= SOME_BYTES


class Recorder:
    """Stands for a kernel, and keeps the arguments of its launches."""

    def __init__(self) -> None:
        self.launches: list[dict[str, Any]] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *_, **options: self.launches.append(options)


def test_rows_and_heads_decide_how_many_programs_share_a_multiprocessor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    from cbfn.attention import decode_kernel

    recorder = Recorder()
    monkeypatch.setattr(decode_kernel, "_decode", recorder)
    for rows, kv_heads in ((64, 8), (65, 8), (65, 4), (129, 4)):
        query = torch.zeros(rows, 16, 128, dtype=torch.bfloat16)
        seq_lens = torch.ones(rows, dtype=torch.int32)
        parts = decode_kernel.Parts(
            torch.zeros(rows, 5, dtype=torch.int32),
            torch.zeros(rows, kv_heads, dtype=torch.int32),
            window=None,
            unit=decode_kernel.UNIT,
        )
        decode_kernel.attend(
            query,
            torch.zeros(64, kv_heads, 128, dtype=torch.bfloat16),
            torch.empty_like(query),
            torch.tensor(0),
            torch.zeros(rows, 1, dtype=torch.int32),
            seq_lens,
            torch.arange(rows + 1, dtype=torch.int32),
            parts,
            page_size=64,
            block_pages=2,
            scale=1.0,
        )
    settings = [(launch["num_warps"], launch["num_stages"]) for launch in recorder.launches]
    assert settings == [(8, 4), (4, 3), (8, 4), (4, 3)]


def test_parts_of_a_batch_are_those_that_memory_is_reckoned_for() -> None:
    from cbfn import footprint
    from cbfn.attention import decode_kernel

    assert footprint.DECODE_PARTS == decode_kernel.BUSY_PROGRAMS
