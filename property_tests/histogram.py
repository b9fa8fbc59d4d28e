"""Prints how often the rare things happen: `python -m property_tests.histogram [examples]`.

With `--offload`, in a world where memory is short and the host takes what is preempted.
"""

import sys
import time
from collections.abc import Mapping
from typing import Any

from hypothesis import HealthCheck, settings

from cbfn.testing import machines
from property_tests.worlds import OFFLOADING

ROUND = 500  # Hypothesis remembers every example of a run


def main(examples: int, world: Mapping[str, Any]) -> None:
    """Runs `PipelineMachine` on random histories and prints a table."""

    @settings(
        max_examples=min(examples, ROUND),
        stateful_step_count=50,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    class Counted(machines.PipelineMachine):
        """Nothing but the shipped machine."""

    for name, value in world.items():
        setattr(Counted, name, value)
    begin = time.perf_counter()
    for _ in range(-(-examples // ROUND)):
        Counted().runTest()
    seconds = time.perf_counter() - begin
    steps = Counted.totals["steps"]
    print(f"{steps} steps with a plan in {seconds:.0f} s, {1000 * seconds / steps:.2f} ms a step")
    for name, count in Counted.totals.most_common():
        print(f"{name:24}{count:10}{100 * count / steps:9.2f} %")


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if argument != "--offload"]
    chosen = OFFLOADING if "--offload" in sys.argv else {}
    main(int(arguments[0]) if arguments else 1000, chosen)
