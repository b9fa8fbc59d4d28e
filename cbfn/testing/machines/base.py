"""What all machines share: a subclass is its own test."""

from __future__ import annotations

import sys
import unittest
from typing import Any, ClassVar

from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


class Machine(RuleBasedStateMachine, unittest.TestCase):
    """A rule-based state machine that pytest and unittest collect where it is subclassed.

    No `TestCase` attribute has to be fetched: the subclass itself is a test case, whose one test
    runs the machine. `settings` are set as usual, by a profile or by the decorator.
    """

    __test__: ClassVar[bool] = False  # the shipped classes are no tests of the module that imports

    def __init__(self, methodName: str | None = None) -> None:
        unittest.TestCase.__init__(self, "runTest")
        if methodName is None:  # made by Hypothesis, as a machine
            RuleBasedStateMachine.__init__(self)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__test__" not in vars(cls):
            cls.__test__ = True

        def runTest(self: Machine) -> None:  # noqa: N802
            run_state_machine_as_test(cls)

        runTest.__doc__ = cls.__doc__
        runTest.is_hypothesis_test = True  # type: ignore[attr-defined]
        runTest._hypothesis_state_machine_class = cls  # type: ignore[attr-defined]
        cls.runTest = runTest

    def teardown(self) -> None:
        """Calls `rest` unless the run has failed already: the first error is the one to show."""
        if sys.exc_info()[0] is None and not self._initialize_rules_to_run:
            self.rest()

    def rest(self) -> None:
        """What has to hold at the end of a run; subclasses extend it."""
