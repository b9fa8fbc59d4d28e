"""The scheduler under any history, step by step and with a step in flight."""

import pytest
from hypothesis import settings

from cbfn.testing import machines

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


class TestCarryOver(machines.CarryOverMachine):
    """Tokens in flight reach the rows that they belong to."""


def test_what_is_rare_in_service_happens_in_one_step_of_a_hundred():
    steps = TestPipeline.totals["steps"]  # of the test above, in this process
    if steps < 10_000:
        pytest.skip("too few steps to count: run the whole file with the ci profile")
    shares = {name: 100 * TestPipeline.totals[name] / steps for name in RARE}
    assert min(shares.values()) >= 1, shares
