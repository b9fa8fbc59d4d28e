"""The scheduler, one rule at a time."""

from dataclasses import replace

import numpy as np
import pytest

from cbfn import prefix, scheduler, sequence
from cbfn.config import EngineConfig, SamplingParams
from cbfn.ending import preempt
from cbfn.ordered import OrderedInts
from cbfn.policies import fifo
from cbfn.types import (
    FULL,
    SLIDING,
    CacheSpec,
    InvariantViolation,
    Request,
    RequestOutput,
    RequestRejected,
    RequestStatus,
    StepResult,
)


def start(usable=20, page=4, layers=(FULL,), window=4, model_len=None, **config):
    spec = CacheSpec(layers, page, 16, usable + 2, window, vocab_size=100, max_model_len=model_len)
    return scheduler.init(spec, EngineConfig(**{"safety_margin": 0.0, **config}))


def add(state, request_id, prompt=4, max_tokens=8, eos=(), **params):
    if isinstance(prompt, int):  # different ids, different prompts
        prompt = [(7 * ord(request_id[-1]) + position) % 100 for position in range(prompt)]
    params = SamplingParams(max_tokens=max_tokens, **params)
    return scheduler.submit(state, Request(request_id, list(prompt), params, eos_token_ids=eos))


def result(plan, token=50):
    tokens = [token] * len(plan) if isinstance(token, int) else token
    return StepResult(np.array(tokens)[:, None])


def step(state, token=50, now=0.0):
    """Returns the state after one step whose rows all sample `token`, the plan, the outputs."""
    state, plan = scheduler.schedule(state, now)
    state, outputs = scheduler.commit(state, plan, result(plan, token), now)
    scheduler.check_invariants(state)
    return state, plan, list(outputs)


def rows(plan):
    return dict(zip(plan.request_ids, plan.num_tokens.tolist(), strict=True))


# plans and budgets


def test_nothing_to_do_is_no_plan():
    state = start()
    same, plan = scheduler.schedule(state)
    assert plan is None
    assert same is state
    same, outputs = scheduler.commit(state, None, None)
    assert (same, list(outputs)) == (state, [])


def test_prompt_is_computed_in_chunks_of_the_token_budget():
    state = add(add(start(max_batch_tokens=6), "a", 10), "b", 3)
    seen = []
    for _ in range(3):
        state, plan, _ = step(state)
        seen.append(rows(plan))
    assert seen == [{"a": 6}, {"a": 4, "b": 2}, {"a": 1, "b": 1}]


def test_row_budget_bounds_the_active_requests():
    state = start(max_requests_per_batch=2)
    for request_id in "abc":
        state = add(state, request_id, max_tokens=2)
    state, plan, _ = step(state)
    assert plan.request_ids == ("a", "b")
    state, plan, _ = step(state)
    assert plan.request_ids == ("a", "b")
    state, plan, _ = step(state)
    assert plan.request_ids == ("c",)


def test_request_whose_last_token_is_in_flight_frees_its_row_and_is_not_planned_again():
    state = start(max_requests_per_batch=1)
    state = add(add(state, "a", max_tokens=1), "b")
    state, first = scheduler.schedule(state)
    state, second = scheduler.schedule(state)
    assert (first.request_ids, second.request_ids) == (("a",), ("b",))
    scheduler.check_invariants(state)


def test_fifo_takes_decoding_then_prefilling_then_waiting():
    state = add(start(max_batch_tokens=6), "a", 4)
    state, _, _ = step(state)
    state = add(add(state, "b", 9), "c", 2)
    state, plan, _ = step(state)
    assert rows(plan) == {"a": 1, "b": 5}
    assert (state.decoding, state.prefilling, list(state.waiting)) == (["a"], ["b"], ["c"])
    state, plan, _ = step(state)
    assert rows(plan) == {"a": 1, "b": 4, "c": 1}


def test_prefill_first_takes_prefilling_and_waiting_before_decoding():
    state = add(start(max_batch_tokens=6, scheduler="prefill_first"), "a", 4)
    state, _, _ = step(state)
    state = add(add(state, "b", 9), "c", 2)
    state, plan, _ = step(state)
    assert rows(plan) == {"b": 6}
    state, plan, _ = step(state)
    assert rows(plan) == {"b": 3, "c": 2, "a": 1}


def test_prefill_first_lets_nobody_be_overtaken_without_end():
    state = start(
        usable=60, max_batch_tokens=4, max_requests_per_batch=3, scheduler="prefill_first"
    )
    state = add(state, "old", 4, max_tokens=30)
    state, _, _ = step(state)
    admitted, most, number = 0, 0, 0
    for _ in range(150):
        if "old" not in state.ids:
            break
        while len(state.waiting) < 3:
            state = add(state, f"new {number}", 4, max_tokens=1)
            number += 1
        state, plan, _ = step(state)
        if "old" in plan.request_ids:
            admitted = 0
        admitted += sum(start == 0 for start in plan.starts.tolist())
        most = max(most, admitted)
    assert 3 <= most <= 2 * 3
    assert "old" not in state.ids


def test_request_is_overtaken_once_a_batch_of_others_was_admitted_without_it():
    state = start(
        scheduler=lambda state: state.waiting if "old" in state.seats else fifo(state),
        max_requests_per_batch=3,
    )
    state, _, _ = step(add(state, "old"))
    for number in range(3):
        assert state.overtaken == []
        state, _, _ = step(add(state, f"new {number}", max_tokens=1))
    assert state.overtaken == ["old"]


def test_policy_is_consumed_lazily_and_may_repeat_itself():
    taken = []

    def policy(state):
        for request_id in [*state.decoding, *state.waiting, *state.decoding, *state.waiting]:
            taken.append(request_id)
            yield request_id

    state = start(scheduler=policy, max_batch_tokens=5)
    for request_id in "abcd":
        state = add(state, request_id, 2)
    state, plan, _ = step(state)
    assert rows(plan) == {"c": 1, "a": 2, "b": 2}  # rows of one token stand first
    assert taken == ["a", "b", "c"]
    state, plan, _ = step(state)
    assert len(set(plan.request_ids)) == len(plan)


def test_request_that_the_policy_leaves_out_does_not_run():
    state = add(start(scheduler=lambda state: ()), "a")
    state, plan = scheduler.schedule(state)
    assert plan is None
    assert list(state.waiting) == ["a"]


def test_policy_that_yields_an_unknown_id_is_an_error():
    state = add(start(scheduler=lambda state: ["nobody"]), "a")
    with pytest.raises(ValueError, match=r"policy: .*'nobody'"):
        scheduler.schedule(state)


def test_nobody_slips_past_a_request_that_can_not_be_admitted_yet():
    state = add(start(usable=6), "a", 9)
    state, _, _ = step(state)  # three of six chunks
    state = add(add(state, "large", 20), "small", 2)
    state, plan, _ = step(state)
    assert plan.request_ids == ("a",)
    assert list(state.waiting) == ["large", "small"]


@pytest.mark.parametrize(("margin", "admitted"), [(0.0, True), (0.25, True), (0.3, False)])
def test_safety_margin_holds_new_prefills_back(margin, admitted):
    state = add(start(usable=8, safety_margin=margin), "a", 8)
    state, _, _ = step(state)  # two chunks, and a third for the next token
    state = add(state, "b", 12)
    state, plan, _ = step(state)
    assert ("b" in plan.request_ids) == admitted


def test_safety_margin_does_not_count_when_nothing_is_active():
    state = add(start(usable=4, safety_margin=0.9), "a", 16, max_tokens=1)
    assert step(state)[1].request_ids == ("a",)


# preemption


def pressed(*lengths, usable, **config):
    """Returns the state in which requests of these prompt lengths are decoding, and their plan."""
    state = start(usable=usable, **config)
    for number, length in enumerate(lengths):
        state = add(state, f"r{number}", range(10 * number, 10 * number + length), 40)
    state, plan, _ = step(state)
    assert len(plan) == len(lengths)
    return state


def test_newest_stalled_request_is_preempted_until_the_rest_has_what_it_needs():
    state = pressed(8, 8, 8, usable=7)  # all three cross into a new chunk, one is left
    state, plan, _ = step(state, 51)
    assert plan.request_ids == ("r0",)
    assert state.decoding == ["r0", "r1"]
    assert list(state.waiting) == ["r2"]
    assert state.num_preemptions == 1
    state, plan, _ = step(state, 52)
    assert plan.request_ids == ("r0", "r1")


def test_request_in_the_plan_is_no_victim_though_it_is_newer():
    state = pressed(8, 6, usable=4)  # r0 needs a chunk, r1 has room for two more tokens
    state, plan, _ = step(state)
    assert plan.request_ids == ("r1",)
    assert list(state.waiting) == ["r0"]


def test_last_active_request_is_never_preempted_and_something_fits_in_the_same_call():
    state = pressed(8, 8, usable=4)  # both need a chunk, none is left
    state, plan, _ = step(state)
    assert plan.request_ids == ("r0",)
    assert list(state.waiting) == ["r1"]


def test_preempted_request_waits_at_its_place_of_arrival():
    state = pressed(8, 8, usable=4)
    state = add(state, "later", 2)
    state, _, _ = step(state)
    assert list(state.waiting) == ["r1", "later"]
    state = scheduler.cancel(state, "r0")
    state, plan, _ = step(state)
    assert plan.request_ids[0] == "r1"


def test_preempted_request_resumes_with_the_same_tokens():
    state = pressed(8, 8, usable=4, allow_block_sharing=False)
    for token in (61, 62):  # r0 goes on; r1 was preempted with one token, 50
        state, plan, outputs = step(state, token)
        assert [o.request_id for o in outputs] == ["r0"]
    state = scheduler.cancel(state, "r0")
    state, plan, outputs = step(state, 63)
    assert rows(plan) == {"r1": 9}
    assert (plan.epochs.tolist(), plan.starts.tolist()) == ([1], [0])
    cancelled, resumed = outputs
    assert cancelled.finish_reason == "cancelled"
    assert resumed.token_ids == [50, 63]
    assert resumed.num_preemptions == 1


def test_token_in_flight_of_a_preempted_request_is_delivered_and_waited_for():
    state = pressed(7, 7, usable=4)
    state, first = scheduler.schedule(state)  # both fill their second chunk
    state, second = scheduler.schedule(state)  # both need a third: r1 has to go
    assert second.request_ids == ("r0",)
    assert state.entries[1].in_flight
    cancelled = scheduler.cancel(state, "r0")
    assert scheduler.schedule(scheduler.commit(cancelled, first, result(first))[0])[1] is not None
    state, outputs = scheduler.commit(state, first, result(first, [71, 72]))
    assert {o.request_id: list(o.token_ids) for o in outputs} == {"r0": [50, 71], "r1": [50, 72]}
    assert not state.entries[1].in_flight
    assert state.num_generated_tokens == 4


def test_all_that_were_preempted_in_flight_are_delivered_though_one_has_no_token():
    state = start(max_batch_tokens=4, scheduler=lambda state: list(state.waiting)[::-1])
    state, plan = scheduler.schedule(add(add(state, "a", 9), "b", 3))
    assert rows(plan) == {"a": 1, "b": 3}
    for request_id in "ab":
        state = preempt(state, state.seats[request_id])
    state, (output,) = scheduler.commit(state, plan, result(plan))
    assert (output.request_id, output.token_ids) == ("b", [50])
    scheduler.check_invariants(state)


def test_token_of_a_preempted_request_can_be_its_last():
    state, plan = scheduler.schedule(add(start(), "a", max_tokens=1))
    state = preempt(state, state.seats["a"])
    state, (output,) = scheduler.commit(state, plan, result(plan))
    assert (output.finish_reason, output.token_ids) == ("length", [50])
    assert not state.entries
    assert not state.ids


# ends


def test_request_ends_with_its_eos_its_stop_token_or_its_length():
    state = add(start(), "eos", eos=(50, 9))
    state = add(state, "stop", stop_token_ids=[50])
    state = add(state, "both", eos=(50,), stop_token_ids=[50])
    state = add(state, "ignores", eos=(50,), ignore_eos=True)
    state = add(state, "ignores, stops", eos=(50,), ignore_eos=True, stop_token_ids=[50])
    state = add(state, "length", max_tokens=1)
    _, _, outputs = step(state)
    ends = {o.request_id: (o.finish_reason, o.stop_reason) for o in outputs}
    assert ends == {
        "eos": ("stop", None),
        "stop": ("stop", 50),
        "both": ("stop", None),
        "ignores": (None, None),
        "ignores, stops": ("stop", 50),
        "length": ("length", None),
    }
    assert all(o.token_ids == [50] for o in outputs)


def test_requests_with_few_stop_ids_do_not_stop_at_the_padding_of_others():
    state = add(add(start(), "a", stop_token_ids=[7, 8, 9]), "b")
    state = add(state, "c", stop_token_ids=[50])
    _, _, outputs = step(state)
    assert {o.request_id: o.finish_reason for o in outputs} == {"a": None, "b": None, "c": "stop"}


def test_model_length_bounds_prompt_and_output():
    state = start(model_len=6)
    with pytest.raises(RequestRejected, match=r"prompt of 6 tokens .* model takes 6"):
        add(state, "a", 6)
    state = add(state, "a", 4, max_tokens=None)
    state, _, _ = step(state)
    state, _, outputs = step(state)
    assert (outputs[0].finish_reason, len(outputs[0].token_ids)) == ("length", 2)


@pytest.mark.parametrize("when", ["waiting", "active", "in flight"])
def test_cancel_gives_one_terminal_output_with_the_tokens_so_far(when):
    state = add(start(), "a")
    plan = None
    if when != "waiting":
        state, _, _ = step(state)
    if when == "in flight":
        state, plan = scheduler.schedule(state)
    state = scheduler.cancel(state, "a")
    assert scheduler.cancel(state, "a") is state
    scheduler.check_invariants(state)
    assert state.cache.pool.num_owned == 0
    tokens = None if plan is None else result(plan)
    state, outputs = scheduler.commit(state, plan, tokens)
    (output,) = outputs
    assert (output.status, output.finish_reason) == (RequestStatus.CANCELLED, "cancelled")
    assert output.token_ids == ([] if when == "waiting" else [50])
    assert list(scheduler.commit(state, None, None)[1]) == []


def test_finish_ends_a_request_with_the_tokens_that_are_wanted():
    state = add(start(), "a")
    for token in (1, 2, 3):
        state, _, _ = step(state, token)
    for wrong in (-1, 4):
        with pytest.raises(ValueError, match=rf"\[0, 3\], got {wrong}"):
            scheduler.finish(state, "a", wrong, "stop")
    with pytest.raises(ValueError, match='"stop" or "length"'):
        scheduler.finish(state, "a", 2, "cancelled")
    assert scheduler.finish(state, "unknown", 2, "stop") is state
    state = scheduler.finish(state, "a", 2, "stop", "END")
    _, (output,) = scheduler.commit(state, None, None)
    assert (output.status, output.stop_reason) == (RequestStatus.FINISHED, "END")
    assert output.token_ids == [1, 2]


def test_failed_step_fails_its_rows_and_those_that_carry_from_them():
    state = add(add(start(), "a"), "b", max_tokens=2)
    state, _, _ = step(state)
    state, first = scheduler.schedule(state)
    state = add(state, "c")
    state, second = scheduler.schedule(state)
    assert second.request_ids == ("a", "c")
    error = RuntimeError("out of memory")
    state, outputs = scheduler.commit(state, first, StepResult(error=error))
    assert {o.request_id: (o.status, o.error) for o in outputs} == {
        "a": (RequestStatus.FAILED, error),
        "b": (RequestStatus.FAILED, error),
    }
    assert all(o.token_ids == [50] for o in outputs)
    state, outputs = scheduler.commit(state, second, result(second))
    assert [(o.request_id, list(o.token_ids)) for o in outputs] == [("c", [50])]
    scheduler.check_invariants(state)


def test_failed_step_publishes_nothing():
    state = add(start(), "a", 12)
    state, plan = scheduler.schedule(state)
    state, _ = scheduler.commit(state, plan, StepResult(error=RuntimeError()))
    assert not state.cache.key_of
    assert state.cache.pool.num_free == 20


def test_id_is_in_use_until_its_terminal_output_was_handed_out():
    state = add(start(), "a", max_tokens=1)
    with pytest.raises(RequestRejected, match="in use"):
        add(state, "a")
    state = scheduler.cancel(state, "a")
    with pytest.raises(RequestRejected, match="in use"):
        add(state, "a")
    state, _ = scheduler.commit(state, None, None)
    assert list(add(state, "a").waiting) == ["a"]


# submissions


def test_full_queue_refuses():
    state = add(add(start(max_queue_size=2), "a"), "b")
    with pytest.raises(RequestRejected, match=r"2 requests wait already \(max_queue_size=2\)"):
        add(state, "c")
    assert list(state.waiting) == ["a", "b"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("n", 2), ("stop", ["x"]), ("logprobs", 1), ("min_tokens", 1), ("repetition_penalty", 1.1)],
)
def test_parameter_that_is_not_served_is_refused(field, value):
    with pytest.raises(RequestRejected, match=rf"SamplingParams\.{field}: not served yet"):
        add(start(), "a", **{field: value})


def test_deadline_and_priority_are_refused_where_nobody_looks_at_them():
    with pytest.raises(RequestRejected, match=r"Request\.deadline: not served yet, got 3"):
        scheduler.submit(start(), Request("a", [1], deadline=3))
    with pytest.raises(RequestRejected, match=r"Request\.priority: the policy 'fifo'"):
        scheduler.submit(start(), Request("a", [1], priority=1))
    mine = start(scheduler=lambda state: state.waiting)
    assert list(scheduler.submit(mine, Request("a", [1], priority=1)).waiting) == ["a"]


def test_limits_of_submission_are_exact():
    state = start(usable=3, page=4)
    add(state, "fits", 12)
    with pytest.raises(RequestRejected, match=r"13 tokens can never fit.* 12 tokens .*3 chunks"):
        add(state, "too long", 13)
    add(state, "known", [99])
    with pytest.raises(RequestRejected, match=r"prompt_token_ids\[1\]: .*\[0, 100\), got 100"):
        add(state, "unknown", [0, 100])


# commits


def test_plans_commit_in_order_and_results_fit_their_plans():
    state = add(start(), "a")
    state, first = scheduler.schedule(state)
    state, second = scheduler.schedule(state)
    with pytest.raises(ValueError, match="at most one plan may be uncommitted"):
        scheduler.schedule(state)
    with pytest.raises(ValueError, match="expected 0, got 1"):
        scheduler.commit(state, second, result(second))
    a_list = StepResult(np.array([[1]]))
    object.__setattr__(a_list, "token_ids", [[1]])  # the type checks of the tests let none pass
    for wrong in (
        StepResult(),
        a_list,
        StepResult(np.zeros((2, 1), int)),
        StepResult(np.zeros((1, 2), int)),
        StepResult(np.zeros((1, 0), int)),
        StepResult(np.array([[100]])),
        StepResult(np.array([[-1]])),
        StepResult(np.array([[1]]), num_tokens=np.array([2])),
    ):
        with pytest.raises(ValueError, match=r"StepResult\."):
            scheduler.commit(state, first, wrong)
    with pytest.raises(ValueError, match="got None"):
        scheduler.commit(state, first, None)
    with pytest.raises(ValueError, match="result=None with plan=None"):
        scheduler.commit(state, None, result(first))
    state, _ = scheduler.commit(state, first, StepResult(np.array([[1]]), np.array([1])))
    state, _ = scheduler.commit(state, second, result(second))
    with pytest.raises(ValueError, match="expected no plan at all"):
        scheduler.commit(state, second, result(second))


def test_any_token_is_taken_where_the_vocabulary_is_not_known():
    state = scheduler.init(CacheSpec((FULL,), 4, 16, 10))
    state, plan = scheduler.schedule(add(state, "a"))
    for wrong in (-1, 2**31):
        with pytest.raises(ValueError, match=r"token_ids: expected ids in \[0, 2147483648\)"):
            scheduler.commit(state, plan, result(plan, wrong))
    _, (output,) = scheduler.commit(state, plan, result(plan, 2**31 - 1))
    assert output.token_ids == [2**31 - 1]


def test_rows_that_do_not_sample_may_hold_any_value():
    state = add(start(max_batch_tokens=3), "a", 5)
    state, plan = scheduler.schedule(state)
    state, outputs = scheduler.commit(state, plan, result(plan, -7))
    assert list(outputs) == []


class Shown:
    """Shows token ids as text."""

    def text(self, token_ids, num_tokens, final):
        return "".join(f"<{i}>" for i in token_ids[:num_tokens])

    def new_text(self, text, token_ids, before):
        return text


def test_outputs_are_a_sequence_and_stay_as_they_were():
    state = scheduler.cancel(add(add(add(start(), "a"), "b"), "gone"), "gone")
    state, plan = scheduler.schedule(state, now=2.0)
    state, outputs = scheduler.commit(state, plan, result(plan, [3, 4]), now=3.0)
    assert [o.request_id for o in outputs] == ["gone", "a", "b"]
    assert outputs[0].finish_reason == "cancelled"
    assert outputs[-1] == outputs[2]
    assert [o.token_ids for o in outputs[1:]] == [[3], [4]]
    for index in (3, -4):
        with pytest.raises(IndexError):
            outputs[index]
    for _ in range(3):
        state, _, _ = step(state, 9)
    assert [list(o.token_ids) for o in outputs] == [[], [3], [4]]
    named = outputs.with_text(dict.fromkeys(["gone", "a", "b"], Shown()))
    assert [o.text for o in named] == ["", "<3>", "<4>"]
    assert outputs[1].status is RequestStatus.DECODING


def test_times_are_those_of_the_callers_clock():
    state = start()
    state = scheduler.submit(state, Request("a", [1], SamplingParams(max_tokens=2), arrival=1.0))
    state, plan = scheduler.schedule(state, now=2.0)
    state, (first,) = scheduler.commit(state, plan, result(plan), now=3.0)
    state, plan = scheduler.schedule(state, now=4.0)
    state, (last,) = scheduler.commit(state, plan, result(plan), now=5.0)
    assert first.times == (1.0, 2.0, 3.0, 3.0)
    assert last.times == (1.0, 2.0, 3.0, 5.0)


def test_old_state_can_be_committed_again_with_other_values():
    state, plan = scheduler.schedule(add(start(), "a"))
    one, first = scheduler.commit(state, plan, result(plan, 1))
    other, second = scheduler.commit(state, plan, result(plan, 2))
    one, _, (a,) = step(one, 11)
    other, _, (b,) = step(other, 22)
    assert ([*a.token_ids], [*b.token_ids]) == ([1, 11], [2, 22])
    assert ([*first[0].token_ids], [*second[0].token_ids]) == ([1], [2])


# cache


def test_prefix_of_an_earlier_request_is_not_computed_again():
    state = add(start(), "a", range(9), max_tokens=1)
    state, _, _ = step(state)
    state = add(state, "b", range(12), max_tokens=1)
    state, plan, (output,) = step(state)
    assert (plan.starts.tolist(), plan.num_tokens.tolist()) == ([8], [4])
    assert output.num_cached_tokens == 8
    assert scheduler.stats(state).num_cached_tokens == 8


def test_block_is_shared_only_once_it_is_computed():
    state = add(start(), "a", range(9))
    state, first = scheduler.schedule(state)
    state = add(state, "b", range(9))
    state, second = scheduler.schedule(state)  # a is still in flight
    assert second.starts[second.request_ids.index("b")] == 0
    state, _ = scheduler.commit(state, first, result(first))
    state = add(state, "c", range(9))
    state, _ = scheduler.commit(state, second, result(second))
    state, third, _ = step(state)
    assert third.starts[third.request_ids.index("c")] == 8


def test_generated_tokens_are_shared_too():
    state = add(start(), "a", [1, 2, 3], max_tokens=6)
    for token in (4, 5, 6, 7, 8, 9):
        state, _, _ = step(state, token)
    state = add(state, "b", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    state, plan, _ = step(state)
    assert plan.starts.tolist() == [8]


def test_kv_of_older_weights_is_never_reused():
    state = add(start(), "running", range(9), max_tokens=20)
    state, _, _ = step(state)
    state = scheduler.weights_updated(state)
    assert state.weight_version == 1
    state = add(state, "b", range(9), max_tokens=1)
    state, plan, _ = step(state)
    assert plan.starts[plan.request_ids.index("b")] == 0
    for _ in range(8):  # what the older request goes on to compute is not shared either
        state, _, _ = step(state, 7)
    state = add(state, "c", [*range(9), 50, 7, 7, 7, 7])
    state, plan, _ = step(state)
    assert plan.starts[plan.request_ids.index("c")] == 8  # that is b's


def test_sliding_blocks_go_back_to_the_pool_behind_the_window():
    state = add(start(layers=(SLIDING,), page=2, window=4), "a", 3, max_tokens=20)
    held = []
    for _ in range(12):
        state, _, _ = step(state)
        held.append(state.cache.pool.num_owned)
    assert max(held[3:]) <= 3
    assert state.cache.pool.num_cached > 0  # they stay known while there is room


def test_stats_count_everything():
    state = add(add(start(usable=6, max_requests_per_batch=1), "a", 6), "b", 6)
    state, _, _ = step(state)
    stats = scheduler.stats(state, notes=["a note"])
    assert (stats.total_blocks, stats.free_blocks, stats.owned_blocks) == (6, 4, 2)
    assert (stats.num_running, stats.num_waiting, stats.num_steps) == (1, 1, 1)
    assert (stats.num_generated_tokens, stats.num_preemptions) == (1, 0)
    assert stats.notes == ("a note",)
    state = scheduler.cancel(state, "a")
    stats = scheduler.stats(state)
    assert (stats.free_blocks, stats.cached_blocks, stats.owned_blocks) == (5, 1, 0)


# what policies see


def test_waiting_requests_are_a_sequence_in_order_of_arrival():
    state = start()
    for request_id in "abcd":
        state = add(state, request_id)
    state = scheduler.cancel(state, "b")
    waiting = state.waiting
    assert (len(waiting), list(waiting), list(reversed(waiting))) == (3, [*"acd"], [*"dca"])
    assert (waiting[0], waiting[-1], waiting[1:]) == ("a", "d", ["c", "d"])
    assert "c" in waiting
    assert "b" not in waiting
    for index in (3, -4):
        with pytest.raises(IndexError):
            waiting[index]


def test_policy_can_look_at_requests():
    state = add(add(start(max_requests_per_batch=1), "a", 3), "b", 5)
    state, _, _ = step(state)
    assert len(state.request("a").prompt_token_ids) == 3
    assert len(state.request("b").prompt_token_ids) == 5
    assert (state.num_active, state.num_free_rows) == (1, 0)
    wider = replace(state, config=replace(state.config, max_requests_per_batch=5))
    wider, _, _ = step(wider)
    assert (wider.num_active, wider.num_free_rows) == (2, 3)
    with pytest.raises(KeyError):
        state.request("c")


# check_invariants


def changed(column, at=0, by=1):
    """Returns a function that changes one number in the table of active requests."""

    def change(state):
        values = getattr(state.sequences, column).copy()
        values[state.sequences.order[at]] += by
        return replace(state, sequences=replace(state.sequences, **{column: values}))

    return change


def pool_changed(name, chunk, value):
    def change(state):
        values = getattr(state.cache.pool, name).copy()
        values[chunk] = value
        pool = replace(state.cache.pool, **{name: values})
        return replace(state, cache=replace(state.cache, pool=pool))

    return change


def window_lost(state):
    s = state.sequences
    sequences, chunks = sequence.drop(s, SLIDING, s.order, s.first[SLIDING][s.order] + 1)
    return replace(state, sequences=sequences, cache=prefix.release(state.cache, chunks))


def plan_changed(**values):
    """Returns a function that replaces columns of the oldest uncommitted plan."""

    def change(state):
        plan, *rest = state.uncommitted
        columns = {name: np.full_like(getattr(plan, name), value) for name, value in values.items()}
        return replace(state, uncommitted=(replace(plan, **columns), *rest))

    return change


def table_changed(**values):
    """Returns a function that sets whole columns of the table of active requests."""
    return lambda s: replace(s, sequences=replace(s.sequences, **values))


def log_lost(state):
    logs = state.sequences.log.copy()
    logs[0] = sequence.TokenLog(logs[0].prompt)
    return table_changed(log=logs)(state)


def seat_taken(state):
    serials = state.sequences.serial.copy()
    serials[2] = 50
    return table_changed(serial=serials)(state)


def chunk_lost(state):
    table = state.sequences.tables[FULL].put(np.array([0]), np.array([1]), 1)
    return table_changed(tables={FULL: table})(state)


def first_moved(state):
    return table_changed(first={FULL: state.sequences.first[FULL] + 1})(state)


def plans_added(count=1, **columns):
    """Returns a function that adds plans which sample nothing, and whose rows are as given."""

    def change(state):
        plan = state.uncommitted[0]
        num_rows = len(columns.get("request_ids", plan.request_ids))
        arrays = ("serials", "epochs", "starts", "num_tokens", "samples", "pending")
        values = {name: np.resize(getattr(plan, name), num_rows) for name in arrays}
        more = replace(plan, **{**values, "samples": np.zeros(num_rows, bool), **columns})
        return replace(state, uncommitted=(*state.uncommitted, *[more] * count))

    return change


def key_changed(key):
    """Returns a function that names the content of chunk 2 otherwise."""

    def change(state):
        cache = state.cache
        chunk_of = cache.chunk_of.delete(cache.key_of[2]).set(key, 2)
        cache = replace(cache, chunk_of=chunk_of, key_of=cache.key_of.set(2, key))
        return replace(state, cache=cache)

    return change


BREAKAGES = {
    "a token too many": ("counts: .* 8 tokens, 6 known and 1 in", changed("num_tokens")),
    "computed beyond its tokens": ("counts: .* 46 of 7", changed("num_computed", by=40)),
    "computed less than nothing": ("counts: .* -1 of 7", changed("num_computed", by=-7)),
    "tokens beyond the limit": ("counts: .* 6 of 7", changed("limit", by=-7)),
    "one known token less": ("counts: .* 5 known", changed("num_generated", by=-1)),
    "an epoch later": ("counts: .* 0 in flight", changed("epoch")),
    "log": ("log: request 'a' lost tokens", log_lost),
    "fewer computed": ("chunks: request 'a' holds 2", changed("num_computed", by=-5)),
    "a null chunk is held": ("chunks: seat 0 holds .* 0 to 2 of full", chunk_lost),
    "a chunk before the first": ("chunks: seat 0 holds .* 1 to 2 of full", first_moved),
    "order of serials": (r"order: serials \[90 ", changed("serial", by=90)),
    "order of seats": (
        r"order: serials \[1 0\]",
        lambda s: replace(s, sequences=replace(s.sequences, order=s.sequences.order[::-1].copy())),
    ),
    "a seat that nobody has": (r"order: \[0 1\] are not", seat_taken),
    "owners": (r"owners: chunks \[2\] have \[5\], not \[1\]", pool_changed("owners", 2, 5)),
    "published": ("pages: 1 chunks are cached", pool_changed("published", -1, True)),
    "num_cached": (
        "pages: 0 chunks are cached",
        lambda s: replace(s, cache=replace(s.cache, pool=replace(s.cache.pool, num_cached=3))),
    ),
    "seat without an id": (
        "seats: 1 ids have a seat, 2",
        lambda s: replace(s, seats=s.seats.delete("a")),
    ),
    "seats of another": (
        "seats: request '[ab]' is not in seat",
        lambda s: replace(s, seats=s.seats.set("a", s.seats["b"]).set("b", s.seats["a"])),
    ),
    "rows": (
        "rows: 2 requests are active",
        lambda s: replace(s, config=replace(s.config, max_requests_per_batch=1)),
    ),
    "queue": ("queue: ", lambda s: replace(s, queue=OrderedInts())),
    "an id nowhere": (
        "requests: .*'ghost'",
        lambda s: replace(s, ids=s.ids.set("ghost", 77)),
    ),
    "a place without an id": ("requests: ", lambda s: replace(s, ids=s.ids.delete("c"))),
    "two places": ("requests: ", lambda s: replace(s, ended=(RequestOutput("c", (1,)),))),
    "three plans": ("uncommitted: 3 plans", plans_added(2)),
    "token budget": ("token budget: step 1 has 1200", plan_changed(num_tokens=600)),
    "row budget": (
        "row budget: step 1 has 3 rows",
        plans_added(request_ids=("a", "b", "c"), serials=np.array([7, 8, 9])),
    ),
    "a request twice": ("plan: step 1 has a", plans_added(serials=np.array([0, 0]))),
    "published too early": ("published: .* is not computed yet", plan_changed(starts=3)),
    "a lower key": ("published: chunk 2 of seat 0 has another's", key_changed(b"\0" * 17)),
    "a higher key": ("published: chunk 2 of seat 0 has another's", key_changed(b"\xff" * 17)),
}


@pytest.mark.parametrize("breakage", sorted(BREAKAGES))
def test_check_invariants_finds(breakage):
    state = start(max_requests_per_batch=2)
    for request_id in "abc":
        state = add(state, request_id, 5)
    state, _, _ = step(state)
    state, plan = scheduler.schedule(state)
    scheduler.check_invariants(state)
    assert len(plan) == 2
    found, breaks = BREAKAGES[breakage]
    with pytest.raises(InvariantViolation, match=f"^{found}"):
        scheduler.check_invariants(breaks(state))


def test_check_invariants_names_a_chunk_with_an_owner_too_few():
    state = start()
    for request_id in "ab":
        state, _, _ = step(add(state, request_id, range(5)))
    shared = int(state.cache.pool.owners.argmax())
    with pytest.raises(InvariantViolation, match=rf"owners: chunks \[{shared}\] have \[1\], not"):
        scheduler.check_invariants(pool_changed("owners", shared, 1)(state))


def test_check_invariants_finds_a_window_that_was_let_go_too_early():
    state = add(start(layers=(SLIDING,), page=2, window=4), "a", 5)
    state, _, _ = step(state)
    with pytest.raises(InvariantViolation, match="window: seat 0 let go column 1,"):
        scheduler.check_invariants(window_lost(state))
