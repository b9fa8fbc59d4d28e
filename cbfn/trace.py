"""When host and device did what: spans of every step, as a file for Perfetto and as a picture.

    trace = Trace()
    with Engine(model, trace=trace) as engine:
        ...
    trace.write("out.json")   # open it at ui.perfetto.dev
    trace.plot("out.png")
    trace.idle_share()        # of the device, all but the first steps

Device spans lie between two events of their stream. A device and its host agree on the time of one
event, which is recorded while both are at rest.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from cbfn.streams import Operation, Work

HOST = "host"
COMPUTE = "compute"
MOVES = "moves"  # between device and host memory
COLORS = {
    "schedule": "C5",
    "pack": "C7",
    "launch": "C6",
    "collect": "C0",
    "commit": "C4",
    "copy-in": "C8",
    "compute": "C1",
    "copy-out": "C2",
}
OTHER, IDLE = "C9", "C3"  # moves; red
LANES = (HOST, "copy-in", COMPUTE, "copy-out", MOVES)


@dataclass(frozen=True, slots=True)
class Span:
    """What a lane did from `start` to `end`, in seconds since the trace began."""

    lane: str
    name: str
    start: float
    end: float


@dataclass(slots=True)
class Trace:
    """Spans of the host and of the device's streams, in order of their ends' arrival."""

    _spans: list[Span] = field(default_factory=list)
    _open: list[tuple[str, str, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    _began: float = field(default_factory=time.perf_counter)
    _anchor: tuple[torch.cuda.Event, float] | None = None

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Notes what the host does in a context."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._add(HOST, name, start, time.perf_counter())

    def work(self, work: Work, step: int, device: torch.device) -> Work:
        """Returns `work` whose operations note when they ran."""
        cuda = device.type == "cuda"
        if cuda and self._anchor is None:
            self._anchor = _meet(device)
        timed = self._timed_on_device if cuda else self._timed
        before, beside = work.moves_before, work.moves_beside
        return replace(
            work,
            fill=self._timed(work.fill, HOST, f"pack {step}"),
            copy_in=timed(work.copy_in, "copy-in", f"copy-in {step}"),
            compute=timed(work.compute, COMPUTE, f"compute {step}"),
            copy_out=timed(work.copy_out, "copy-out", f"copy-out {step}"),
            moves_before=timed(before, MOVES, f"moves {step}") if before else None,
            moves_beside=timed(beside, MOVES, f"moves {step}") if beside else None,
        )

    def spans(self) -> list[Span]:
        """Returns all spans so far, by start; waits for the device."""
        if self._anchor is not None:
            torch.cuda.synchronize()
            event, at = self._anchor
            for lane, name, start, end in self._open:
                first = at + event.elapsed_time(start) / 1e3
                self._add(lane, name, first, first + start.elapsed_time(end) / 1e3)
            self._open.clear()
        return sorted(self._spans, key=lambda span: span.start)

    def idle_share(self, skip: int = 2) -> float:
        """Returns 1 - busy / wall time of the compute stream, the first `skip` steps left out.

        Raises ValueError for a trace of too few steps.
        """
        busy = [span for span in self.spans() if span.lane == COMPUTE][skip:]
        if len(busy) < 2:
            raise ValueError(
                f"idle_share: expected 2 steps or more behind the first {skip}, got {len(busy)}; "
                "run more steps first"
            )
        return _idle_share(busy)

    def write(self, path: str | Path) -> None:
        """Writes the trace event format of Chrome, in microseconds."""
        lanes: list[dict[str, Any]] = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": i, "args": {"name": lane}}
            for i, lane in enumerate(LANES)
        ]
        events = [
            {
                "name": span.name,
                "ph": "X",
                "pid": 0,
                "tid": LANES.index(span.lane),
                "ts": round(span.start * 1e6, 1),
                "dur": round((span.end - span.start) * 1e6, 1),
            }
            for span in self.spans()
        ]
        Path(path).write_text(json.dumps({"traceEvents": lanes + events}))

    def plot(self, path: str | Path, steps: int = 6, first: int | None = None) -> None:
        """Draws `steps` steps, from the `first` of the trace (0, 1, ...; None: the last ones): a
        lane each for host and streams, the idle device in red.

        Needs matplotlib (the extra `plot`). Raises ValueError where there are fewer than 2.
        """
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                'Trace.plot needs matplotlib: pip install "cbfn[plot]"'
            ) from error
        spans = self.spans()
        compute = [span for span in spans if span.lane == COMPUTE]
        compute = compute[-steps:] if first is None else compute[first : first + steps]
        if len(compute) < 2:
            raise ValueError(
                f"plot: expected 2 steps or more, got {len(compute)}; run more steps first"
            )
        begin, last = compute[0].start, compute[-1].end
        figure = Figure(figsize=(12, 2.8), layout="constrained")
        axes = figure.subplots()
        for span in spans:
            if span.end < begin or span.start > last:
                continue
            kind = span.name.split()[0]
            start, end = max(span.start, begin), min(span.end, last)
            where = LANES[::-1].index(span.lane)
            label = None if kind in {c.get_label() for c in axes.collections} else kind
            axes.broken_barh(
                [((start - begin) * 1e3, (end - start) * 1e3)],
                (where - 0.4, 0.8),
                color=COLORS.get(kind, OTHER),
                linewidth=0.5,  # what is shorter than a dot is drawn too
                label=label,
            )
        idle = [
            ((a.end - begin) * 1e3, (b.start - a.end) * 1e3)
            for a, b in itertools.pairwise(compute)
            if b.start > a.end
        ]
        where = LANES[::-1].index(COMPUTE)
        axes.broken_barh(idle, (where - 0.4, 0.8), facecolor=IDLE, label="idle")
        axes.set_yticks(range(len(LANES)), LANES[::-1])
        axes.set_xlabel("milliseconds")
        axes.set_title(f"device idle {100 * _idle_share(compute):.2f} % of the time", loc="left")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=10, frameon=False)
        figure.savefig(path, dpi=120)

    def _add(self, lane: str, name: str, start: float, end: float) -> None:
        self._spans.append(Span(lane, name, start - self._began, end - self._began))

    def _timed(self, operation: Operation, lane: str, name: str) -> Operation:
        def run() -> None:
            start = time.perf_counter()
            operation()
            self._add(lane, name, start, time.perf_counter())

        return run

    def _timed_on_device(self, operation: Operation, lane: str, name: str) -> Operation:
        def run() -> None:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            operation()
            end.record()
            self._open.append((lane, name, start, end))

        return run


def _idle_share(busy: list[Span]) -> float:
    wall = busy[-1].end - busy[0].start
    return 1 - sum(span.end - span.start for span in busy) / wall


def _meet(device: torch.device) -> tuple[torch.cuda.Event, float]:
    """Returns an event and the host's time of it, while both are at rest."""
    torch.cuda.synchronize(device)
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    event.synchronize()
    return event, time.perf_counter()
