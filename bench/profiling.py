"""Which kernels a decode step runs, how long they take, and how long the device does nothing."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cbfn import Engine


class Kernel(NamedTuple):
    """What the device ran from `start` to `stop`, in microseconds.

    Arguments:
        gap: how long nothing ran before it.
        exposed: its time behind the end of all that began before it. A kernel that is launched
            early waits inside its own time; gaps and exposed times sum up to the wall time.
    """

    name: str
    start: float
    stop: float
    gap: float
    exposed: float


def profile_steps(engine: Engine, steps: int) -> dict[str, Any]:
    """Returns figures of the next `steps` turns of an engine that is decoding.

    `idle_share` is 1 - the union of the kernels' and copies' time over the wall time between the
    first and the last of them. Kernels of one graph follow each other at distances of about a
    microsecond, which `idle_within_steps` counts apart: gaps below 20 us.
    """
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kernels = in_order(
        (event["ts"], event["ts"] + event["dur"], event["name"])
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    )
    return {"steps": steps, **_idle(kernels), "kernels": _table(kernels, steps)}


def in_order(spans: Iterable[tuple[float, float, str]]) -> list[Kernel]:
    """Returns the kernels of spans of (start, stop, name), by their start."""
    kernels: list[Kernel] = []
    end = None
    for start, stop, name in sorted(spans):
        end = start if end is None else end
        exposed = max(stop - max(start, end), 0.0)
        kernels.append(Kernel(name, start, stop, max(start - end, 0.0), exposed))
        end = max(end, stop)
    return kernels


def _idle(kernels: list[Kernel]) -> dict[str, float]:
    wall = max(kernel.stop for kernel in kernels) - kernels[0].start
    short = sum(kernel.gap for kernel in kernels if kernel.gap < 20)
    long = sum(kernel.gap for kernel in kernels if kernel.gap >= 20)
    return {
        "wall_ms": round(wall / 1e3, 2),
        "idle_share": round((short + long) / wall, 5),
        "idle_within_steps": round(short / wall, 5),
        "idle_between_steps": round(long / wall, 5),
    }


def _table(kernels: list[Kernel], steps: int) -> list[dict[str, Any]]:
    """Returns the kernels by exposed time: microseconds and calls of one step."""
    groups: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        groups[kernel.name].append(kernel)
    rows = [
        {
            "exposed_us": round(sum(k.exposed for k in group) / steps, 1),
            "us": round(sum(k.stop - k.start for k in group) / steps, 1),
            "gaps_us": round(sum(k.gap for k in group) / steps, 2),
            "calls": round(len(group) / steps, 2),
            "kernel": name[:90],
        }
        for name, group in groups.items()
    ]
    return sorted(rows, key=lambda row: -row["exposed_us"])[:24]
