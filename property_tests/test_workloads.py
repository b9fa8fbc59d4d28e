"""Whole runs: the schedule never changes what a request gets.

`run` raises where a request's tokens are not those that it gets alone; see `cbfn.testing.loop` for
everything else that is checked on the way.
"""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from cbfn.policies import fifo
from cbfn.testing import strategies
from cbfn.testing.oracles import run_alone
from cbfn.testing.workloads import run
from cbfn.types import RequestStatus


@given(workload=strategies.workloads())
def test_any_workload_gives_each_request_the_tokens_it_gets_alone(workload):
    loop = run(workload)
    alone = run_alone(workload)
    for followed in loop.over:
        tokens = followed.terminal.token_ids
        if followed.terminal.status is RequestStatus.FINISHED:
            assert tokens == alone[followed.request_id].token_ids
        else:
            assert tokens == alone[followed.request_id].token_ids[: len(tokens)]


# where two runs are compared the queue is endless: when it is full depends on the schedule
_ENDLESS = strategies.engine_configs(max_queue_sizes=(0,))


@given(workload=strategies.workloads(configs=_ENDLESS, cancels=False))
def test_async_equals_sync_token_by_token(workload):
    assert tokens(run(workload, depth=0)) == tokens(run(workload, depth=1))


@given(workload=strategies.workloads(configs=_ENDLESS, cancels=False), depth=st.integers(0, 1))
def test_sharing_on_equals_sharing_off(workload, depth):
    on, off = (replace(workload.config, allow_block_sharing=share) for share in (True, False))
    shared, alone = (run(workload, depth=depth, config=config) for config in (on, off))
    assert tokens(shared) == tokens(alone)
    assert all(f.terminal.num_cached_tokens == 0 for f in alone.over)


@given(workload=strategies.workloads(), depth=st.integers(0, 1))
def test_taking_decoding_requests_at_once_equals_taking_them_one_by_one(workload, depth):
    def one_by_one(state):
        return [*state.decoding, *state.prefilling, *state.waiting]

    def plans(policy):
        config = replace(workload.config, scheduler=policy, safety_margin=0.1)
        loop = run(workload, depth=depth, config=config)
        return [call for call in loop.history if call[0] == "schedule"]

    assert plans("fifo") == plans(one_by_one)


@given(workload=strategies.workloads(configs=_ENDLESS, cancels=False))
def test_policies_give_the_same_tokens(workload):
    def newest_first(state):
        return [*state.decoding, *state.prefilling, *reversed(state.waiting)]

    given_by = [
        tokens(run(workload, config=replace(workload.config, scheduler=policy)))
        for policy in ("fifo", "prefill_first", fifo, newest_first)
    ]
    assert all(one == given_by[0] for one in given_by)


@given(
    workload=strategies.workloads(configs=_ENDLESS, cancels=False, max_requests=5),
    budgets=st.tuples(st.integers(1, 40), st.integers(1, 8)),
)
def test_budgets_give_the_same_tokens(workload, budgets):
    other = replace(workload.config, max_batch_tokens=budgets[0], max_requests_per_batch=budgets[1])
    assert tokens(run(workload)) == tokens(run(workload, config=other))


def tokens(loop):
    return {f.request_id: list(f.terminal.token_ids) for f in loop.over}
