"""One run of the command over prompts: lines in, a record for each out."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

from cbfn import jobs, progress
from cbfn.config import SamplingParams
from cbfn.types import RequestOutput, RequestRejected

if TYPE_CHECKING:
    from tqdm import tqdm

    from cbfn.engine import Engine


class DeviceLost(RuntimeError):
    """No step can run any more."""


@dataclass(slots=True)
class Run:
    """One run over prompts, and how far it is.

    Arguments:
        params: for lines that bring none of their own.
        done: ids that are answered already; their lines are skipped.
        noun: what one prompt is called, "line" or "prompt".
        total: how many there are, None where that is not known.
    """

    params: SamplingParams
    done: set[str]
    noun: str
    total: int | None = None
    started: float | None = None
    answered: int = 0
    failed: int = 0
    num_tokens: int = 0
    waiting: dict[str, jobs.Job] = field(default_factory=dict)

    def drive(self, engine: Engine, lines: Iterator[str], answers: IO[str]) -> None:
        """Feeds the engine as it gets free, and writes each record as soon as it is there.

        Raises DeviceLost where no more lines can run; those that were not tried have no record.
        """
        self.started = time.monotonic()
        todo = jobs.read_jobs(lines, self.params)
        rows = engine.runner.config.row_budget
        with progress.bar(self.total, "generating", unit=f"{self.noun}s") as bar:
            more = True
            while more or engine.has_unfinished():
                # a few batches wait, not the whole file
                while more and len(self.waiting) < 4 * rows:
                    if engine.runner.lost is not None:
                        raise DeviceLost(f"the device is lost: {engine.runner.lost}")
                    more = self._feed(engine, todo, answers, bar)
                for output in engine.step() if engine.has_unfinished() else ():
                    if output.status.ended:
                        self._end(output, answers, bar)

    def _feed(
        self,
        engine: Engine,
        todo: Iterator[jobs.Job | jobs.BadLine],
        answers: IO[str],
        bar: tqdm[Any],
    ) -> bool:
        """Adds the next job to the engine. Returns False at the end of the input."""
        job = next(todo, None)
        if job is None:
            return False
        if isinstance(job, jobs.BadLine):
            self._write(jobs.failed_record(job.line, job.id, job.error), answers, bar)
        elif job.id in self.done:
            bar.update()
        else:
            try:
                engine.add_request(_prompt(engine, job), job.params, request_id=job.id)
                self.waiting[job.id] = job
            except RequestRejected as error:
                self._write(jobs.failed_record(job.line, job.id, error), answers, bar)
        return True

    def _end(self, output: RequestOutput, answers: IO[str], bar: tqdm[Any]) -> None:
        job = self.waiting.pop(output.request_id)
        self.num_tokens += len(output.token_ids)
        self._write(jobs.answer_record(job.line, job.id, output), answers, bar)

    def _write(self, record: dict[str, Any], answers: IO[str], bar: tqdm[Any]) -> None:
        with bar.external_write_mode(file=answers):  # on a terminal the bar makes way
            jobs.write_record(answers, record)
        if record["error"] is None:
            self.answered += 1
        else:
            said = ": ".join(part for part in record["error"].values() if part is not None)
            bar.write(f"{self.noun} {record['index']}: {said}", file=sys.stderr)
            self.failed += 1
        rate = self.num_tokens / max(time.monotonic() - (self.started or 0.0), 1e-9)
        bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
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
