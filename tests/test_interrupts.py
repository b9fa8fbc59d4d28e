"""An exception at any line of `step()`: the next call goes on, and nothing is lost.

`CBFN_EVERY_LINE=1 pytest tests/test_interrupts.py` takes each line as often as it runs: an hour.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from types import FrameType
from typing import Any

import pytest
import torch

import cbfn
from cbfn import Engine, EngineConfig, RequestOutput, SamplingParams
from tests.conftest import small_model, word_tokenizer

PACKAGE = os.path.dirname(cbfn.__file__) + os.sep
PROMPTS = {"a": [1] * 9, "b": [2] * 5, "c": [3] * 6, "d": [4] * 3}
LOOP = ("engine", "runner", "streams", "turns", "executors", "slots", "devices", "text")
EVERY_LINE = bool(os.environ.get("CBFN_EVERY_LINE"))


class Planted(BaseException):
    """As KeyboardInterrupt: no `except Exception` stops it."""


class PlantedError(MemoryError):
    """An exception that model code may raise as well."""


class Tracer:
    """Notes the lines of the package that run, and raises at one of them."""

    def __init__(self, at: int = -1, error: type[BaseException] = Planted) -> None:
        self.at = at
        self.error = error
        self.places: list[str] = []

    def run(self, function: Callable[[], Any]) -> Any:
        sys.settrace(self._call)
        try:
            return function()
        finally:
            sys.settrace(None)

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            name = os.path.relpath(frame.f_code.co_filename, PACKAGE)
            self.places.append(f"{name}:{frame.f_lineno}, {frame.f_code.co_name}")
            if len(self.places) - 1 == self.at:
                sys.settrace(None)
                raise self.error("planted")
        return self._line


def one_layer() -> Any:
    """Returns a model that is quick, since it runs thousands of steps."""
    model = small_model("llama")
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    return model


class Session:
    """One engine, and the same requests again and again: pressed, offloading, one cancelled."""

    def __init__(self, asynchronous: bool, streams: bool = False) -> None:
        self.streams = streams
        self.config = EngineConfig(
            page_size=4,
            num_blocks=9,
            max_batch_tokens=16,
            max_requests_per_batch=3,
            safety_margin=0.0,
            cpu_offload_space=1e-3,
            allow_block_sharing=False,
            use_async_batching=asynchronous,
        )
        self.engine = Engine(one_layer(), word_tokenizer(), config=self.config)

    def step(self) -> list[RequestOutput]:
        """One step, or the next output of a stream that was begun for it."""
        return list(islice(self.engine.stream(), 1)) if self.streams else self.engine.step()

    def play(self, step: int = -1, tracer: Tracer | None = None) -> dict[str, RequestOutput]:
        """Returns the terminal outputs of a run in which the tracer sees one step."""
        engine, ended = self.engine, {}
        streamed = dict.fromkeys(PROMPTS, "")
        for name, prompt in PROMPTS.items():
            engine.add_request(prompt, SamplingParams(max_tokens=6, temperature=0), request_id=name)
        turn = 0
        while engine.has_unfinished():
            assert turn < 100, "it hangs"
            if turn == 4:
                engine.cancel("d")
            try:
                news = self.step() if tracer is None or turn != step else tracer.run(self.step)
            except (Planted, PlantedError):
                assert torch.is_grad_enabled()
                news = self.step()
            turn += 1
            for output in news:
                streamed[output.request_id] += output.new_text
                if output.status.ended:
                    assert output.request_id not in ended, "a second terminal output"
                    ended[output.request_id] = output
        assert set(ended) == set(PROMPTS), "a terminal output is lost"
        for name, output in ended.items():
            assert output.error or streamed[name] == output.text, f"{name}: texts have a hole"
        stats = engine.stats()
        assert stats.free_blocks == stats.total_blocks
        assert stats.free_host_blocks == stats.host_blocks
        return ended


def facts(ended: dict[str, RequestOutput]) -> dict[str, Any]:
    """Returns what must not depend on an exception; when a cancel came may."""
    return {
        name: (output.finish_reason, *([] if name == "d" else output.token_ids))
        for name, output in ended.items()
    }


def moments(session: Session, files: tuple[str, ...]) -> list[tuple[int, int]]:
    """Returns (step, how many lines into it): each line of the package that steps run, once."""
    found: list[tuple[int, int]] = []
    seen: set[str] = set()
    for step in range(12):
        tracer = Tracer()
        session.play(step, tracer)
        for index, place in enumerate(tracer.places):
            # with the line before it: a `with` is run once more when its block is left
            way = f"{tracer.places[index - 1]} -> {place}" if index else place
            if place.startswith(files) and (way not in seen or EVERY_LINE):
                seen.add(way)
                found.append((step, index))
    return found


def interrupt(session: Session, error: type[BaseException], files: tuple[str, ...]) -> int:
    """Raises at each line in turn, checks what comes out, and returns how many lines there were."""
    expected = facts(session.play())
    assert session.engine.stats().num_offloads
    todo = moments(session, files)
    with ThreadPoolExecutor(1) as pool:
        for step, index in todo:
            tracer = Tracer(index, error)
            try:
                found = session.play(step, tracer)
                # no lock is left behind: another thread gets its turn
                pool.submit(session.engine.cancel, "none").result(timeout=10)
            except Exception as problem:
                raise AssertionError(f"step {step}: {tracer.places[-1]}") from problem
            failed = {n for n, o in found.items() if isinstance(o.error, PlantedError)}
            assert error is PlantedError or not failed
            left = {name: fact for name, fact in expected.items() if name not in failed}
            assert facts(found).items() >= left.items(), f"step {step}: {tracer.places[-1]}"
    return len(todo)


@pytest.mark.compiled  # nothing is compiled, but checks of annotations take four times as long
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_step_goes_on_behind_an_interrupt_at_any_line(asynchronous: bool) -> None:
    # the scheduler's lines are the same in both: pure functions, called again
    files = ("",) if asynchronous or EVERY_LINE else LOOP
    assert interrupt(Session(asynchronous), Planted, files) > (1000 if asynchronous else 250)


@pytest.mark.compiled
def test_step_goes_on_behind_an_error_of_memory_at_any_line_of_the_loop() -> None:
    assert interrupt(Session(True), PlantedError, LOOP) > 250


@pytest.mark.compiled
def test_stream_goes_on_behind_an_interrupt_at_any_line() -> None:
    assert interrupt(Session(True, streams=True), Planted, ("engine", "text")) > 100
