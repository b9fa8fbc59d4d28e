"""Tools to fuzz a scheduler: Hypothesis strategies, state machines and oracles.

    from cbfn.testing import machines

    class TestMine(machines.SchedulerMachine):
        def make_policy(self, config):
            return my_policy

pytest collects the class and runs it; a failure comes with the shortest history that shows it.
Nothing here imports torch. `strategies` and `machines` need Hypothesis, `oracles` only numpy.
"""
