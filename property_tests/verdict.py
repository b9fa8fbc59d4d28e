"""What a machine finds in a scheduler with a fault."""

import unittest

import pytest
from hypothesis import HealthCheck, Phase, settings


def verdict(machine, examples=400):
    """Returns what a machine's test raises, in words; the first finding, not the smallest.

    It is an InvariantViolation, or another AssertionError, of the core itself.
    """
    machine.TestCase.settings = settings(
        max_examples=examples,
        stateful_step_count=30,
        phases=[Phase.generate],
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    (test,) = unittest.defaultTestLoader.loadTestsFromTestCase(machine)
    with pytest.raises(AssertionError) as caught:
        test.debug()
    return str(caught.value)
