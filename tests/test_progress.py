"""Bars are redrawn on terminals and are lines elsewhere; those of transformers can be hidden."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from cbfn import progress
from cbfn.devices import CudaDevice
from cbfn.progress import bar, hidden_bars, is_live


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, file: io.StringIO, **options: Any) -> str:
    """Returns what 1,000 updates, within much less than a second, write into a file."""
    monkeypatch.setattr(sys, "stderr", file)
    with bar(1000, "generating", unit="lines", **options) as counter:
        for _ in range(1000):
            counter.set_postfix_str("7 tokens/s", refresh=False)
            counter.update()
    return file.getvalue()


def test_file_gets_a_line_at_the_start_and_one_at_the_end(monkeypatch: Any) -> None:
    first, last, rest = shown(monkeypatch, io.StringIO()).split("\n")
    assert first == "generating: 0/1000 lines [00:00<?]"
    assert last == "generating: 1000/1000 lines [00:00<00:00, 7 tokens/s]"
    assert rest == ""


def test_file_gets_lines_at_an_interval(monkeypatch: Any) -> None:
    assert progress.SECONDS_BETWEEN_LINES == 10
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.1)
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    start = time.monotonic()
    for _ in bar(50, over=range(50), name="capturing"):
        time.sleep(0.01)
    lines = file.getvalue().splitlines()
    assert 4 <= len(lines) <= 2 + (time.monotonic() - start) / 0.1
    assert all(line.startswith("capturing: ") for line in lines)
    assert not {"\r", "\x1b"} & {*file.getvalue()}


def test_bars_below_each_other_are_lines_too(monkeypatch: Any) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    with bar(2, "outer") as outer:
        for _ in range(2):
            for _ in bar(3, "inner", over=range(3)):
                pass
            outer.update()
    lines = file.getvalue().splitlines()
    assert all(line.startswith(("outer: ", "inner: ")) for line in lines)
    assert not {"\r", "\x1b"} & {*file.getvalue()}


def test_unknown_total_is_a_question_mark(monkeypatch: Any) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    with bar(None, "generating", unit="lines") as counter:
        counter.update(3)
    assert file.getvalue().splitlines()[-1].startswith("generating: 3/? lines [00:00<")


def test_terminal_gets_a_bar_that_is_redrawn(monkeypatch: Any) -> None:
    drawn = shown(monkeypatch, Terminal())
    assert drawn.count("\r") >= 2
    assert drawn.count("\n") == 1
    assert "100%" in drawn


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_bar_that_is_not_shown_writes_nothing(monkeypatch: Any, kind: Any) -> None:
    assert shown(monkeypatch, kind(), shown=False) == ""


def test_process_without_stderr_shows_nothing(monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with bar(3) as counter:
        counter.update()


@pytest.mark.parametrize(("variable", "lines"), [("TQDM_DISABLE", 0), ("TQDM_MININTERVAL", 52)])
def test_environment_of_tqdm_counts(variable: str, lines: int) -> None:
    program = (
        "import time; from cbfn.progress import bar\n"
        "for _ in bar(50, over=range(50)): time.sleep(0.002)"
    )
    environment = os.environ | {variable: "1" if variable == "TQDM_DISABLE" else "0.0001"}
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert abs(len(run.stderr.splitlines()) - lines) <= 1


def test_notebook_counts_as_a_terminal() -> None:
    kind = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})
    assert is_live(kind())
    assert not is_live(io.StringIO())
    assert not is_live(None)


def test_warm_up_of_a_gpu_is_shown_so_too(monkeypatch: Any) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    device: Any = SimpleNamespace(buckets=[4, 2, 1])
    assert list(CudaDevice._progress(device, "capturing", True)) == [4, 2, 1]
    first, last = file.getvalue().splitlines()
    assert first.startswith("capturing: 0/3 batch shapes")
    assert last.startswith("capturing: 3/3 batch shapes")
    assert list(CudaDevice._progress(device, "capturing", False)) == [4, 2, 1]
    assert len(file.getvalue().splitlines()) == 2


# Bars of transformers


@pytest.fixture
def _bars_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.utils import logging

    monkeypatch.setattr(logging, "_tqdm_active", True)  # other tests turn them off


def foreign() -> tuple[Any, Any]:
    """Returns the two makers of bars: of weights that load, and of GGUF files."""
    import transformers.modeling_gguf_pytorch_utils as gguf
    from transformers.utils import logging

    return logging.tqdm, gguf.tqdm


def drawn_by_transformers(capsys: pytest.CaptureFixture[str]) -> str:
    for maker in foreign():
        assert list(maker([1, 2], desc="foreign")) == [1, 2]
    return capsys.readouterr().err


@pytest.mark.usefixtures("_bars_enabled")
def test_bars_of_transformers_are_hidden_and_come_back(capsys: Any) -> None:
    before = foreign()
    assert drawn_by_transformers(capsys).count("2/2") == 2
    with suppress(KeyboardInterrupt), hidden_bars():
        assert drawn_by_transformers(capsys) == ""
        with hidden_bars():
            pass
        assert drawn_by_transformers(capsys) == ""
        raise KeyboardInterrupt
    assert drawn_by_transformers(capsys).count("2/2") == 2
    assert foreign() == before


@pytest.mark.usefixtures("_bars_enabled")
def test_bars_come_back_when_the_last_thread_leaves(capsys: Any) -> None:
    entered, leave = threading.Event(), threading.Event()

    def hide() -> None:
        with hidden_bars():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=hide)
    with hidden_bars():
        thread.start()
        entered.wait()
    assert drawn_by_transformers(capsys) == ""
    leave.set()
    thread.join()
    assert drawn_by_transformers(capsys).count("2/2") == 2
