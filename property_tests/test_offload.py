"""What is preempted goes to the host and comes back, step by step."""

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbfn import scheduler
from cbfn.config import EngineConfig, SamplingParams
from cbfn.ending import preempt
from cbfn.testing.loop import CheckedLoop
from cbfn.types import FULL, SLIDING, CacheSpec, Request, StepResult
from property_tests.worlds import in_any_order


def request(request_id, prompt, max_tokens):
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return Request(request_id, prompt, params)


def result(plan):
    return StepResult(np.full((len(plan), 1), 5))


def start(num_host_chunks=8):
    """Returns a state in which "b" gives way to "a", and the plan that saves it."""
    spec = CacheSpec(
        ("full_attention",), 1, 16, 2 + 4, vocab_size=40, num_host_chunks=num_host_chunks
    )
    config = EngineConfig(max_requests_per_batch=2, max_batch_tokens=8, safety_margin=0.0)
    state = scheduler.init(spec, config)
    for request_id in "ab":
        state = scheduler.submit(state, request(request_id, (ord(request_id) % 40, 7), 2))
    state, plan = scheduler.schedule(state)
    state, _ = scheduler.commit(state, plan, StepResult(np.array([[1], [2]])))
    state, plan = scheduler.schedule(state)
    assert plan.request_ids == ("a",)
    return state, plan


def start_of_return():
    """Returns a state in which "b" comes back, and the plan that brings it beside "c"."""
    state, plan = start()
    state, _ = scheduler.commit(state, plan, StepResult(np.array([[3]])))
    state = scheduler.submit(state, request("c", (5,), 1))
    return scheduler.schedule(state)


def test_preempted_request_is_saved_and_goes_on_where_it_stopped():
    state, plan = start()
    (save,) = plan.moves_before
    assert save.to_host
    assert len(save.device) == len(save.host) == 2
    assert scheduler.stats(state).free_host_blocks == 6
    state, _ = scheduler.commit(state, plan, StepResult(np.array([[3]])))
    state, plan = scheduler.schedule(state)
    (load,) = plan.moves_before  # nothing else is left to run meanwhile
    assert not load.to_host
    assert load.host.tolist() == save.host.tolist()
    assert plan.request_ids == ("b",)
    assert plan.starts.tolist() == [2]
    assert plan.num_tokens.tolist() == [1]
    assert scheduler.stats(state).free_host_blocks == 8
    assert scheduler.stats(state).num_offloads == 1


def test_others_run_while_the_chunks_come_back():
    state, plan = start_of_return()
    assert plan.request_ids == ("c",)
    assert plan.moves_before == ()
    assert [move.to_host for move in plan.moves_beside] == [False]
    state, plan = scheduler.schedule(state)
    assert plan.request_ids == ("b",)
    assert plan.moves == ()


@pytest.mark.parametrize("num_host_chunks", [0, 1])
def test_without_room_on_the_host_it_is_computed_again(num_host_chunks):
    state, plan = start(num_host_chunks)
    assert plan.moves == ()
    state, _ = scheduler.commit(state, plan, StepResult(np.array([[3]])))
    state, plan = scheduler.schedule(state)
    assert plan.request_ids == ("b",)
    assert plan.starts[0] < 2


def test_what_a_failed_step_was_to_save_is_computed_again():
    state, plan = start()
    state, outputs = scheduler.commit(state, plan, StepResult(error=RuntimeError("planted")))
    assert [output.request_id for output in outputs] == ["a"]
    assert scheduler.stats(state).free_host_blocks == 8
    state, plan = scheduler.schedule(state)
    assert plan.request_ids == ("b",)
    assert plan.moves == ()
    assert plan.starts[0] < 2


def test_nothing_comes_back_before_it_is_known_to_be_saved():
    state, plan = start()
    state = scheduler.cancel(state, "a")
    state, nothing = scheduler.schedule(state)
    assert nothing is None
    state, _ = scheduler.commit(state, plan, StepResult(np.array([[3]])))
    state, plan = scheduler.schedule(state)
    assert plan.request_ids == ("b",)
    assert [move.to_host for move in plan.moves] == [False]


def test_what_a_failed_step_was_to_bring_back_fails_with_it():
    state, plan = start_of_return()
    state, outputs = scheduler.commit(state, plan, StepResult(error=RuntimeError("planted")))
    assert sorted(output.request_id for output in outputs) == ["b", "c"]
    scheduler.check_invariants(state)
    assert not state.ids


def test_kv_of_older_weights_stays_that_of_older_weights():
    state, plan = start()
    state, _ = scheduler.commit(state, plan, StepResult(np.array([[3]])))
    state = scheduler.weights_updated(state)
    state, plan = scheduler.schedule(state)
    assert [move.to_host for move in plan.moves] == [False]
    assert state.sequences.weights[state.seats["b"]] == 0
    assert state.weight_version == 1


def test_chunks_that_left_the_window_are_not_saved():
    """With them, one request alone could need more chunks than there are, for ever."""
    spec = CacheSpec(
        ("sliding_attention",), 1, 16, 2 + 6, 3, vocab_size=40, max_model_len=64, num_host_chunks=20
    )
    config = EngineConfig(
        max_requests_per_batch=2, max_batch_tokens=4, safety_margin=0.0, scheduler="prefill_first"
    )
    state = scheduler.submit(scheduler.init(spec, config), request("a", (1, 2), 3))
    state, plan = scheduler.schedule(state)
    state, _ = scheduler.commit(state, plan, result(plan))
    state = scheduler.submit(state, request("b", (1, 2, *range(3, 15)), 2))
    in_flight, saved = [], []
    for _ in range(60):
        state, plan = scheduler.schedule(state)
        in_flight += [plan] if plan else []
        saved += [len(move.device) for move in (plan.moves if plan else ()) if move.to_host]
        if len(in_flight) > 1 or (in_flight and plan is None):
            oldest = in_flight.pop(0)
            state, _ = scheduler.commit(state, oldest, result(oldest))
    assert not state.ids
    assert saved == [2]


class Ordered:
    """A scheduler whose policy offers what it is told to."""

    def __init__(self, usable_chunks, **settings):
        self.offers = ()
        spec = CacheSpec(
            ("full_attention",), 1, 16, 2 + usable_chunks, vocab_size=40, num_host_chunks=40
        )
        common = {"max_requests_per_batch": 3, "max_batch_tokens": 4, "safety_margin": 0.0}
        config = EngineConfig(scheduler=self.policy, **common, **settings)
        self.state = scheduler.init(spec, config)

    def policy(self, state):
        return [i for i in self.offers if i in (*state.seats, *state.waiting)]

    def submit(self, *arguments):
        self.state = scheduler.submit(self.state, request(*arguments))

    def schedule(self, *offers):
        self.offers = offers
        self.state, plan = scheduler.schedule(self.state)
        scheduler.check_invariants(self.state)
        return plan

    def commit(self, plan, error=None):
        values = result(plan) if error is None else StepResult(error=error)
        self.state, outputs = scheduler.commit(self.state, plan, values)
        scheduler.check_invariants(self.state)
        return [output.request_id for output in outputs if output.status.ended]


def test_requests_that_come_back_together_keep_to_the_token_budget():
    mine = Ordered(usable_chunks=20)
    for request_id in "ab":
        mine.submit(request_id, (ord(request_id) % 40, *range(1, 10)), 9)
        mine.commit(mine.schedule(request_id))
        mine.state = preempt(mine.state, mine.state.seats[request_id])
    plan = mine.schedule("a", "b")
    assert plan.request_ids == ("a",)
    assert plan.num_tokens.tolist() == [4]
    assert [move.to_host for move in plan.moves] == [True, False, False]


def test_nothing_comes_back_while_a_plan_that_computes_it_may_fail():
    mine = Ordered(usable_chunks=9, allow_block_sharing=False)
    mine.submit("a", (1, 2), 8)
    mine.submit("r", tuple(range(3, 10)), 2)
    mine.submit("s", (8,), 3)
    mine.commit(mine.schedule("a", "r"))
    mine.commit(mine.schedule("s"))
    first = mine.schedule("r")
    assert first.request_ids == ("r",)
    second = mine.schedule("r", "s", "a")  # "r" gives way to the others, and is offered again
    assert mine.state.num_preemptions
    ended = mine.commit(first, RuntimeError("planted"))
    assert "r" in ended or "r" not in second.request_ids


@given(st.integers(0, 2**32), st.sampled_from(["fifo", "prefill_first", in_any_order]))
def test_long_prompts_come_back_whole_whatever_fails_or_is_cancelled(seed, policy):
    """Prompts of several chunks each; a quarter of the steps fail."""
    chance = Random(seed)
    layers = chance.choice([(FULL,), (FULL,), (SLIDING,), (FULL, SLIDING), (SLIDING, FULL, FULL)])
    spec = CacheSpec(
        layers,
        page_size=chance.choice([1, 1, 2]),
        page_bytes=16,
        num_chunks=2 + chance.randint(6, 20),
        sliding_window=chance.randint(2, 8) if SLIDING in layers else None,
        vocab_size=40,
        max_model_len=64,
        num_host_chunks=chance.choice([6, 60]),
    )
    config = EngineConfig(
        max_requests_per_batch=chance.randint(3, 5),
        max_batch_tokens=chance.randint(4, 7),
        safety_margin=0.0,
        scheduler=policy,
        allow_block_sharing=chance.random() < 0.5,
        after_weights_update=chance.choice(["keep", "recompute"]),
    )
    loop = CheckedLoop(spec, config)
    for turn in range(70):
        if chance.random() < 0.1:
            length, family = chance.choice([1, 2, 3, 6, 12, 20]), 7 * chance.randint(0, 1)
            prompt = tuple((family + 3 * at) % 40 for at in range(length))
            loop.submit(request(str(turn), prompt, chance.choice([2, 6, 12, 30])))
        if chance.random() < 0.03 and loop.live:
            loop.cancel(chance.choice(sorted(loop.live)))
        if chance.random() < 0.02:
            while loop.launched:
                loop.collect()
            loop.weights_updated()
        loop.turn(depth=chance.randint(0, 1), failed=chance.random() < 0.25)
    loop.drain(1)


def test_one_that_comes_back_beside_a_preemption_has_not_stalled():
    """The toolkit took it for one that should have been preempted first."""
    spec = CacheSpec((SLIDING,), 2, 16, 13, sliding_window=5, vocab_size=40, num_host_chunks=1)
    config = EngineConfig(
        page_size=4,
        max_batch_tokens=4,
        max_requests_per_batch=4,
        scheduler="prefill_first",
        safety_margin=0.0,
    )
    loop = CheckedLoop(spec, config)

    def submit(request_id, prompt, max_tokens):
        params = SamplingParams(max_tokens=max_tokens, temperature=0)
        assert loop.submit(Request(request_id, prompt, params))

    submit("d", (0,), None)
    submit("d+", (0,), 24)
    for _ in range(3):
        loop.turn()
    for request_id, max_tokens in (("a", None), ("c", 1), ("b", None)):
        submit(request_id, (0,), max_tokens)
    loop.turn(1)
    loop.launch()
    loop.cancel("c")
    for _ in range(5):
        loop.turn()
    loop.drain(1)
    assert loop.counts["restore"]
    assert loop.counts["preemption"]
