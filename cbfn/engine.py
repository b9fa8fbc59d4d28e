"""The engine: one loop around the pure scheduler and the runner."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from types import TracebackType
from typing import Any

from immutables import Map

from cbfn import model as models
from cbfn import scheduler
from cbfn.config import EngineConfig, SamplingParams, checked_config
from cbfn.outputs import Outputs
from cbfn.prompts import Prompt as Prompt
from cbfn.prompts import tokenized
from cbfn.runner import Runner, Ticket
from cbfn.text import Texts
from cbfn.trace import Trace
from cbfn.turns import Turns, in_turn
from cbfn.types import (
    EngineStats,
    Plan,
    Request,
    RequestOutput,
    RequestRejected,
    SchedulerStalled,
    StepResult,
)


class Engine:
    """Runs requests through a model; also a context manager. Calls from several threads take turns;
    an output goes to whoever takes it first.

    An exception may end any call at any line (Ctrl-C, a signal handler, no memory). The next call
    goes on from there: no token is lost or computed twice, and no output is lost.

    Arguments:
        model: a path, an id, or a loaded transformers causal LM, which is used in place.
        tokenizer: for text prompts and `output.text`; a path or an id brings its own.
        config: None stands for `EngineConfig()`.
        progress: show a bar on stderr while the step is compiled and captured.
        trace: notes what host and device do when.

    Raises ModelNotSupported with the reason for a model that cannot run, and ValueError for a
    setting that cannot be, or where memory is too small.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        config: EngineConfig | None = None,
        *,
        progress: bool = False,
        trace: Trace | None = None,
    ) -> None:
        config = checked_config(config)  # before a model is loaded
        self._span = trace.span if trace is not None else _no_span
        model, tokenizer = models.load(model, tokenizer)
        self.tokenizer = tokenizer
        self.runner = Runner(model, config, progress=progress, trace=trace)
        self.state = scheduler.init(self.runner.cache_spec, self.runner.config)
        self._allocated = Map(self.runner.memory())
        self._eos_token_ids = models.eos_token_ids(model)
        self._depth = 1 if self.runner.config.use_async_batching else 0
        # State, tickets and news change together, in one statement that calls nothing: an exception
        # finds them as they were before, or after. A signal handler may call `cancel` meanwhile:
        # what was worked out from an older state is then worked out again.
        self._tickets: tuple[Ticket, ...] = ()  # the last may be on its way to the device
        self._texts = Texts(tokenizer) if tokenizer is not None else None
        self._news: dict[str, RequestOutput] = {}  # the latest output of each id, not yet returned
        self._num_ids = 0
        self._closed = False
        self._turns = Turns()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @in_turn
    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline: float | None = None,
    ) -> str:
        """Queues a prompt and returns its id.

        A prompt is a text (where there is a tokenizer), token ids (a sequence of integers, a tensor
        or array [T] or [1, T]), or what a tokenizer returns for one text.

        Raises RequestRejected for what cannot run; nothing else is touched. Raises RuntimeError
        where the device is lost, from what it answers everything with.
        """
        self._check_open()
        if self.runner.lost is not None:
            raise RuntimeError(
                "the device is lost, and no step can run; start a new process for another engine"
            ) from self.runner.lost
        request = Request(
            request_id if request_id is not None else self._fresh_id(),
            self._tokenize(prompt),
            sampling_params if sampling_params is not None else SamplingParams(),
            priority=priority,
            deadline=deadline,
            arrival=time.monotonic(),
            eos_token_ids=self._eos_token_ids,
        )
        if request.request_id in self._news:
            raise RequestRejected(
                f"request {request_id!r}: the id is in use; its last output was not returned yet: "
                "take it with step() or stream(), or choose another id"
            )
        self.state = scheduler.submit(self.state, request)
        return request.request_id

    @in_turn
    def cancel(self, request_id: str) -> bool:
        """Ends a request; its terminal output follows. Returns False where it has ended already."""
        self._check_open()
        before = self.state
        self.state = scheduler.cancel(before, request_id)
        return self.state is not before

    def step(self) -> list[RequestOutput]:
        """Runs one turn of the loop and returns one cumulative output for each request with news.

        Raises SchedulerStalled where requests are left and the policy offers nothing that can run.
        """
        news: list[RequestOutput] = []
        try:
            return self._step(news)
        except BaseException:
            if news:
                self._put_back(news)
            raise

    def stream(
        self, request_id: str | None = None, timeout: float | None = None
    ) -> Iterator[RequestOutput]:
        """Yields the outputs of one request, or of all, as they come; drives the loop meanwhile.

        Ends with the request's terminal output, or when all have ended; at once for an id that is
        not in use. Raises TimeoutError where nothing came for `timeout` seconds.
        """
        self._check_open()
        since, turned = time.monotonic(), False
        news: list[RequestOutput] = []
        try:
            while self._is_unfinished(request_id):
                # one at a time: what the caller does not take any more stays for others
                self._take(request_id, news)
                if news:
                    is_last = request_id is not None and news[0].status.ended
                    # no call lies between, so Ctrl-C comes before or after: it is put back, or out
                    yield (news[0], news := [])[0]
                    if is_last:
                        return
                    since, turned = time.monotonic(), False
                elif turned and timeout is not None and time.monotonic() - since > timeout:
                    raise TimeoutError(f"stream: nothing came for {timeout} seconds")
                else:
                    self._turn()
                    turned = True
        except BaseException:
            if news:
                self._put_back(news)
            raise

    def has_unfinished(self) -> bool:
        """Returns True until every terminal output was returned."""
        return self._is_unfinished(None)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """A context in which nothing is in flight: weights may be changed in place. Other threads
        wait for its end, which comes in the thread that began it.

        Call `weights_updated` afterwards if they were. A step in it is over when it returns.
        """
        me = object()
        try:
            try:
                self._turns.enter(me)
                self._check_open()
                self._drain()
                before = self._depth
                try:
                    self._depth = 0
                    yield
                finally:
                    self._depth = before
            finally:
                self._turns.leave(me)
        finally:
            self._turns.leave(me)

    @in_turn
    def weights_updated(self) -> None:
        """Makes sure that KV computed with older weights is never reused for a later request.

        Raises ValueError where steps are captured and a weight was not changed in place.
        """
        self._check_open()
        self._drain()
        self.runner.weights_updated()
        self.state = scheduler.weights_updated(self.state)

    def stats(self) -> EngineStats:
        """Returns counts of blocks, requests and steps, what memory the engine takes, and notes on
        how it runs. Print it for lines to read."""
        counts = scheduler.stats(self.state, self.runner.notes)
        return replace(counts, memory=self.runner.breakdown, allocated=self._allocated)

    @in_turn
    def close(self) -> None:
        """Releases the model and all memory. Requests that have not ended are dropped."""
        self._closed = True
        self._tickets = ()
        self.runner.close()

    @in_turn
    def _step(self, news: list[RequestOutput]) -> list[RequestOutput]:
        """Returns `news` with all that is not returned yet, after one turn."""
        try:
            self._turn()
        except SchedulerStalled:
            if not self._news:  # what a stream left over comes first
                raise
        news += map(self._news.pop, tuple(self._news))
        self._forget(news)
        return news

    @in_turn
    def _take(self, request_id: str | None, news: list[RequestOutput]) -> None:
        """Adds to `news` an output that was not returned yet, of one request or of any."""
        name = request_id if request_id is not None else next(iter(self._news), None)
        if name in self._news:
            news += map(self._news.pop, (name,))
            self._forget(news)

    def _forget(self, handed_out: list[RequestOutput]) -> None:
        if self._texts is not None:
            self._texts.forget(handed_out)

    @in_turn
    def _put_back(self, news: Iterable[RequestOutput]) -> None:
        """Keeps outputs that did not reach the caller, behind an exception."""
        for output in news:
            newer = self._news.setdefault(output.request_id, output)
            if newer is not output:
                newer.follow(output)

    @in_turn
    def _turn(self) -> None:
        """Schedules and launches one batch, and commits the one that is due."""
        self._check_open()
        self._launch()  # what an exception left of the last turn
        if len(self._tickets) > self._depth:
            self._commit_oldest()
        with self._span("schedule"):
            plan = self._schedule()
        if plan is not None:
            with self._span("launch"):
                self._launch()
        if len(self._tickets) > self._depth or (plan is None and self._tickets):
            self._commit_oldest()
        elif self.state.ended:
            self._commit(None, None, self._tickets)
        elif plan is None and self.state.ids:
            raise SchedulerStalled(
                f"{len(self.state.ids)} requests are unfinished, and the policy "
                f"{self.runner.config.scheduler!r} offers none that can run"
            )

    def _launch(self) -> None:
        """Sees to it that all tickets are launched: the last one may not be."""
        if self._tickets:
            self.runner.resume(self._tickets[-1])

    def _schedule(self) -> Plan | None:
        """Plans the next step, whose ticket is then to be launched."""
        while True:
            before = self.state
            state, plan = scheduler.schedule(before, time.monotonic())
            tickets = (*self._tickets, Ticket(plan)) if plan is not None else self._tickets
            if self.state is before:
                self.state, self._tickets = state, tickets
                return plan

    def _commit_oldest(self) -> None:
        ticket = self._tickets[0]
        with self._span("collect"):
            if not ticket.collected:
                self.runner.collect(ticket)
        with self._span("commit"):
            try:
                self._commit(ticket.plan, ticket.result, self._tickets[1:])
            except ValueError as error:  # a step function that returns what no step can return
                self._commit(ticket.plan, StepResult(error=error), self._tickets[1:])

    def _commit(
        self, plan: Plan | None, result: StepResult | None, tickets: tuple[Ticket, ...]
    ) -> None:
        """Brings a result into the state, and keeps the outputs; `tickets` are left."""
        now = time.monotonic()
        while True:
            before = self.state
            state, outputs = scheduler.commit(before, plan, result, now)
            news = self._with_news(outputs)
            if self.state is before:
                self.state, self._news, self._tickets = state, news, tickets
                return

    def _drain(self) -> None:
        self._launch()
        while self._tickets:
            self._commit_oldest()

    def _with_news(self, outputs: Outputs) -> dict[str, RequestOutput]:
        """Returns the outputs not yet returned, with those of a commit."""
        found = outputs if self._texts is None else self._texts.follow(outputs, self._news)
        return self._news | {output.request_id: output for output in found}

    def _is_unfinished(self, request_id: str | None) -> bool:
        if request_id is None:
            return bool(self.state.ids or self._news)
        return request_id in self.state.ids or request_id in self._news

    def _fresh_id(self) -> str:
        while True:
            request_id = str(self._num_ids)
            self._num_ids += 1
            if not self._is_unfinished(request_id):
                return request_id

    def _tokenize(self, prompt: Prompt) -> Any:
        try:
            return tokenized("prompt", prompt, self.tokenizer)
        except ValueError as error:
            raise RequestRejected(str(error)) from error.__cause__

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed")


def _no_span(name: str) -> AbstractContextManager[None]:
    return nullcontext()
