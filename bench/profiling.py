"""Which kernels a decode step runs, how long they take, and how long the device does nothing."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from cbfn import Engine


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
    spans = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"], event["cat"])
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    )
    return {"steps": steps, **_idle(spans), "kernels": _table(spans, steps)}


def _idle(spans: list[tuple[float, float, str, str]]) -> dict[str, float]:
    wall = max(span[1] for span in spans) - spans[0][0]
    end, short, long = spans[0][0], 0.0, 0.0
    for start, stop, *_ in spans:
        gap = max(start - end, 0.0)
        short, long = (short + gap, long) if gap < 20 else (short, long + gap)
        end = max(end, stop)
    return {
        "wall_ms": round(wall / 1e3, 2),
        "idle_share": round((short + long) / wall, 5),
        "idle_within_steps": round(short / wall, 5),
        "idle_between_steps": round(long / wall, 5),
    }


def _table(spans: list[tuple[float, float, str, str]], steps: int) -> list[dict[str, Any]]:
    """Returns the kernels by time: microseconds and calls of one step."""
    times: dict[str, list[float]] = defaultdict(list)
    for start, stop, name, _ in spans:
        times[name].append(stop - start)
    rows = [
        {"us": round(sum(t) / steps, 1), "calls": round(len(t) / steps, 2), "kernel": name[:90]}
        for name, t in times.items()
    ]
    return sorted(rows, key=lambda row: -row["us"])[:24]
