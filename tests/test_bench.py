"""The arithmetic behind figures of the benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.profiling import in_order
from cbfn import Engine, EngineConfig
from cbfn.trace import Span, Trace

gpu = pytest.importorskip("bench.gpu", reason="needs Triton")


def test_gaps_and_exposed_times_add_up_to_the_wall_time():
    spans = [(0.0, 4.0, "a"), (3.0, 6.0, "b"), (5.0, 5.5, "c"), (8.0, 9.0, "d")]
    kernels = in_order(reversed(spans))
    assert [(k.name, k.gap, k.exposed) for k in kernels] == [
        ("a", 0, 4),
        ("b", 0, 2),
        ("c", 0, 0),
        ("d", 2, 1),
    ]
    assert sum(k.gap + k.exposed for k in kernels) == 9


def test_moves_beside_compute_are_those_within_steps(tmp_path: Path):
    trace = Trace()
    trace._spans = [Span("compute", f"compute {i}", i, i + 0.9) for i in range(8)]
    trace._spans += [
        Span("moves", "moves 3", 3.1, 3.3),  # within a step
        Span("moves", "moves 5", 5.7, 6.1),  # 0.1 between two
        Span("moves", "moves 7", 7.9, 8.1),  # behind all
    ]
    figures = gpu.moved_beside_compute(trace, tmp_path / "out.png")
    assert figures == {"moves_ms": 800.0, "beside_compute": pytest.approx(0.5 / 0.8, abs=1e-4)}
    assert (tmp_path / "out.png").exists()


def test_median_of_two_runs_is_the_slower():
    assert gpu.median([{"seconds": 1.0}, {"seconds": 3.0}]) == {
        "seconds": 3.0,
        "runs_s": [1.0, 3.0],
    }
    runs = [{"seconds": s} for s in (5.0, 1.0, 2.0)]
    assert gpu.median(runs) == {"seconds": 2.0, "runs_s": [5.0, 1.0, 2.0]}


def test_decode_steps_are_of_all_rows(llama: Any):
    config = EngineConfig(page_size=4, num_blocks=400, max_batch_tokens=32)
    with Engine(llama, config=config) as engine:
        figures = gpu.decode_steps(engine, [5, 30, 20, 8], steps=6)
        assert not engine.has_unfinished()
    assert figures["rows"] == 4
    assert figures["ms_per_step"] > 0
