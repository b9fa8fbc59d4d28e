"""The scheduler under any history, step by step and with a step in flight."""

import pytest
from hypothesis import settings

from cbfn.testing import machines
from cbfn.testing.strategies import cache_specs
from property_tests.worlds import OFFLOADING, in_any_order

_MANY = settings.default.max_examples
RARE = (
    "preemption",
    "preemption in flight",
    "cancel in flight",
    "prefix hit",
    "window release",
    "stray row",
    "chunked prefill",
    "resume in chunks",
)


@settings(max_examples=2 * _MANY)
class TestScheduler(machines.SchedulerMachine):
    """Every step is committed before the next is planned."""


@settings(max_examples=4 * _MANY)
class TestPipeline(machines.PipelineMachine):
    """A step is planned while the one before it runs."""


class TestOffload(machines.PipelineMachine):
    """The same where memory is short and the host takes what is preempted, or some of it."""

    specs = OFFLOADING["specs"]
    configs = OFFLOADING["configs"]


@settings(max_examples=_MANY // 2)
class TestOffloadInAnyOrder(machines.PipelineMachine):
    """Requests that are preempted and admitted again in one step, too."""

    specs = OFFLOADING["specs"]
    configs = OFFLOADING["configs"]

    def make_policy(self, config):
        return in_any_order


class TestForeignState(machines.PipelineMachine):
    """Another implementation of the functions, whose states the checks can not look into."""

    specs = cache_specs(num_host_chunks=(0,))  # whose KV comes back is told by the state

    def init(self, spec, config):
        return (super().init(spec, config),)

    def submit(self, state, request):
        return (super().submit(*state, request),)

    def cancel(self, state, request_id):
        return (super().cancel(*state, request_id),)

    def finish(self, state, *arguments):
        return (super().finish(*state, *arguments),)

    def schedule(self, state, now=0.0):
        state, plan = super().schedule(*state, now)
        return (state,), plan

    def commit(self, state, plan, result, now=0.0):
        state, outputs = super().commit(*state, plan, result, now)
        return (state,), outputs

    def weights_updated(self, state):
        return (super().weights_updated(*state),)

    def check_state(self, state):
        super().check_state(*state)


class TestCarryOver(machines.CarryOverMachine):
    """Tokens in flight reach the rows that they belong to."""


def test_what_is_rare_in_service_happens_in_one_step_of_a_hundred():
    steps = TestPipeline.totals["steps"]  # of the test above, in this process
    if steps < 20_000:  # of fewer, chance alone makes a count fall below
        pytest.skip("too few steps to count: run the whole file with the ci profile")
    shares = {name: 100 * TestPipeline.totals[name] / steps for name in RARE}
    assert min(shares.values()) >= 1, shares
    for name in ("offload", "restore"):
        assert TestOffload.totals[name] >= 0.003 * TestOffload.totals["steps"], name
