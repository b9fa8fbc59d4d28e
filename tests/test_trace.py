"""A trace says what host and streams did, in the order of the protocol."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from cbfn import Engine, EngineConfig, SamplingParams
from cbfn.trace import LANES, Span, Trace
from tests.conftest import small_model


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def trace(request: pytest.FixtureRequest) -> Trace:
    recorded = Trace()
    config = EngineConfig(use_async_batching=request.param)
    with Engine(small_model("llama"), config=config, trace=recorded) as engine:
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=9, temperature=0))
        list(engine.stream())
    return recorded


def named(spans: list[Span], name: str) -> Span:
    (found,) = (span for span in spans if span.name == name)
    return found


def test_every_step_is_packed_copied_computed_and_copied_back(trace: Trace):
    spans = trace.spans()
    assert {span.lane for span in spans} == set(LANES) - {"moves"}
    for step in range(9):
        order = [named(spans, f"{what} {step}") for what in ("pack", "copy-in", "compute")]
        order.append(named(spans, f"copy-out {step}"))
        for before, after in itertools.pairwise(order):
            assert before.start <= before.end <= after.start
    for what in ("schedule", "launch", "collect", "commit"):
        assert sum(span.name == what for span in spans) >= 9


def test_file_has_every_span_and_a_name_for_every_lane(trace: Trace, tmp_path: Path):
    trace.write(tmp_path / "out.json")
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    drawn = [e for e in events if e["ph"] == "X"]
    assert tuple(lanes.values()) == LANES
    assert len(drawn) == len(trace.spans())
    assert all(e["dur"] >= 0 and lanes[e["tid"]] for e in drawn)


def test_picture_shows_the_steps_that_are_chosen(trace: Trace, tmp_path: Path):
    paths = [tmp_path / f"{name}.png" for name in ("last", "same", "other")]
    for path, first in zip(paths, (None, 3, 0), strict=True):
        trace.plot(path, steps=6, first=first)
    last, same, other = (path.read_bytes() for path in paths)
    assert last.startswith(b"\x89PNG")
    assert last == same != other


def test_title_is_the_idle_share_of_what_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from matplotlib.axes import Axes

    titles: list[str] = []
    monkeypatch.setattr(Axes, "set_title", lambda _, title, **kwargs: titles.append(title))
    trace = Trace()
    ends = (0.9, 1.9, 2.5)  # two steps suffice for a picture
    trace._spans = [Span("compute", f"compute {i}", i, end) for i, end in enumerate(ends)]
    for first in (0, 1):
        trace.plot(tmp_path / "out.png", steps=2, first=first)
    assert titles == ["device idle 5.26 % of the time", "device idle 6.67 % of the time"]


def test_picture_of_steps_that_are_not_there_is_refused(trace: Trace, tmp_path: Path):
    with pytest.raises(ValueError, match="plot: expected 2 steps or more, got 1"):
        trace.plot(tmp_path / "out.png", first=8)


def test_idle_share_is_what_no_step_computes():
    trace = Trace()
    trace._spans = [Span("compute", f"compute {i}", i, i + 0.75) for i in range(5)]
    trace._spans.append(Span("host", "schedule", 0, 99))
    assert trace.idle_share(skip=1) == pytest.approx(1 - 3 / 3.75)
    with pytest.raises(ValueError, match="expected 2 steps or more behind the first 4, got 1"):
        trace.idle_share(skip=4)
