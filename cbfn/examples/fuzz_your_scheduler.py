"""A policy with a subtle bug, the shortest history that shows it, and the fix.

    pip install -e ".[testing]"
    python -m cbfn.examples.fuzz_your_scheduler

The policy wants to be fair: it offers decoding and prefilling requests in turns. In a project of
your own the machines below are tests: pytest collects them.
"""

from collections.abc import Iterable
from itertools import chain, zip_longest

try:
    from hypothesis import HealthCheck, Phase, settings
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError('it needs Hypothesis: pip install "cbfn[testing]"') from missing

from cbfn.config import EngineConfig
from cbfn.policies import Policy
from cbfn.state import BatchState
from cbfn.testing import machines
from cbfn.types import InvariantViolation, RequestId


def in_turns(state: BatchState) -> Iterable[RequestId]:
    """Decoding and prefilling requests in turns, then waiting ones. The bug is in `zip`."""
    return chain(*zip(state.decoding, state.prefilling, strict=False), state.waiting)


def in_turns_to_the_end(state: BatchState) -> Iterable[RequestId]:
    """The same, without dropping what has no partner."""
    pairs = chain(*zip_longest(state.decoding, state.prefilling))
    return chain((request_id for request_id in pairs if request_id is not None), state.waiting)


class InTurns(machines.SchedulerMachine):
    def make_policy(self, config: EngineConfig) -> Policy:
        return in_turns


class InTurnsToTheEnd(machines.SchedulerMachine):
    def make_policy(self, config: EngineConfig) -> Policy:
        return in_turns_to_the_end


def report(machine: type[machines.SchedulerMachine], examples: int = 200) -> str | None:
    """Returns what a machine finds, with the shortest history that shows it, or None."""
    machine.TestCase.settings = settings(
        max_examples=examples,
        stateful_step_count=30,
        phases=[Phase.generate, Phase.shrink],
        derandomize=True,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    try:
        machine("runTest").debug()
    except InvariantViolation as found:
        return "\n".join([str(found), "", *getattr(found, "__notes__", [])])
    return None


def main() -> None:
    """Prints what the machine finds in the policy and in the mended one."""
    for machine in (InTurns, InTurnsToTheEnd):
        print(f"--- {machine.__name__}")
        print(report(machine) or "200 histories, nothing found")


if __name__ == "__main__":
    main()
