"""What a user sees: a subclass is a test, and it finds what is wrong with a scheduler."""

import unittest
from dataclasses import replace
from itertools import chain

import numpy as np

from cbfn.testing import machines
from property_tests.verdict import verdict


def test_subclass_is_a_test_and_the_shipped_classes_are_none():
    for name in machines.__all__:
        shipped = getattr(machines, name)
        assert not shipped.__test__

        class Mine(shipped):
            pass

        assert Mine.__test__
        assert issubclass(Mine, unittest.TestCase)
        assert unittest.defaultTestLoader.loadTestsFromTestCase(Mine).countTestCases() == 1
        assert Mine("runTest")._testMethodName == "runTest"


def test_policy_that_forgets_prefilling_requests_is_found():
    class Mine(machines.SchedulerMachine):
        def make_policy(self, config):
            return lambda state: chain(state.decoding, state.waiting)

    assert verdict(Mine).startswith("progress: nothing is planned, and there is work: ")


def test_policy_that_starves_long_prompts_is_found():
    class Mine(machines.SchedulerMachine):
        def make_policy(self, config):
            def short_first(state):
                yield from state.decoding
                yield from state.prefilling
                yield from (i for i in state.waiting if len(state.request(i).prompt_token_ids) < 9)

            return short_first

    assert verdict(Mine).startswith("progress: ")


def test_leaked_chunks_are_found():
    class Mine(machines.SchedulerMachine):
        def cancel(self, state, request_id):
            after = super().cancel(state, request_id)
            return replace(after, cache=state.cache)

    assert verdict(Mine).startswith("owners: ")


def test_results_in_the_wrong_rows_are_found():
    class Mine(machines.PipelineMachine):
        def commit(self, state, plan, result, now=0.0):
            if result is not None and result.error is None:
                tokens = result.token_ids.copy()
                tokens[plan.samples] = tokens[plan.samples][::-1]
                result = replace(result, token_ids=tokens)
            return super().commit(state, plan, result, now)

    assert verdict(Mine).startswith(("tokens: ", "end: "))


def test_chunk_that_is_read_before_it_is_written_is_found():
    class Mine(machines.SchedulerMachine):
        def schedule(self, state, now=0.0):
            state, plan = super().schedule(state, now)
            if plan is not None and plan.starts.any():
                tables = plan.inputs.sequences.tables
                broken = {t: table.put(plan.inputs.seats, np.zeros(len(plan), np.int32), 0)
                          for t, table in tables.items()}  # fmt: skip
                sequences = replace(plan.inputs.sequences, tables=broken)
                changed = replace(plan, inputs=plan.inputs._replace(sequences=sequences))
                state = replace(state, uncommitted=(*state.uncommitted[:-1], changed))
                plan = changed
            return state, plan

    assert verdict(Mine).startswith(("reads: ", "writes: "))


def test_lost_cancel_is_found():
    class Mine(machines.SchedulerMachine):
        def cancel(self, state, request_id):
            return state if request_id in state.seats else super().cancel(state, request_id)

    assert verdict(Mine).startswith(("plan: ", "outputs: "))


def test_overshot_budget_is_found():
    class Mine(machines.SchedulerMachine):
        def init(self, spec, config):
            more = replace(config, max_batch_tokens=config.max_batch_tokens + 1)
            return super().init(spec, more)

    assert verdict(Mine).startswith(("token budget: ", "row budget: "))
