"""The command `cbfn`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from tqdm import tqdm

from cbfn import jobs
from cbfn.config import EngineConfig, SamplingParams
from cbfn.types import RequestOutput, RequestRejected

if TYPE_CHECKING:
    from cbfn.engine import Engine
    from cbfn.trace import Trace

app = typer.Typer(add_completion=False, no_args_is_help=True)
SOME_LINES_FAILED = 1
USAGE = 2
INTERRUPTED = 130


@app.callback()
def root() -> None:
    """Continuous-batching LLM generation."""


@app.command()
def generate(
    model: Annotated[
        str | None, typer.Option(help="Path or id of a model; SmolLM2-135M-Instruct without it.")
    ] = None,
    input: Annotated[
        Path | None, typer.Option(help="File of prompts, one JSON string or object a line.")
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be repeated.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="File for the answers; standard output without it.")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Skip ids that the output has.")] = False,
    overwrite: Annotated[bool, typer.Option(help="Start the output anew.")] = False,
    max_tokens: Annotated[int, typer.Option(help="New tokens a prompt.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample among the likeliest; 0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample among this probability mass.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the best.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the run.")] = 0,
    max_requests: Annotated[int | None, typer.Option(help="Requests in a batch.")] = None,
    max_batch_tokens: Annotated[int | None, typer.Option(help="Tokens in a batch.")] = None,
    num_blocks: Annotated[int | None, typer.Option(help="Blocks of the KV cache.")] = None,
    page_size: Annotated[int, typer.Option(help="Tokens in a block.")] = 64,
    compile: Annotated[
        bool | None, typer.Option(help="Compile the step: slower to start, then faster.")
    ] = None,
) -> None:
    """Answers prompts, continuously batched; answers come in the order in which they are ready.

    A line of the input is a JSON string, or an object with `prompt` or `messages`, perhaps an `id`
    and sampling fields for that line. Exit status: 0, 1 where a line failed, 2 for wrong usage, 130
    after an interrupt.
    """
    if (input is None) == (not prompt):
        _stop("expected either --input or --prompt", USAGE)
    if resume and output is None:
        _stop("--resume needs --output", USAGE)
    if resume and overwrite:
        _stop("expected either --resume or --overwrite", USAGE)
    try:
        params = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
        )
        config = EngineConfig(
            page_size=page_size,
            num_blocks=num_blocks,
            max_batch_tokens=max_batch_tokens,
            max_requests_per_batch=max_requests,
            compile=compile,
            seed=seed,
        )
        done = _answered(input, output, resume, overwrite)
    except (ValueError, OSError) as error:
        _stop(str(error), USAGE)
    run = _Run(params=params, done=done)
    with ExitStack() as stack:
        try:
            if input is not None:
                run.total = _count_lines(input)
                # what is not UTF-8 is found when its line is read
                file = input.open(encoding="utf-8-sig", errors="surrogateescape")
                lines = iter(stack.enter_context(file))
            else:
                lines = iter([json.dumps(text) for text in prompt or ()])
                run.total = len(prompt or ())
            answers = stack.enter_context(output.open("a", encoding="utf-8")) if output else None
        except OSError as error:
            _stop(str(error), USAGE)
        try:
            engine = stack.enter_context(_engine(model, config))
            if overwrite and answers is not None:
                answers.truncate(0)
            run.drive(engine, lines, answers or sys.stdout)
        except KeyboardInterrupt:
            again = f"; go on with --output {output} --resume" if output is not None else ""
            _stop(f"interrupted after {run.answered} answers{again}", INTERRUPTED)
    if run.failed:
        _stop(f"{run.failed} lines failed", SOME_LINES_FAILED)


@app.command()
def trace(
    output: Annotated[Path, typer.Argument(help="File for the trace; ui.perfetto.dev opens it.")],
    plot: Annotated[Path | None, typer.Option(help="File for a picture of some steps.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Path or id of a model; SmolLM2-135M-Instruct without it.")
    ] = None,
    requests: Annotated[int, typer.Option(help="Requests, all at once.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 32,
    max_tokens: Annotated[int, typer.Option(help="New tokens of each.")] = 32,
    asynchronous: Annotated[
        bool | None,
        typer.Option("--async/--sync", help="Plan a step while the one before runs."),
    ] = None,
    compile: Annotated[bool | None, typer.Option(help="Compile the step.")] = None,
) -> None:
    """Records what host and device do in each step of a small run, and how long the device idles.

    Prints what took how long before the first step, too.

    A CPU does one thing after the other, so only a GPU's figure says something.
    """
    from cbfn.trace import Trace

    if plot is not None and find_spec("matplotlib") is None:
        _stop('--plot needs matplotlib: pip install "cbfn[plot]"', USAGE)
    for path in (output, plot):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            _stop(f"{path}: expected a file in a folder that exists", USAGE)
    if plot is not None and plot.suffix[1:] not in (kinds := _kinds_of_pictures()):
        _stop(f"{plot}: expected a name that ends in one of {kinds}", USAGE)
    if prompt_tokens < 1 or max_tokens < 5:
        _stop("expected --prompt-tokens >= 1 and --max-tokens >= 5", USAGE)
    try:
        config = EngineConfig(
            max_requests_per_batch=requests, use_async_batching=asynchronous, compile=compile
        )
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    except ValueError as error:
        _stop(str(error), USAGE)
    recorded = Trace()
    with _engine(model, config, recorded) as engine:
        _print_startup(engine)
        vocabulary = engine.runner.model.vocab_size
        for number in range(requests):
            prompt = [(number + 7 * place) % vocabulary for place in range(prompt_tokens)]
            try:
                engine.add_request(prompt, params)
            except RequestRejected as error:
                _stop(str(error), USAGE)
        for news in engine.stream():
            if news.error is not None:
                _stop(f"a step failed: {news.error!r}", SOME_LINES_FAILED)
        try:
            recorded.write(output)
            if plot is not None:
                recorded.plot(plot)
        except OSError as error:
            _stop(str(error), USAGE)
        typer.echo(f"the device idles {100 * recorded.idle_share():.2f} % of the time", err=True)


def _kinds_of_pictures() -> list[str]:
    from matplotlib.backend_bases import FigureCanvasBase

    return sorted(FigureCanvasBase.get_supported_filetypes())


def _answered(input: Path | None, output: Path | None, resume: bool, overwrite: bool) -> set[str]:
    """Returns the ids that are answered already. Raises ValueError for an output not to be used."""
    if output is None or not output.exists():
        return set()
    if output.is_dir():
        raise ValueError(f"{output} is a folder, expected a file")
    if input is not None and input.exists() and input.samefile(output):
        raise ValueError(f"{output} is the input, expected another file")
    if resume:
        return jobs.answered_ids(output)
    if output.stat().st_size and not overwrite:
        raise ValueError(f"{output} has answers already; expected --resume or --overwrite")
    return set()


def _count_lines(path: Path) -> int | None:
    """Returns the lines of a file that are not blank; None for a pipe, which is read only once."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())


def _engine(model: str | None, config: EngineConfig, trace: Trace | None = None) -> Engine:
    """Returns the engine, and stops with a message where the model is not to be had."""
    from transformers.utils import logging

    from cbfn import demo
    from cbfn.engine import Engine

    logging.disable_progress_bar()
    # torch's default lies in a folder that may not outlive a restart of the machine
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(demo.cache_dir() / "compiled"))
    try:
        source = str(demo.smollm2()) if model is None else model
        return Engine(source, config=config, progress=True, trace=trace)
    except (OSError, ValueError, demo.ModelNotFound) as error:
        _stop(str(error), USAGE)


def _print_startup(engine: Engine) -> None:
    """Prints what was done before the first step, on stderr."""
    from rich.console import Console
    from rich.table import Table

    table = Table("before the first step", "seconds")
    for name, seconds in engine.runner.startup:
        table.add_row(name, f"{seconds:.2f}")
    Console(stderr=True).print(table)


@dataclass(slots=True)
class _Run:
    """One run over a file of prompts."""

    params: SamplingParams
    done: set[str]
    total: int | None = None
    answered: int = 0
    failed: int = 0
    waiting: dict[str, jobs.Job] = field(default_factory=dict)

    def drive(self, engine: Engine, lines: Iterator[str], answers: IO[str]) -> None:
        """Feeds the engine as it gets free, and writes each answer as soon as it is there."""
        started, tokens = time.monotonic(), 0
        todo = jobs.read_jobs(lines, self.params)
        rows = engine.runner.config.row_budget
        with tqdm(total=self.total, unit=" requests", file=sys.stderr) as bar:
            more = True
            while more or engine.has_unfinished():
                # a few batches wait, not the whole file
                while more and len(self.waiting) < 4 * rows:
                    more = self._feed(engine, todo, bar)
                for output in engine.step() if engine.has_unfinished() else ():
                    if output.status.ended:
                        self._answer(output, answers, bar)
                        tokens += len(output.token_ids)
                rate = tokens / max(time.monotonic() - started, 1e-9)
                bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)

    def _feed(
        self, engine: Engine, todo: Iterator[jobs.Job | jobs.BadLine], bar: tqdm[Any]
    ) -> bool:
        """Adds the next job to the engine. Returns False at the end of the input."""
        job = next(todo, None)
        if job is None:
            return False
        if isinstance(job, jobs.BadLine):
            self._report(job.line, job.reason, bar)
        elif job.id in self.done:
            bar.update()
        else:
            try:
                engine.add_request(_prompt(engine, job), job.params, request_id=job.id)
                self.waiting[job.id] = job
            except RequestRejected as error:
                self._report(job.line, str(error), bar)
        return True

    def _answer(self, output: RequestOutput, answers: IO[str], bar: tqdm[Any]) -> None:
        job = self.waiting.pop(output.request_id)
        if output.error is not None:
            self._report(job.line, repr(output.error), bar)
            return
        with bar.external_write_mode(file=answers):  # on a terminal the bar makes way
            jobs.write_line(answers, jobs.answer_line(job.id, output))
        self.answered += 1
        bar.update()

    def _report(self, line: int, reason: str, bar: tqdm[Any]) -> None:
        bar.write(f"line {line}: {reason}", file=sys.stderr)
        self.failed += 1
        bar.update()


def _prompt(engine: Engine, job: jobs.Job) -> Any:
    """Returns a job's prompt, chat messages through the tokenizer's template."""
    if not job.is_chat:
        return job.prompt
    if getattr(engine.tokenizer, "chat_template", None) is None:
        raise RequestRejected("messages: the model has no chat template, expected a prompt")
    try:
        ids = engine.tokenizer.apply_chat_template(
            job.prompt, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except Exception as error:  # templates are programs, and raise what they like
        raise RequestRejected(f"messages: the chat template refused them: {error}") from error
    return ids


def _stop(message: str, status: int) -> NoReturn:
    typer.echo(f"cbfn: {message}", err=True)
    raise typer.Exit(status)


def main() -> None:
    """Runs the command line."""
    app()
