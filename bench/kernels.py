"""Times the kernels alone, those of attention over settings and checked against plain torch.

    python -m bench.kernels [--head-dim 64] [--quick] [--output FILE]

Prints a line a setting, the one that is used and then the fastest of others: microseconds and the
bytes/s or FLOP/s reached. The dimensions are those of one layer of Llama-3.1-8B, or of models with
another head dimension; runs are replays of a CUDA graph over caches or weights that change from run
to run, so that nothing is served from the L2 cache. The linear layers run in their order, with a
small kernel for each that a decoder layer has between them.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import triton
import triton.language as tl
import typer
from torch import Tensor, nn

from cbfn import linear_kernel
from cbfn.attention import decode_kernel, prefill_kernel
from cbfn.dependents import LAUNCH

LAYERS = 4
SHOWN = 5  # of the settings of a case


class Heads(NamedTuple):
    """Query heads, key-value heads and head dimension."""

    H: int
    K: int
    D: int


HEADS = {64: Heads(32, 8, 64), 128: Heads(32, 8, 128), 256: Heads(8, 4, 256)}


def main(
    output: Annotated[Path | None, typer.Option(help="write all lines to this file")] = None,
    quick: Annotated[bool, typer.Option(help="only the settings that are used")] = False,
    head_dim: Annotated[int, typer.Option(help="64, 128 (linear layers too) or 256")] = 128,
) -> None:
    """Runs all cases."""
    heads = HEADS[head_dim]
    lines = [copy_bandwidth()]
    print(json.dumps(lines[0]), flush=True)
    linear = linear_cases() if head_dim == 128 else ()
    for line in itertools.chain(linear, decode_cases(heads, quick), prefill_cases(heads, quick)):
        print(json.dumps(line), flush=True)
        lines.append(line)
    if output is not None:
        output.write_text("".join(json.dumps(line) + "\n" for line in lines))


def copy_bandwidth() -> dict[str, Any]:
    """Returns the faster of the driver's copy and a kernel's, 4 GiB read and written."""
    source = torch.zeros(2**30, device="cuda")
    target = torch.empty_like(source)
    copies = (lambda: target.copy_(source), lambda: torch.neg(source, out=target))
    us = min(time_us([copy]) for copy in copies)
    return {"case": "copy", "us": us, "TB/s": round(8 * source.numel() / us / 1e6, 3)}


def time_us(runs: list[Any], repeats: int = 20) -> float:
    """Returns microseconds of one of `runs`, which are captured in one graph and replayed."""
    for run in runs:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(runs))
    return round(sorted(times)[len(times) // 2], 2)


class Scene:
    """A paged cache of `LAYERS` layers and rows of given lengths."""

    def __init__(self, heads: Heads, lengths: list[int], counts: list[int], page: int) -> None:
        self.heads = heads
        self.page = page
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        self.cu = torch.zeros(len(counts) + 1, dtype=torch.int32, device="cuda")
        self.cu[1:] = torch.tensor(counts, device="cuda").cumsum(0)
        columns = [-(-length // page) for length in lengths]
        total = sum(columns)
        order = torch.randperm(total, device="cuda").int()
        self.table = torch.zeros(len(lengths), max(columns), dtype=torch.int32, device="cuda")
        at = 0
        for row, count in enumerate(columns):
            self.table[row, :count] = order[at : at + count]
            at += count
        self.block_pages = 2 * LAYERS
        lines = total * self.block_pages * page
        self.kv = torch.randn(lines, *heads[1:], device="cuda").bfloat16()
        self.query = torch.randn(sum(counts), heads.H, heads.D, device="cuda").bfloat16()
        self.out = torch.empty_like(self.query)
        self.parts: dict[int, decode_kernel.Parts] = {}
        self.pages = [torch.tensor(2 * i, device="cuda") for i in range(LAYERS)]

    def reference(self, layer: int) -> torch.Tensor:
        out = torch.zeros_like(self.query, dtype=torch.float32)
        groups = self.heads.H // self.heads.K
        for row in range(len(self.seq_lens)):
            begin, end = int(self.cu[row]), int(self.cu[row + 1])
            length = int(self.seq_lens[row])
            position = torch.arange(length, device="cuda")
            block = self.table[row, position // self.page].long()
            line = (block * self.block_pages + 2 * layer) * self.page + position % self.page
            key = self.kv[line].float().repeat_interleave(groups, 1)
            value = self.kv[line + self.page].float().repeat_interleave(groups, 1)
            query = self.query[begin:end].float()
            scores = torch.einsum("qhd,nhd->hqn", query, key) * self.heads.D**-0.5
            own = torch.arange(length - (end - begin), length, device="cuda")
            scores = scores.masked_fill(position[None, None] > own[None, :, None], float("-inf"))
            out[begin:end] = torch.einsum("hqn,nhd->qhd", scores.softmax(-1), value)
        return out

    def decode(
        self, layer: int, programs: int = decode_kernel.BUSY_PROGRAMS, **settings: Any
    ) -> None:
        if programs not in self.parts:  # once a step, so not in what is timed
            batch = (self.seq_lens, self.cu, self.heads.K, None, False)
            self.parts[programs] = decode_kernel.split(*batch, programs)
        parts = self.parts[programs]
        decode_kernel.attend(*self._batch(layer), parts, **self._how, **settings)

    def prefill(self, layer: int, **settings: Any) -> None:
        prefill_kernel.attend(*self._batch(layer), **self._how, **settings)

    def _batch(self, layer: int) -> tuple[torch.Tensor, ...]:
        places = (self.query, self.kv, self.out, self.pages[layer], self.table)
        return *places, self.seq_lens, self.cu

    @property
    def _how(self) -> dict[str, Any]:
        return {
            "page_size": self.page,
            "block_pages": self.block_pages,
            "scale": self.heads.D**-0.5,
        }


def measure(scene: Scene, run: Any, settings: dict[str, Any]) -> tuple[float, float]:
    """Returns microseconds a layer and the largest error relative to the largest value."""
    scene.out.fill_(float("nan"))
    run(1, **settings)
    expected = scene.reference(1)
    error = (scene.out.float() - expected).abs().max() / expected.abs().max()
    us = time_us([lambda i=i: run(i, **settings) for i in range(LAYERS)])
    return us, float(error)


@triton.jit
def _pass_on(source, target, num_source, num_target, B: tl.constexpr, DEPENDENT: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    value = tl.load(source + at % num_source, mask=at < num_target)
    tl.store(target + at, (value * 0.01).to(target.dtype.element_ty), mask=at < num_target)


class Linears:
    """The linear layers of a few decoder layers, and the small kernels after each of them."""

    HIDDEN = 4096
    # rows, columns, and the small kernels that follow
    ORDER = (
        (6144, HIDDEN, 3),  # q, k and v
        (HIDDEN, HIDDEN, 2),  # o
        (28_672, HIDDEN, 1),  # gate and up
        (HIDDEN, 14_336, 2),  # down
    )

    def __init__(self, num_layers: int) -> None:
        self.layers = [
            (torch.randn(rows, columns, device="cuda").mul_(0.02).bfloat16(), count)
            for _ in range(num_layers)
            for rows, columns, count in self.ORDER
        ]
        self.arrivals = torch.zeros(linear_kernel.MAX_TILES, dtype=torch.int32, device="cuda")

    def run(self, x: Tensor, ours: bool, dependent: bool) -> None:
        for (weight, count), (following, _) in itertools.pairwise([*self.layers, self.layers[0]]):
            if ours:
                tiling = linear_kernel.tiling(len(x), *weight.shape)
                assert tiling is not None
                out = linear_kernel.linear(x, weight, None, self.arrivals, tiling, dependent)
            else:
                out = nn.functional.linear(x, weight)
            for _ in range(count):
                x = x.new_empty(len(x), following.shape[1])
                launch = LAUNCH if dependent else {}
                grid = (triton.cdiv(x.numel(), 1024),)
                _pass_on[grid](
                    out, x, out.numel(), x.numel(), B=1024, DEPENDENT=dependent, **launch
                )
                out = x


def linear_cases() -> Any:
    linears = Linears(LAYERS)
    num_bytes = sum(weight.numel() * 2 for weight, _ in linears.layers) / LAYERS
    for tokens in (1, 8, 32, 64):
        x = torch.randn(tokens, linears.HIDDEN, device="cuda").bfloat16()
        for ours, dependent in ((False, False), (True, False), (True, True)):
            us = time_us([lambda a=ours, b=dependent, x=x: linears.run(x, a, b)]) / LAYERS
            case = {"case": "linear layers", "tokens": tokens, "ours": ours, "dependent": dependent}
            yield {**case, "us": round(us, 2), "TB/s": round(num_bytes / us / 1e6, 3)}


def decode_cases(heads: Heads, quick: bool) -> Any:
    settings = [
        {"programs": p, "keys": k, "num_warps": w, "num_stages": s}
        for p, k, w, s in itertools.product((256, 512), (32, 64, 128), (4, 8), (3, 4, 5))
    ]
    for lengths, page in (
        ([384] * 32, 64),
        ([1024] * 32, 64),
        ([2048] * 32, 64),
        ([4096] * 32, 64),
        ([4096] * 32, 16),
        ([4096] * 32, 128),
        ([8192] * 32, 64),
        ([300 + 7 * i for i in range(256)], 64),
        ([16000, *[200] * 31], 64),
        ([2048] * 8, 64),
        ([8192], 64),
    ):
        scene = Scene(heads, lengths, [1] * len(lengths), page)
        terabytes = sum(lengths) * heads.K * heads.D * 2 * 2 / 1e12
        case = f"decode {len(lengths)} x {lengths[-1]}, page {page}"
        yield from fastest(case, scene, scene.decode, [] if quick else settings, terabytes, "TB/s")


def prefill_cases(heads: Heads, quick: bool) -> Any:
    settings = [
        {"tile": t, "keys": k, "num_warps": w, "num_stages": s}
        for t, k, w, s in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4))
    ]
    for lengths, counts in (
        ([1024] * 8, [1024] * 8),
        ([4096] * 2, [4096] * 2),
        ([4096] * 4, [512] * 4),
    ):
        scene = Scene(heads, lengths, counts, 64)
        pairs = sum(c * (n - c) + c * (c + 1) // 2 for n, c in zip(lengths, counts, strict=True))
        tflop = 4 * pairs * heads.H * heads.D / 1e12
        case = f"prefill {len(lengths)} x {counts[0]} of {lengths[0]}"
        yield from fastest(case, scene, scene.prefill, [] if quick else settings, tflop, "TFLOP/s")


def fastest(
    case: str, scene: Scene, run: Any, settings: list[dict[str, int]], amount: float, unit: str
) -> Any:
    """Yields the figures of the setting that is used, and of the fastest of others."""
    case = f"{case}, heads {scene.heads.H}/{scene.heads.K} of {scene.heads.D}"
    results: list[dict[str, Any]] = []
    for setting in ({}, *settings):
        try:
            us, error = measure(scene, run, setting)
        except Exception:
            if not setting:
                raise
            continue  # it does not fit the card
        figures = {"us": us, unit: round(amount / us * 1e6, 3), "error": round(error, 5)}
        results.append({"case": case, "setting": setting or "used", **figures})
    yield results[0]
    yield from sorted(results[1:], key=lambda line: line["us"])[:SHOWN]


if __name__ == "__main__":
    typer.run(main)
