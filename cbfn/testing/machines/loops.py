"""A scheduler under any timing of submissions, steps, cancels and failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, ClassVar

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from cbfn import scheduler
from cbfn.config import EngineConfig, SamplingParams
from cbfn.testing.again import branch, replay
from cbfn.testing.functions import Functions
from cbfn.testing.loop import CheckedLoop
from cbfn.testing.machines.base import Machine
from cbfn.testing.strategies import VOCAB_SIZE, cache_specs, engine_configs, requests
from cbfn.types import CacheSpec, Request

IDS = "abcdefgh"
_ids = st.sampled_from(IDS)
_requests = requests(request_ids=_ids, max_prompt=12, max_tokens=32, families=2)
_padding = st.sampled_from([(0, 0), (0, 0), (1, 0), (0, 1), (5, 3)])


class LoopMachine(Machine):
    """A `CheckedLoop` and the hooks that say which scheduler it drives.

    Override `make_policy`, or any of `init`, `submit`, `cancel`, `finish`, `schedule`, `commit`,
    `weights_updated` and `check_state`, which have the signatures of `cbfn.scheduler`. A state may
    be of any type; plans are `cbfn.types.Plan`. `specs` and `configs` say what it is tried with.

    `totals` counts, over all runs of a class, the steps and what seldom happens in them.
    """

    __test__ = False
    specs: ClassVar[Any] = cache_specs()
    configs: ClassVar[Any] = engine_configs()
    totals: ClassVar[Counter[str]] = Counter()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.totals = Counter()

    def make_policy(self, config: EngineConfig) -> str | Callable[[Any], Iterable[str]]:
        """Returns the policy to be tested; by default the one that was drawn."""
        return config.scheduler

    def init(self, spec: CacheSpec, config: EngineConfig) -> Any:
        return scheduler.init(spec, config)

    def submit(self, state: Any, request: Request) -> Any:
        return scheduler.submit(state, request)

    def cancel(self, state: Any, request_id: str) -> Any:
        return scheduler.cancel(state, request_id)

    def finish(self, state: Any, *arguments: Any, **named: Any) -> Any:
        return scheduler.finish(state, *arguments, **named)

    def schedule(self, state: Any, now: float = 0.0) -> Any:
        return scheduler.schedule(state, now)

    def commit(self, state: Any, plan: Any, result: Any, now: float = 0.0) -> Any:
        return scheduler.commit(state, plan, result, now)

    def weights_updated(self, state: Any) -> Any:
        return scheduler.weights_updated(state)

    def check_state(self, state: Any) -> None:
        scheduler.check_invariants(state)

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        """An empty scheduler on a small cache."""
        spec = data.draw(self.specs, label="spec")
        config = data.draw(self.configs, label="config")
        config = replace(config, scheduler=self.make_policy(config))
        names = (
            "init", "submit", "cancel", "finish", "schedule", "commit", "weights_updated",
            "check_state",
        )  # fmt: skip
        functions = Functions(**{name: getattr(self, name) for name in names})
        self.loop = CheckedLoop(spec, config, functions)

    @rule(request=_requests)
    def submits(self, request: Request) -> None:
        """A request arrives; it may be too large, or its id in use."""
        self.loop.submit(request)

    @rule(several=st.lists(_requests, min_size=2, max_size=5))
    def submits_several(self, several: list[Request]) -> None:
        """Requests arrive together and compete for memory."""
        for request in several:
            self.loop.submit(request)

    @rule(request_id=_ids)
    def cancels(self, request_id: str) -> None:
        """A request is cancelled: waiting, active, in flight, over, unknown, or once more."""
        self.loop.cancel(request_id)

    @rule(request_id=_ids, num_tokens=st.integers(0, 8), reason=st.sampled_from(["stop", "length"]))
    def finishes(self, request_id: str, num_tokens: int, reason: str) -> None:
        """The caller ends a request early, as for a stop string."""
        self.loop.finish(request_id, num_tokens, reason, "###" if reason == "stop" else None)

    @rule(what=st.sampled_from(["hand out", "cancel active", "new weights", "nonsense", "flood"]))
    def interrupts(self, what: str) -> None:
        """Something out of the ordinary, see the methods' docstrings."""
        methods: dict[str, Callable[[], Any]] = {
            "hand out": self.loop.flush,
            "cancel active": self._cancel_active,
            "new weights": self._update_weights,
            "nonsense": self.loop.submit_nonsense,
            "flood": self._flood,
        }
        methods[what]()

    def _cancel_active(self) -> None:
        """All that was ever in a plan is cancelled at once, and what waits goes on."""
        for request_id, followed in list(self.loop.live.items()):
            if followed.epoch >= 0:
                self.loop.cancel(request_id)

    def _update_weights(self) -> None:
        """With nothing in flight KV computed so far is void; the same texts come again."""
        while self.loop.launched:
            self.loop.collect()
        self.loop.weights_updated()
        self.goes_on(0)

    def _flood(self) -> None:
        """One request is kept, and before each turn another arrives that would fill a step."""
        for request_id in list(self.loop.live)[1:]:
            self.loop.cancel(request_id)
        budget, rows = self.loop.config.token_budget, self.loop.config.row_budget
        for turn in range(2 * rows + 6):
            fresh = len(self.loop.history) % VOCAB_SIZE  # no other prompt begins with it
            if turn > 3:
                prompt = [fresh] * min(budget, 8)
                self.loop.submit(Request(f"short {turn}", prompt, SamplingParams(max_tokens=1)))
            self.loop.turn(self.depth_at_rest)

    @rule(pick=st.integers(0, 7))
    def goes_on(self, pick: int) -> None:
        """A text comes again with what was generated, as a conversation goes on."""
        earlier = [*self.loop.live.values(), *self.loop.over[-4:]]
        if earlier:
            last = earlier[pick % len(earlier)]
            tokens = (*last.request.prompt_token_ids, *last.expected.token_ids[: last.given])
            self.loop.submit(Request(f"{last.request_id}+", tokens, SamplingParams(max_tokens=24)))

    @rule(picks=st.lists(st.integers(0, 7), min_size=1, max_size=3), turns=st.integers(0, 3))
    def breaks_rows(self, picks: list[int], turns: int) -> None:
        """Some rows of a step have logits that are no numbers; their requests fail, no other."""
        self.loop.turn(self.depth_at_rest, invalid=picks)
        for _ in range(turns):
            self.loop.turn(self.depth_at_rest)

    @rule(salt=st.integers(0, 5))
    def branches(self, salt: int) -> None:
        """An old state is committed again: once with other values, once with the same."""
        branch(self.loop, salt)

    def rest(self) -> None:
        """Whatever is left runs to its end; the same calls once more give the same plans."""
        self.loop.drain(self.depth_at_rest)
        replay(self.loop)
        type(self).totals.update(self.loop.counts)
        for name, count in self.loop.counts.items():
            if count:
                event(name)

    depth_at_rest: ClassVar[int] = 0


class SchedulerMachine(LoopMachine):
    """A scheduler whose every step is committed before the next is planned.

        class TestMine(machines.SchedulerMachine):
            def make_policy(self, config):
                return my_policy

    See `LoopMachine` for what else can be overridden.
    """

    __test__ = False

    @rule(turns=st.integers(1, 12), padding=_padding)
    def steps(self, turns: int, padding: tuple[int, int]) -> None:
        """Some turns of the loop: schedule, run, commit."""
        for _ in range(turns):
            self.loop.turn(0, padding=padding)

    @rule()
    def steps_once(self) -> None:
        """One turn of the loop."""
        self.loop.turn(0)


class PipelineMachine(LoopMachine):
    """A scheduler that plans a step while the one before it runs, with any timing of launch,
    collect, cancel, preemption, finish and failure."""

    __test__ = False
    depth_at_rest = 1

    @precondition(lambda self: len(self.loop.launched) < 2)
    @rule(fails=st.sampled_from([False, False, False, True]))
    def launches(self, fails: bool) -> None:
        """The next step is planned and enqueued; one that will raise fails its own requests and
        nobody else's."""
        self.loop.launch(failed=fails)
        if len(self.loop.launched) == 2:
            self.loop.disturb_order()

    @precondition(lambda self: self.loop.launched)
    @rule()
    def collects(self) -> None:
        """The oldest step's results arrive."""
        self.loop.collect()

    @rule(
        turns=st.integers(1, 12),
        depth=st.sampled_from([0, 1, 1, 1]),
        padding=_padding,
        failing=st.sampled_from([0, 0, 0, 1, 3]),
    )
    def runs(self, turns: int, depth: int, padding: tuple[int, int], failing: int) -> None:
        """Some turns of the loop at one depth, of which one may fail; then everything in flight
        stays there."""
        for turn in range(1, turns + 1):
            self.loop.turn(depth, failed=turn == failing, padding=padding)

    @rule(request=_requests, turns=st.integers(0, 3), pick=st.integers(0, 15), again=st.booleans())
    def cancels_in_flight(self, request: Request, turns: int, pick: int, again: bool) -> None:
        """A request is cancelled while steps with it run; its id may be another's at once."""
        for _ in range(turns):
            self.loop.turn(1)
        if len(self.loop.launched) < 2:
            self.loop.launch()
        flying = {i: followed for i, followed in self.loop.live.items() if followed.in_flight}
        newest = self.loop.launched[-1].rows if self.loop.launched else ()
        # one that the newest step leaves out may have been preempted
        some = [i for i, followed in flying.items() if followed not in newest] or list(flying)
        request_id = some[pick % len(some)] if some else request.request_id
        self.loop.cancel(request_id)
        if again:
            self.loop.flush()
            self.loop.submit(replace(request, request_id=request_id))
