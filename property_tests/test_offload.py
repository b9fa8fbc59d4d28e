"""What is preempted goes to the host and comes back, step by step."""

import numpy as np
import pytest

from cbfn import scheduler
from cbfn.config import EngineConfig, SamplingParams
from cbfn.types import CacheSpec, Request, StepResult


def start(num_host_chunks=8):
    """Returns a state in which "b" gives way to "a", and the plan that saves it."""
    spec = CacheSpec(
        ("full_attention",), 1, 16, 2 + 4, vocab_size=40, num_host_chunks=num_host_chunks
    )
    config = EngineConfig(max_requests_per_batch=2, max_batch_tokens=8, safety_margin=0.0)
    state = scheduler.init(spec, config)
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    for request_id in "ab":
        prompt = (ord(request_id) % 40, 7)
        state = scheduler.submit(state, Request(request_id, prompt, params))
    state, plan = scheduler.schedule(state)
    state, _ = scheduler.commit(state, plan, StepResult(np.array([[1], [2]])))
    state, plan = scheduler.schedule(state)
    assert plan.request_ids == ("a",)
    return state, plan


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
    state, plan = start()
    state, _ = scheduler.commit(state, plan, StepResult(np.array([[3]])))
    params = SamplingParams(max_tokens=1, temperature=0)
    state = scheduler.submit(state, Request("c", (5,), params))
    state, plan = scheduler.schedule(state)
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
    state, plan = start()
    state, _ = scheduler.commit(state, plan, StepResult(np.array([[3]])))
    params = SamplingParams(max_tokens=1, temperature=0)
    state = scheduler.submit(state, Request("c", (5,), params))
    state, plan = scheduler.schedule(state)
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
