"""The scheduler under any history, step by step and with a step in flight."""

from cbfn.testing import machines


class TestScheduler(machines.SchedulerMachine):
    """Every step is committed before the next is planned."""


class TestPipeline(machines.PipelineMachine):
    """A step is planned while the one before it runs."""


class TestCarryOver(machines.CarryOverMachine):
    """Tokens in flight reach the rows that they belong to."""
